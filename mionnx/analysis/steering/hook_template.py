"""Kinds of hook points that have one vector a token in every layer, by their names."""

from functools import cache

from mionnx.errors import HookError, nearest
from mionnx.graph.hook_points import HookPoint, layer_of, short_names


def template_of(hook: str | HookPoint) -> tuple[str, str]:
    """The short name and template of a kind of hook point, one vector a token in every layer.

    Args:
        hook: "resid_post", "hook_resid_post" or "blocks.{i}.hook_resid_post"; of "post", "mlp.hook_post" too.
    """
    name, kinds = str(hook), _kinds()
    if (layer := layer_of(name)) is not None:
        raise HookError(f"{name} is in one layer, and a kind of hook point is asked for: layers=[{layer}] says where")
    if name not in kinds:
        raise HookError(f"no hook point {name!r} has one vector a token in every layer{nearest(name, kinds)}")
    return kinds[name]


@cache
def _kinds() -> dict[str, tuple[str, str]]:
    """Each name of such a kind of hook point -> its short name and its template."""
    kinds: dict[str, tuple[str, str]] = {}
    for short, templates in short_names().items():
        for template in templates:
            axes = HookPoint.parse(template.format(i=0)).axes or ()
            if "{i}" in template and axes[:2] == ("batch", "seq") and len(axes) == 3:
                names = (short, f"hook_{short}", template.removeprefix("blocks.{i}."), template)
                kinds |= dict.fromkeys(names, (short, template))
    return kinds

"""Layouts of what leaves, a file a layout, and `CLIENT_LAYOUTS`, which has them all by name."""

import pkgutil
from importlib import import_module

from mionnx.compile.layouts.layout import ClientLayout


def _layouts() -> dict[str, ClientLayout]:
    """An instance of every `ClientLayout` of this folder, by its name."""
    for module in sorted(entry.name for entry in pkgutil.iter_modules(__path__)):
        import_module(f"{__name__}.{module}")
    return {kind.name: kind() for kind in ClientLayout.__subclasses__() if kind.__module__.startswith(__name__)}


CLIENT_LAYOUTS = dict(sorted(_layouts().items(), key=lambda entry: (entry[0] != "plain", entry[0])))

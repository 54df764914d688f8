"""`LensPoint`: where a hook point of TransformerLens' bridge lies in a graph, and what a change there does."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from mionnx.graph.hook_points import HookPoint

# Names that a bridge has and its own forward pass never reaches, or reaches with what is no activation.
SILENT = ("attn.qkv.hook_in", "attn.qkv.hook_out", "rotary_emb.hook_out", "hook_pos_embed", "attn.hook_hidden_states")

# The flags with which its attention goes another way, and the names that this way does not reach.
BYPASSED = {
    "use_attn_result": ("attn.o.hook_out",),
    "use_split_qkv_input": ("attn.q.hook_in", "attn.k.hook_in", "attn.v.hook_in"),
    "use_attn_in": ("attn.q.hook_in", "attn.k.hook_in", "attn.v.hook_in"),
}

# Kinds of values on which no loss depends: what tokens alone tell, and what rotations read for its dtype.
WITHOUT_GRADIENT = ("ids", "positions", "cos", "sin", "for its dtype")
BEFORE = "stream before"  # the stream as one norm of several reads it
HEAD_COPIES = "input of "  # of a kind: a copy of the stream for each head, read by these projections


class LensPoint(NamedTuple):
    """One row of the table.

    Attributes:
        name: TransformerLens' own name, "blocks.3.ln2.hook_in".
        source: the hook point whose value it is, or is computed from.
        kind: what it is of the source; see `Coordinates`.
        norm: the norm that a kind is of, "ln1".
        replaces: a hook's change takes the source's place.
        lands: where else a change arrives. With `replaces`, what goes on past the layer there is left as it was, since
            TransformerLens' `ln2.hook_in` is what the MLP reads and not the stream; without, the change is added there.
        read_by: of what is computed to be read, whose gradients tell its own: hook points, and the weights of products
            that give these; "" for a value that is the same.
    """

    name: str
    source: str
    kind: str = "plain"
    norm: str = ""
    replaces: bool = True
    lands: str = ""
    read_by: tuple[tuple[str, str], ...] = ()

    @property
    def acts(self) -> bool:
        """Whether a hook can change it; else it is computed to be read."""
        return self.replaces or bool(self.lands)

    @property
    def landings(self) -> tuple[tuple[str, str], ...]:
        """Where else a change arrives: hook points, and the weights of the products that bring it there."""
        if self.kind.startswith(HEAD_COPIES):
            return self.read_by
        return ((self.lands, ""),) if self.lands else ()

    @property
    def goes_back(self) -> bool:
        """Whether it has a gradient here."""
        return bool(self.read_by) or self.acts

    @property
    def beside(self) -> str:
        """Of a pattern, the z that it gives."""
        return HookPoint.AttnZ(self.layer).name if self.kind == "pattern" else ""

    @property
    def layer(self) -> int:
        """The layer, 0 outside the blocks."""
        return int(self.name.split(".")[1]) if self.name.startswith("blocks.") else 0


LENS_LOGITS = LensPoint("unembed.hook_out", "hook_logits", "logits")


def lens_points(
    hooks: Collection[str],
    layers: int,
    names: Collection[str],
    posts: Collection[int] = (),
    bare: Collection[int] = (),
    headed: bool = False,
    adding: Collection[str] = (),
) -> list[LensPoint]:
    """The rows that a model and its bridge have, in the order in which a forward pass reaches them.

    Args:
        hooks: names of hook points of the model.
        names: those of the bridge.
        posts: layers that norm what they add (Gemma).
        bare: layers that read the stream without a norm (OLMo 2).
        headed: queries and keys are normed by themselves, head by head (Qwen 3).
        adding: "attn", "mlp", where the module itself adds the stream to what it gives (BLOOM).
    """
    rows = [*_before(names)]
    for layer in range(layers):
        rows += _layer(LayerParts(layer, layer in posts, layer in bare, headed, hooks, names, adding))
    rows += _behind(HookPoint.ResidPost(layers - 1).name)
    return [_served(row, hooks) for row in rows if row.name in names and row.source in hooks]


def _served(row: LensPoint, hooks: Collection[str]) -> LensPoint:
    """A row without what lies where a model has no hook point."""
    if not {name for name, _ in row.read_by} <= {*hooks}:
        row = row._replace(read_by=(), lands="" if row.kind.startswith(HEAD_COPIES) else row.lands)
    return row if not row.lands or row.lands in hooks else row._replace(replaces=False, lands="")


def bypassed(config: Any) -> tuple[str, ...]:
    """Ends of the names that the pass of a bridge with these flags does not reach."""
    return tuple(end for flag, ends in BYPASSED.items() if getattr(config, flag, False) for end in ends)


def _before(names: Collection[str]) -> Iterator[LensPoint]:
    first = HookPoint.ResidPre(0).name
    yield LensPoint("embed.hook_in", "hook_embed", "ids", replaces=False)
    if "embed_ln.hook_out" in names:  # the graph's embedding is what comes behind that norm
        for name in ("embed.hook_out", "embed_ln.hook_in"):
            yield LensPoint(name, "hook_embed", "rows", replaces=False)
        for kind in ("scale", "normalized"):
            yield LensPoint(f"embed_ln.hook_{kind}", "hook_embed", f"{kind} of rows", replaces=False)
        yield LensPoint("embed_ln.hook_out", "hook_embed", "stream")
    else:
        yield LensPoint("embed.hook_out", "hook_embed", "part")
    yield LensPoint("pos_embed.hook_in", "hook_embed", "positions", replaces=False)
    yield LensPoint("pos_embed.hook_out", "hook_pos_embed", "every row", replaces=False, lands=first)
    yield LensPoint("rotary_emb.hook_in", "hook_embed", "for its dtype", replaces=False)
    for part in ("cos", "sin"):
        yield LensPoint(f"rotary_emb.hook_{part}", "hook_embed", part, replaces=False)


def _norm(prefix: str, norm: str, source: str, *read_by: tuple[str, str]) -> Iterator[LensPoint]:
    for kind in ("scale", "normalized"):
        yield LensPoint(f"{prefix}{norm}.hook_{kind}", source, kind, norm, replaces=False, read_by=read_by)


class LayerParts(NamedTuple):
    """A layer: what its model and its bridge have; see `lens_points`."""

    number: int
    post: bool
    bare: bool
    headed: bool
    hooks: Collection[str]
    names: Collection[str]
    adding: Collection[str]

    @property
    def prefix(self) -> str:
        """What its names begin with."""
        return f"blocks.{self.number}."

    @property
    def streams(self) -> tuple[str, str, str]:
        """The stream before, between and behind its halves."""
        stream = f"{self.prefix}hook_resid_"
        return f"{stream}pre", f"{stream}mid", f"{stream}post"

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP read the same stream."""
        return self.streams[1] not in self.hooks


def _layer(layer: LayerParts) -> Iterator[LensPoint]:
    yield from _reads(layer)
    yield from _heads(layer)
    yield from _mlp(layer)


def _reads(layer: LayerParts) -> Iterator[LensPoint]:
    b, (pre, mid, _), parallel = layer.prefix, layer.streams, layer.parallel
    names, headed = layer.names, layer.headed
    yield LensPoint(f"{b}hook_in", pre, "stream")
    normed = f"{b}attn.q_norm.hook_out" in names  # then hook_q and hook_k are what comes behind that norm
    products = {part: (f"{b}attn.hook_{part}", f"W_{part.upper()}") for part in "qkv"}
    if normed:
        products |= {part: (f"{b}attn.hook_{part}", f"W_{part.upper()} of {part}_norm") for part in "qk"}
    products = products if headed or not normed else {}
    # One norm may serve attention and MLP.
    shared = ((f"{b}mlp.hook_pre", ""),) if parallel and f"{b}ln2.hook_in" not in names else ()
    if parallel:
        yield LensPoint(f"{b}ln1.hook_in", pre, BEFORE, "ln1", False, read_by=(*products.values(), *shared))
    else:
        yield LensPoint(f"{b}ln1.hook_in", pre, "stream", lands=mid)
    # BLOOM's copies are of what comes behind ln1, and nothing serves them.
    copied = {} if "attn" in layer.adding or layer.bare or normed else products
    for part, (place, _) in copied.items():
        reader = ((place, f"W_{part.upper()}"),)
        yield LensPoint(f"{place}_input", pre, HEAD_COPIES + part.upper(), "ln1", False, lands=place, read_by=reader)
    if copied:
        every = (*products.values(),)
        yield LensPoint(
            f"{b}attn.hook_attn_in", pre, f"{HEAD_COPIES}QKV", "ln1", False, lands=every[0][0], read_by=every
        )
    yield from _norm(b, "ln1", pre, *products.values(), *shared)
    of = ("stream", "") if layer.bare else ("norm of", "ln1")
    for name, more in (("ln1.hook_out", shared), ("attn.hook_in", ())):
        yield LensPoint(f"{b}{name}", pre, *of, False, read_by=(*products.values(), *more))
    for part in "qkv":
        readers = (products[part],) if products else ()
        yield LensPoint(f"{b}attn.{part}.hook_in", pre, *of, False, read_by=readers)
        if part in "qk" and normed and headed:
            yield from _before_head_norm(b, part, pre)
        name = f"{part}_norm" if normed and part != "v" else part
        kind = "values" if part == "v" else "plain" if normed and headed else "heads"
        for place in (f"{name}.hook_out", f"hook_{part}_normed"):
            yield LensPoint(f"{b}attn.{place}", f"{b}attn.hook_{part}", kind)
    for part in ("cos", "sin"):
        yield LensPoint(f"{b}attn.hook_{part}", pre, part, replaces=False)
    for part in ("rot_q", "rot_k"):
        yield LensPoint(f"{b}attn.hook_{part}", f"{b}attn.hook_{part}")


def _heads(layer: LayerParts) -> Iterator[LensPoint]:
    b, (_, mid, _), out = layer.prefix, layer.streams, f"{layer.prefix}hook_attn_out"
    post, names = layer.post, layer.names
    yield LensPoint(f"{b}attn.hook_attn_scores", f"{b}attn.hook_scores", "scores")
    yield LensPoint(f"{b}attn.hook_pattern", f"{b}attn.hook_pattern", "pattern")
    yield LensPoint(f"{b}attn.o.hook_in", f"{b}attn.hook_z", "z")
    yield LensPoint(f"{b}attn.hook_result", f"{b}attn.hook_z", "result", replaces=False, lands="" if post else out)
    inner = ("attn.hook_hidden_states",) if f"{b}attn.qkv.hook_in" in names else ()
    for name in ("attn.o.hook_out", *inner, "attn.hook_out"):
        sums = "attn" in layer.adding and name != "attn.o.hook_out"
        plain = LensPoint(f"{b}{name}", mid, "stream") if sums else LensPoint(f"{b}{name}", out, "part")
        yield plain if not post else _before_norm(f"{b}{name}", b, "projected")
    if post:
        for name, kind in (("in", ""), ("scale", "scale of "), ("normalized", "normalized of ")):
            yield _before_norm(f"{b}ln1_post.hook_{name}", b, f"{kind}projected")
    yield LensPoint(f"{b}ln1_post.hook_out", out, "part")


def _mlp(layer: LayerParts) -> Iterator[LensPoint]:
    b, (pre, mid, end), added = layer.prefix, layer.streams, f"{layer.prefix}hook_mlp_out"
    post, parallel = layer.post, layer.parallel
    read = pre if parallel else mid
    for name in ("hook_mlp_in", "ln2.hook_in"):
        if parallel:
            yield LensPoint(f"{b}{name}", read, BEFORE, "ln2", False, read_by=((f"{b}mlp.hook_pre", ""),))
        else:
            yield LensPoint(f"{b}{name}", read, "stream", lands=end)
    yield from _norm(b, "ln2", read, (f"{b}mlp.hook_pre", ""))
    for name in ("ln2.hook_out", "mlp.hook_in"):
        yield LensPoint(f"{b}{name}", f"{b}mlp.hook_pre", "plain" if layer.bare else "normed", "ln2")
    kind, norm = ("plain", "") if layer.bare else ("normed", "ln2")
    for name, product in (("gate", (f"{b}mlp.hook_gate", "W_gate")), ("in", (f"{b}mlp.hook_up", "W_in"))):
        yield LensPoint(f"{b}mlp.{name}.hook_in", f"{b}mlp.hook_pre", kind, norm, False, read_by=(product,))
    yield LensPoint(f"{b}mlp.gate.hook_out", f"{b}mlp.hook_gate")
    yield LensPoint(f"{b}mlp.in.hook_out", f"{b}mlp.hook_up")
    yield LensPoint(f"{b}mlp.out.hook_in", f"{b}mlp.hook_act")
    for name in ("mlp.out.hook_out", "mlp.hook_out"):
        if "mlp" in layer.adding and name == "mlp.hook_out":
            yield LensPoint(f"{b}{name}", end, "stream")
        else:
            yield LensPoint(f"{b}{name}", f"{b}mlp.hook_post" if post else added, "plain" if post else "part")
    if post:
        yield LensPoint(f"{b}ln2_post.hook_in", f"{b}mlp.hook_post")
        yield from _norm(b, "ln2_post", f"{b}mlp.hook_post", (added, ""))
    yield LensPoint(f"{b}ln2_post.hook_out", added, "part")
    yield LensPoint(f"{b}hook_out", end, "stream")


def _before_head_norm(block: str, part: str, stream: str) -> Iterator[LensPoint]:
    """Queries or keys before their norm, which the graph does not name: products of the stream."""
    place, kind, norm = f"{block}attn.hook_{part}", f"W_{part.upper()} product", f"{part}_norm"
    for end, of in ((f"{part}.hook_out", "heads of "), (f"{norm}.hook_in", "")):
        yield LensPoint(f"{block}attn.{end}", stream, f"{of}{kind}", norm, False, lands=place, read_by=((place, ""),))
    for of in ("scale", "normalized"):
        end = f"attn.{norm}.hook_{of}"
        yield LensPoint(f"{block}{end}", stream, f"{of} of {kind}", norm, False, read_by=((place, ""),))


def _before_norm(name: str, block: str, kind: str) -> LensPoint:
    """What heads add before a norm of its own (Gemma), which the graph does not name: computed of z."""
    out = f"{block}hook_attn_out"
    lands = out if kind == "projected" else ""
    return LensPoint(name, f"{block}attn.hook_z", kind, "ln1_post", False, lands=lands, read_by=((out, ""),))


def _behind(last: str) -> Iterator[LensPoint]:
    yield LensPoint("ln_final.hook_in", last, "stream")
    yield from _norm("", "ln_final", last, ("hook_final_norm", ""))
    for name in ("ln_final.hook_out", "unembed.hook_in"):
        yield LensPoint(name, "hook_final_norm", "normed", "ln_final")
    yield LensPoint("unembed.hook_out", "hook_logits", "logits")

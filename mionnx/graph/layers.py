"""`Layer`: attention, a recurrence, or both, and what a layer carries from one call to the next.

Metadata describe every layer; rooms ask a layer what it has, and never the model.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from mionnx.graph.io_names import KEYS_AND_VALUES, SHIFTED_STATE, STATE

Heads = tuple[int, int, int]  # of a layer: how many keys it keeps, the size of a key, the size of a value
OWN_SIZES = ("num_kv_heads", "head_dim", "value_dim")  # of `Attention`, not written where they are those of the model
RECURRENCE_RULES = ("", "gated", "delta")
# of what a token does to a state, and to the convolution before it
TERMS = ("write", "erase", "decay", "token_shift", "convolution")
STATE_SIZES = ("n_heads", "key_dim", "value_dim", "channels", "kernel")  # of `Recurrence`
SUMS = ("state", "wkv")  # parts that sum over the whole text: float32 in models of any dtype


@dataclass(frozen=True)
class Attention:
    """One layer's attention.

    Attributes:
        output_projection: name of the initializer of the output projection; empty where each token chooses its own, or
            where an MLP reads it and not the stream (Zamba).
        output_is_rows: True if it is stored [n_heads * head_dim, hidden], False if [hidden, n_heads * head_dim].
        sliding_window: how many keys a query sees, itself included; None if it sees all before it. Where tokens read
            both ways, as many on either side.
        num_kv_heads: keys and values that the layer keeps, 0 where it reads those of an earlier layer; None if as many
            as `Sizes` say.
        head_dim: size of a head's query and key; None if as `Sizes` say.
        value_dim: size of a head's value; None if that of its key.
    """

    output_projection: str
    output_is_rows: bool
    sliding_window: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None

    def to_entry(self) -> dict[str, Any]:
        """As metadata have it: sizes that are the model's are not written."""
        return {key: value for key, value in asdict(self).items() if value is not None or key not in OWN_SIZES}


@dataclass(frozen=True)
class Recurrence:
    """One layer's recurrence: S_t = exp(g_t) S_(t-1) + k_t (x) u_t, read as q_t S_t, and the convolution before it.

    Attributes:
        rule: what is written: "gated", the value; "delta", the value without what the state has at the key (or, of
            RWKV-7, has at a key of its own); empty where a convolution is all there is.
        n_heads, key_dim, value_dim: sizes of the state, [batch, n_heads, key_dim, value_dim]; 0 without one.
        channels, kernel: of a short convolution, which carries its last columns, [batch, channels, kernel - 1]; 0
            without one.
        token_shift: whether tokens are mixed with the one before, in both halves of the layer (RWKV): that token's
            stream, [batch, hidden], is carried for each.
        gates: the terms that state interventions can turn (`mionnx.bind.state_gates`): the graph has gates for these.
    """

    rule: str = ""
    n_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    channels: int = 0
    kernel: int = 0
    token_shift: bool = False
    gates: list[str] = field(default_factory=list)

    @property
    def has_state(self) -> bool:
        """Whether it sums over the text; a convolution alone does not."""
        return bool(self.rule)

    def to_entry(self) -> dict[str, Any]:
        """As metadata have it: what it lacks is not written."""
        return {key: value for key, value in asdict(self).items() if value}

    def parts(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """What it carries: name of a part -> its sizes behind batch."""
        state = (self.n_heads, self.key_dim, self.value_dim)
        if self.token_shift:
            return dict(zip(SHIFTED_STATE.parts, ((hidden,), state, (hidden,)), strict=True))
        columns = {STATE.parts[0]: (self.channels, self.kernel - 1)} if self.kernel else {}
        return columns | ({STATE.parts[1]: state} if self.has_state else {})


class CachePort(NamedTuple):
    """A part of what a layer carries: the graph input and output of it, and its sizes.

    Attributes:
        past, present: names of the input and the output.
        dims: sizes behind batch; None is the number of tokens before a call.
        sums: whether it sums over the whole text, in float32 whatever the model's dtype.
    """

    layer: int
    part: str
    past: str
    present: str
    dims: tuple[int | None, ...]
    sums: bool

    @property
    def positional(self) -> bool:
        """Whether it has an entry for each token: keys and values do."""
        return None in self.dims

    def shape(self, batch: int, past: int) -> tuple[int, ...]:
        """Its shape before a call: `past` tokens of `batch` rows."""
        return batch, *(past if dim is None else dim for dim in self.dims)


@dataclass(frozen=True)
class Layer:
    """One layer: its attention and its recurrence, as far as it has them; a layer may be an MLP alone."""

    attention: Attention | None = None
    recurrence: Recurrence | None = None

    @property
    def has_state(self) -> bool:
        """Whether it carries a state that sums over the text."""
        return self.recurrence is not None and self.recurrence.has_state

    def ports(self, layer: int, heads: Heads, hidden: int) -> list[CachePort]:
        """What it carries, in the order of the graph's inputs; `heads` are those of its attention."""
        ports = []
        if self.attention is not None:
            count, *widths = heads
            names = zip(KEYS_AND_VALUES.parts, KEYS_AND_VALUES.layer_inputs(layer), strict=True)
            outputs = zip(KEYS_AND_VALUES.layer_outputs(layer), widths, strict=True)
            ports += [
                CachePort(layer, part, past, present, (count, None, width), False)
                for (part, past), (present, width) in zip(names, outputs, strict=True)
            ]
        if self.recurrence is not None:
            for part, dims in self.recurrence.parts(hidden).items():
                past, present = (f"{prefix}.{layer}.{part}" for prefix in (STATE.past, STATE.present))
                ports.append(CachePort(layer, part, past, present, dims, part in SUMS))
        return ports

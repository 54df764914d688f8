"""`Layout`: the modules at hook points of one family, and words for its kind of attention and stream.

Names are `torch.nn.Module` paths as in the transformers library: relative to the model for `embedding`, `positions`,
`types`, `blocks`, `final_norm` and `shared` (of encoders to the model without its head); to the attention for
`output_projection`; to the MLP for its parts; to one block for others.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

# Positions without a module, whose number is a limit all the same, and embeddings that the model scales outside of one.
IN_CODE = "in the model's code"


@dataclass(frozen=True)
class Layout:
    """Modules and words of one family.

    Attributes:
        output_projection: "" where `attention_added` is it; None where there is no one for all tokens.
        attention_added, mlp_added: modules whose output joins the residual stream (a post-norm where there is one);
            None for the attention itself, and for the module whose output is the MLP's.
        middle: the module that first reads the stream between attention and MLP; None in parallel blocks.
        mlp: the MLP; "" where the block itself holds its parts, the first of which is `up`; None where there is none.
        mlp_output: the part of the MLP that gives its result; "" for the MLP itself.
        gate_and_up: one fused projection whose output is split in two, instead of `gate` and `up`.
        keys: "kept" as they are made, by transformers' `AttentionInterface`; made of "latents", kept as keys and values
            of that interface; or "own", by an attention in the family's own code, which is tapped as it runs. Encoders
            keep none: "own" are seen at their products, "split" as `transpose_for_scores` gives them. "none" in a model
            whose layers are all recurrent.
        rotation: of queries and keys "whole", of a "part" that attention cuts off before, or of the whole with
            "heads last": [batch, seq, n_heads, head_dim].
        z: `hook_z` is the outputs of "heads"; with a gate or a norm behind these, it is what the "projection" reads.
        stream: the "sum" of what blocks add, of "products" that a block computes outside of modules (or in parts), or
            "normed" between additions, and so no sum of what layers add.
        types: the table of token types. mid_norm, post_norm: norms of the stream behind its two additions, where it is
            normed there; what they read are hook points too.
        offset: the row of `positions` of a text's first token; None if it is the one behind the padding token's.
        shared: groups of layers that are run several times each (ALBERT), which the tracing writes out.
        parts: lists of parts of layers (XLM), which it gathers into blocks. channels_first: whether layers compute on
            [batch, channels, seq] (SqueezeBERT), for which it puts products on [batch, seq, channels].
        recurrent: the mixer of blocks that carry a state; blocks without it attend. mixer_output: the part of it that
            projects its output, from the mixer on. mixer_norms: whether norms stand in their blocks as in those that
            attend, or "before" each half as in Llama's.
        layers: how many a block holds, each with an attention and an MLP; `{number}` in a path is the number of one.
    """

    embedding: str | None = None
    positions: str | None = None
    blocks: str = "model.layers"
    final_norm: str | None = "model.norm"
    attention: str = "self_attn"
    output_projection: str | None = "o_proj"
    attention_added: str | None = None
    middle: str | None = "post_attention_layernorm"
    mlp: str | None = "mlp"
    mlp_output: str = ""
    mlp_added: str | None = None
    gate: str | None = "gate_proj"
    up: str | None = "up_proj"
    gate_and_up: str | None = None
    down: str | None = "down_proj"
    keys: Literal["kept", "latents", "own", "split", "none"] = "kept"
    rotation: Literal["whole", "part", "heads last"] = "whole"
    z: Literal["heads", "projection"] = "heads"
    stream: Literal["sum", "products", "normed"] = "sum"
    layers: int = 1
    types: str | None = None
    mid_norm: str | None = None
    post_norm: str | None = None
    offset: int | None = 0
    shared: str | None = None
    parts: tuple[str, ...] = ()
    channels_first: bool = False
    recurrent: str | None = None
    mixer_output: str = "out_proj"
    mixer_norms: Literal["alike", "before"] = "alike"

    def layer(self, number: int) -> "Layout":
        """The layout of one of the layers that a block holds."""
        fields: dict[str, Any] = asdict(self)
        paths = {name: value for name, value in fields.items() if "{" in str(value)}
        return replace(self, **{name: path.format(number=number) for name, path in paths.items()})

    def of_mixer(self) -> "Layout":
        """The layout of a block with a recurrent mixer."""
        if self.mixer_norms == "alike":
            return self
        return replace(self, attention_added=None, middle=Layout.middle, mlp_added=None)

    @property
    def projection(self) -> str | None:
        """The output projection, from the block on."""
        if self.output_projection == "":
            return self.attention_added
        return self.output_projection and f"{self.attention}.{self.output_projection}"

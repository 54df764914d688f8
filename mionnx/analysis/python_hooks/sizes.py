"""A model's sizes under the names that TransformerLens gives them."""

from dataclasses import dataclass

from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that analyses count with: `model.cfg`.

    Attributes:
        model_name: the folder's name.
        n_layers: blocks.
        n_heads: query heads a layer.
        n_key_value_heads: key/value heads a layer.
        d_model: width of the residual stream.
        d_head: width of a head.
        d_mlp: neurons a layer; None where the model has no hook points at them.
        d_vocab: tokens in the vocabulary.
        n_ctx: the longest text; None where there is no limit.
        dtype: of weights and activations, as numpy names it.
    """

    model_name: str
    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_model: int
    d_head: int
    d_mlp: int | None
    d_vocab: int
    n_ctx: int | None
    dtype: str


def sizes_of(model: HookedModel) -> ModelSizes:
    """The sizes of a hooked model."""
    sizes = model.metadata.sizes
    neurons = model.metadata.hooks.get(str(HookPoint.MlpAct(0)), [None])[-1]
    return ModelSizes(
        model_name=model.folder.name,
        n_layers=sizes.num_layers,
        n_heads=sizes.num_heads,
        n_key_value_heads=sizes.num_kv_heads,
        d_model=sizes.hidden_size,
        d_head=sizes.head_dim,
        d_mlp=neurons if isinstance(neurons, int) else None,
        d_vocab=sizes.vocab_size,
        n_ctx=sizes.max_positions,
        dtype=model.metadata.dtype,
    )

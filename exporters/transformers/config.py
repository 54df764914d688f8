"""The config of a checkpoint, as transformers itself reads it; sizes and limits in it.

Code that comes with a checkpoint is never run. `auto_map` in `config.json` names classes in the checkpoint's own `.py`
files: a checkpoint that says its architecture is one of transformers' own is opened with that one; any other with
`auto_map` is refused.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from optimum.utils import NormalizedConfigManager
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from exporters.config_sizes import check_sizes
from exporters.hooked_transformer.settings import HOOKED_TRANSFORMER
from exporters.transformers.encoder_families import is_encoder
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import inside, read_json
from mionnx.graph.sizes import Sizes, context_length

CONFIG_FILE = "config.json"
# our name -> (optimum's normalised name, the names configs use themselves)
_NAMES = {
    "num_layers": ("num_layers", ("num_hidden_layers", "n_layer", "num_layers")),
    "num_heads": ("num_attention_heads", ("num_attention_heads", "n_head", "num_heads")),
    "hidden_size": ("hidden_size", ("hidden_size", "n_embd", "d_model")),
    "vocab_size": ("vocab_size", ("vocab_size",)),
}
# Names under which configs say how many keys a query chooses; the graph holds attention to all of them.
SPARSE = ("keep_window_size", "index_topk")


def native_config(folder: Path) -> Any:
    """Read a checkpoint's config with transformers' own classes; one that needs its own code is refused."""
    try:
        table = read_json(inside(folder, CONFIG_FILE))
    except ModelError as error:
        raise ExportError(str(error)) from error
    if not isinstance(table, dict):
        raise ExportError(f"{folder / CONFIG_FILE} is damaged: it holds no table")
    check_sizes(table, folder / CONFIG_FILE)
    _check_code(table, folder)
    if table.get("model_type") == HOOKED_TRANSFORMER:  # which transformers learns of by the import of its classes
        import_module("exporters.transformers.hooked_transformer")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' errors share no base class
        raise ExportError(f"transformers does not read {folder / CONFIG_FILE}: {error}") from error


def _check_code(table: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint whose architecture is one of its own files."""
    if not table.get("auto_map"):
        return
    kind, named = table.get("model_type"), table.get("architectures") or []
    mappings = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    classes = [table.get(kind) for table in mappings] if isinstance(kind, str) else []
    own = {name for one in classes if one for name in ([one] if isinstance(one, str) else one)}
    if kind in CONFIG_MAPPING_NAMES and own and all(name in own for name in named):
        return
    what = f"the architecture {', '.join(map(str, named)) or kind!r}"
    raise ExportError(
        f"{folder} brings code of its own for {what} (config.json: auto_map). Code of a checkpoint is never run, and "
        f"transformers has no such architecture itself: save it as one that it has"
    )


def sizes_of(config: Any, learned_positions: bool, offset: int = 0) -> Sizes:
    """The sizes of a model config.

    Args:
        learned_positions: whether positions beyond the config's maximum have no embedding.
        offset: the first of them that a text has.

    Raises:
        ExportError: the config names a size in no way that optimum or mionnx knows.
    """
    named = {ours: _lookup(config, ours) for ours in _NAMES}
    heads, hidden = named["num_heads"], named["hidden_size"]
    layers = getattr(config, "per_layer_config", None)
    first = layers[0] if layers else config
    groups = 1 if getattr(first, "multi_query", False) else getattr(first, "num_key_value_heads", None) or heads
    return Sizes(
        **named,
        num_kv_heads=groups,
        head_dim=getattr(first, "head_dim", None) or hidden // heads,
        max_positions=_max_positions(config, learned_positions, offset),
    )


def _lookup(config: Any, ours: str) -> int:
    normalised, own = _NAMES[ours]
    try:
        view = NormalizedConfigManager.get_normalized_config_class(config.model_type)(config)
        value = getattr(view, normalised)
    except (KeyError, AttributeError):  # a family that optimum does not know, or a name that the family lacks
        value = None
    if isinstance(value, int):
        return value
    for name in own:
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    if ours == "num_heads" and hasattr(config, "state_size"):  # Mamba, whose channels are of one head
        return 1
    raise ExportError(f"the config of {config.model_type!r} names no {ours}; looked for {', '.join(own)}")


def _max_positions(config: Any, learned_positions: bool, offset: int) -> int | None:
    """Number of learned positions, or the limit of "longrope" and of sparse attention."""
    if learned_positions:
        length = context_length(config.to_dict())
        return None if length is None else length - offset
    limits = [
        rope["original_max_position_embeddings"]
        for rope in rope_parameters(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min([*limits, *kept_keys(config)], default=None)


def kept_keys(config: Any) -> list[int]:
    """Numbers of keys kept by sparse attention, in which a text of as many tokens is whole."""
    counts = [count for name in SPARSE if isinstance(count := getattr(config, name, None), int)]
    if "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ()):
        counts.append(config.index_topk_blocks * config.index_block_size)
    return counts


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotation's parameters, one entry a kind of layer; empty where there is none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [entry for entry in parameters.values() if isinstance(entry, dict)]


def sliding_window(config: Any, layer: int) -> int | None:
    """Number of keys that a query of a layer sees, itself included; None for all before it."""
    if hasattr(config, "attention_layers"):  # GPT-Neo
        return config.window_size if config.attention_layers[layer] == "local" else None
    window = getattr(config, "sliding_window", None)
    if window is None:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    # of encoders the farthest key on either side; a window counts the query itself
    return window + 1 if is_encoder(config) else window

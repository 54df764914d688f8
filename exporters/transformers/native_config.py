"""The config of a checkpoint as transformers itself reads it: code that comes with a checkpoint is never run.

`auto_map` in `config.json` names classes in the checkpoint's own `.py` files. A checkpoint that says its architecture
is one of transformers' own is opened with that one; any other with `auto_map` is refused.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from exporters.config_sizes import check_sizes
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import inside, read_json

CONFIG_FILE = "config.json"


def native_config(folder: Path) -> Any:
    """Read a checkpoint's config with transformers' own classes.

    Raises:
        ExportError: the checkpoint needs its own code, or transformers does not read the config.
    """
    try:
        table = read_json(inside(folder, CONFIG_FILE))
    except ModelError as error:
        raise ExportError(str(error)) from error
    if not isinstance(table, dict):
        raise ExportError(f"{folder / CONFIG_FILE} is damaged: it holds no table")
    check_sizes(table, folder / CONFIG_FILE)
    _check_code(table, folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' errors share no base class
        raise ExportError(f"transformers does not read {folder / CONFIG_FILE}: {error}") from error


def _check_code(table: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint whose architecture is one of its own files."""
    if not table.get("auto_map"):
        return
    kind, named = table.get("model_type"), table.get("architectures") or []
    architectures = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    own = {architectures} if isinstance(architectures, str) else {*(architectures or ())}
    if kind in CONFIG_MAPPING_NAMES and own and all(name in own for name in named):
        return
    what = f"the architecture {', '.join(map(str, named)) or kind!r}"
    raise ExportError(
        f"{folder} brings code of its own for {what} (config.json: auto_map). Code of a checkpoint is never run, and "
        f"transformers has no such architecture itself: save it as one that it has"
    )

"""Hugging Face decoder-only causal language models as hooked models.

One mechanism for every family: the model is built without weights, instrumented with taps (`taps`), traced to ONNX
(`trace`), simplified (`simplify`), its markers turned into value names (`naming`), and its weights referenced where
they lie in the checkpoint (`checkpoint`, `weights`).  What differs between families is a table (`families`).
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from exporters import adopt, gguf, rwkv
from exporters.packed import bits_of, quantization_of
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import inside, read_json
from mionnx.machine.progress import Progress, silent

if TYPE_CHECKING:
    from exporters.transformers.eager import Opened
    from mionnx.graph.blocks import GivenBlocks


DEQUANTISED = ("mxfp4",)  # values of quant_method of which transformers makes floats by itself
CHECKPOINT_CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # or the index of their shards


def recognises(folder: Path) -> bool:
    """Whether a folder holds a transformers checkpoint: a `config.json` with a `model_type`."""
    # RWKV is left to its own exporter, and so are ONNX and GGUF files without a checkpoint's weights. Cheap: torch and
    # transformers are not imported.
    try:
        named = isinstance(read_json(inside(folder, CHECKPOINT_CONFIG)).get("model_type"), str)
    except (ModelError, AttributeError):
        return False
    return named and not any(other.recognises(folder) for other in (rwkv, adopt, gguf))


def export(folder: Path, target: Path, dtype: str = "float32", progress: Progress = silent) -> None:
    """Write a checkpoint folder as a hooked model into an empty or new folder.

    Args:
        folder: a transformers checkpoint: `config.json`, safetensors (or `pytorch_model.bin`), tokenizer files.
        target: where `model.onnx`, the weights, the config and the tokenizer go.
        dtype: "float32", "float16", "bfloat16", or "auto" for the checkpoint's own. Weights already of this dtype are
            referenced in place, others converted one at a time.
        progress: called as (stage, done, total).

    Raises:
        ExportError: the family is unknown, or checkpoint and graph do not match tensor by tensor.
    """
    if not _has_weights(folder):  # before torch is imported, which takes longer than all of this
        raise ExportError(
            f"{folder} holds no weights: it has neither {' nor '.join(WEIGHTS)}, single or sharded. Its config alone "
            "becomes a graph to rewrite, compile and estimate: mionnx export --graph-only"
        )
    with _uncollected():
        from exporters.transformers.assemble import export_checkpoint

        export_checkpoint(folder, target, dtype, progress)


def packed_bits(folder: Path) -> int | None:
    """The bits of a checkpoint of GPTQ, AWQ or compressed-tensors, or None; torch is not imported."""
    quantization = quantization_of(folder)
    return None if quantization is None else bits_of(quantization)


def export_packed(folder: Path, target: Path, progress: Progress = silent) -> "Mapping[str, GivenBlocks]":
    """Write a checkpoint as `export` does in float32, without the numbers of its blocks; returns these by weight."""
    with _uncollected():
        from exporters.transformers.assemble import export_checkpoint

        return export_checkpoint(folder, target, "float32", progress, leave=True)


def export_graph(folder: Path, target: Path, dtype: str = "float32", progress: Progress = silent) -> None:
    """Write the graph of a config, without weights; arguments are those of `export`."""
    # It can be rewritten, compiled and estimated; running it is refused. Weights beside the config are not read, and
    # "auto" is the dtype that the config names.
    with _uncollected():
        from exporters.transformers.assemble import export_config

        export_config(folder, target, dtype, progress)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import and trace without garbage collections, which take a fifth of the time."""
    # What was made meanwhile counts as old afterwards: the next full collection looks at it, and no one before.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if collects:
            gc.enable()


def missing_eagerly(folder: Path) -> str | None:
    """Name what `open_eagerly` lacks for a checkpoint; None if nothing. Torch is not imported."""
    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed"
    if not _has_weights(folder):
        return f"{folder} has no weights that transformers reads"
    quantization = quantization_of(folder)
    method = quantization and quantization["quant_method"]
    if method and method not in DEQUANTISED:
        return f"transformers runs {method} by kernels of other packages: compare with a float32 export"
    return None


def _has_weights(folder: Path) -> bool:
    return any((folder / f"{name}{index}").exists() for name in WEIGHTS for index in ("", ".index.json"))


def open_eagerly(folder: Path, dtype: str, threads: int = 0) -> "Opened":
    """Load a checkpoint in eager torch, as transformers runs it; see `eager.open_checkpoint`."""
    from exporters.transformers.eager import open_checkpoint

    return open_checkpoint(folder, dtype, threads)

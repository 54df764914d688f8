"""`export_plain`: a checkpoint as a plain ONNX model in a client's layout, verified while it is written.

The file that is about to be delivered is run, a prompt and then decoding from its own cache, and compared with the
checkpoint in transformers' eager mode. A model of floats that differs is not written; of blocks, the card says by how
much. Where transformers cannot run the checkpoint, the file is compared with the hooked model, and the card says so.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.numerics.narrow_model import narrow_model
from mionnx.compile.compile_model import compile_plain
from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.errors import ExportError, InputError
from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.graph.io_names import PASTS, past_of
from mionnx.machine.progress import Progress
from mionnx.machine.softmax import log_softmax
from mionnx.run import exporting
from mionnx.run.runner import Runner

PROMPT_TOKENS, DECODED_TOKENS = 9, 4
# Largest difference of logits, of their largest: float32 as two runtimes sum, narrower types as they round.
LOGIT_TOLERANCES = {"float32": 5e-5, "float16": 2e-2, "bfloat16": 1e-1}
Logits = NDArray[Any]


def export_plain(
    checkpoint: Path, folder: Path, layout: str, dtype: str, progress: Progress, texts: Sequence[str] = ()
) -> Path:
    """Write a plain model of a checkpoint, without hook outputs.

    Args:
        layout: a name in `mionnx.compile.layouts.CLIENT_LAYOUTS`.
        dtype: "float32", "float16", "bfloat16", "int4", "int8" or "auto".
        texts: with a dtype of 16 bits, what overflows on them is rescaled; without any, the weights are cast.

    Returns:
        the folder.

    Raises:
        ExportError: no exporter knows the checkpoint, or what was written differs from it.
        InputError: what the layout's client cannot run, or an encoder.
        ModelError: the folder exists or cannot be written.
    """
    if folder.exists():
        raise ExportError(f"{folder} exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", suffix=".partial") as scratch:
        hooked_folder = Path(scratch) / checkpoint.resolve().stem
        if texts:
            export_narrowed(checkpoint, hooked_folder, dtype, texts, progress)
        else:
            exporting.export(checkpoint, hooked_folder, dtype, progress)
        hooked = HookedModel.open(hooked_folder)
        if hooked.metadata.reads_whole:
            raise InputError(
                f"{checkpoint} reads each text whole, and what leaves at once is checked by its next tokens: export it "
                f"first, then `mionnx compile FOLDER -o {folder} --plain --layout {layout}`"
            )
        return compile_plain(hooked, folder, layout, lambda graph: _verify(graph, hooked, checkpoint), progress)


def export_narrowed(checkpoint: Path, folder: Path, dtype: str, texts: Sequence[str], progress: Progress) -> Path:
    """Export in float32, and narrow that with the remedy that the texts ask for; a hooked model."""
    if folder.exists():
        raise ExportError(f"{folder} exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", suffix=".partial") as scratch:
        wide = Path(scratch) / "float32"  # weights are linked: the same disk
        exporting.export(checkpoint, wide, "float32", progress)
        return narrow_model(Runner(HookedModel.open(wide)), folder, dtype=dtype, texts=texts)


def _verify(graph: Path, hooked: HookedModel, checkpoint: Path) -> dict[str, Any]:
    """Compare a graph with its checkpoint; what the card says of it."""
    ids = np.random.default_rng(0).integers(0, hooked.metadata.sizes.vocab_size, PROMPT_TOKENS + DECODED_TOKENS)
    logits = _logits(graph, ids, PROMPT_TOKENS)
    oracle, against = _oracle(hooked, checkpoint)
    if hooked.metadata.dtype == "float16" and not hooked.metadata.narrowed:
        against += (
            " (on a CPU, which computes float16 in float32 mostly: what overflows elsewhere, `mionnx doctor` says)"
        )
    expected = oracle(ids).astype(np.float32)
    scale, dtype = max(1.0, float(np.abs(expected).max())), hooked.metadata.weight_dtype
    infinite = int((~np.isfinite(logits)).any(-1).sum())
    if infinite:
        cure = "; with --text what overflows on a text is rescaled" * (dtype in ("float16", "bfloat16"))
        raise ExportError(f"logits of {infinite} of {len(logits)} tokens are not finite in {dtype}: not written{cure}")
    parts = {"prompt": slice(PROMPT_TOKENS), "decoding": slice(PROMPT_TOKENS, None)}
    rows = [[title, str(len(logits[part])), *_row(logits[part], expected[part])] for title, part in parts.items()]
    worst = float(np.abs(logits - expected).max()) / scale
    if worst > LOGIT_TOLERANCES.get(dtype, np.inf):
        raise ExportError(
            f"the file differs from {against} by {worst:.1e} of the largest logit, more than "
            f"{LOGIT_TOLERANCES[dtype]:.0e}: it is not written"
        )
    return {"against": against, "rows": rows}


def _row(logits: Logits, expected: Logits) -> list[str]:
    """Largest difference of logits, mean KL divergence, and how many tokens have the same next token at the top."""
    ours, theirs = (log_softmax(one.astype(np.float64)) for one in (logits, expected))
    kl = float((np.exp(theirs) * (theirs - ours)).sum(-1).mean())
    same = int((logits.argmax(-1) == expected.argmax(-1)).sum())
    return [f"{np.abs(logits - expected).max():.1e}", f"{abs(kl):.1e}", f"{same} of {len(logits)}"]


def _oracle(hooked: HookedModel, checkpoint: Path) -> tuple[Callable[[Logits], Logits], str]:
    """Logits of one text by the checkpoint in transformers, or by the hooked model where that cannot run it."""
    exporter = exporting.exporter_for(checkpoint)
    absent = "no eager model of this family"
    if hasattr(exporter, "open_eagerly"):
        absent = exporter.missing_eagerly(checkpoint)
    if absent:
        return lambda ids: _logits(hooked.folder / GRAPH, ids, len(ids)), f"the hooked model ({absent})"
    dtype = hooked.metadata.reference_dtype
    forward = exporter.open_eagerly(checkpoint, dtype, 1)

    def logits(ids: Logits) -> Logits:
        values: dict[str, Logits] = {}
        ones = np.ones((1, len(ids)), np.int64)
        inputs = (ids[None], ones, ones.cumsum(1) - 1)
        forward(inputs, lambda name, value: values.update({name: value}))
        return values["hook_logits"][0]

    return logits, f"the checkpoint in transformers, eager, {dtype}"


def _logits(graph: Path, ids: Logits, prompt: int) -> Logits:
    """Logits of a prompt of so many tokens and of those after it, one a call, from the file's own cache."""
    proto = onnx_file.read(graph)
    outputs = [value.name for value in proto.graph.output]
    ports = {value.name: value for value in proto.graph.input}
    options = Options(threads=1)
    with engine_of(options).opened_alone(proto.SerializeToString(), graph.parent, options) as program:
        past = {name: _empty(value) for name, value in ports.items() if name.startswith(PASTS)}
        logits, length = [], 0
        for new in (ids[None, :prompt], *ids[prompt:, None, None]):
            length += new.shape[1]
            positions = np.arange(length)[None, -new.shape[1] :]
            feeds = {"input_ids": new, "attention_mask": np.ones((1, length), np.int64), "position_ids": positions}
            feeds["mionnx.token_positions"] = positions
            values = program.run(outputs, {name: array for name, array in (feeds | past).items() if name in ports})
            logits.append(values["logits"][0].astype(np.float32))
            past = {before: value for name, value in values.items() if (before := past_of(name)) is not None}
    return np.concatenate(logits)


def _empty(value: onnx_file.ValueInfoProto) -> NDArray[Any]:
    """A past of no tokens: batches of one, and 0 along any other axis that is not fixed."""
    dims = value.type.tensor_type.shape.dim
    sizes = [dim.dim_value if dim.HasField("dim_value") else int(dim.dim_param.startswith("batch")) for dim in dims]
    return np.zeros(sizes, onnx_file.dtype_of(value))

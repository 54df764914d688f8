"""`TranscoderSet`: a transcoder for each layer of a model, read from the files of those who train them."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.analysis.features.sae import SAE
from mionnx.analysis.features.transcoder import Transcoder
from mionnx.analysis.features.transcoder_files import MOST_TRANSCODERS, files_of, hooks_of, of_sae, read_transcoder
from mionnx.errors import HookError, InputError, ModelError
from mionnx.graph.folder_file import LARGEST_BESIDE, check_regular
from mionnx.machine.ranges import index_within
from mionnx.machine.typed import typed
from mionnx.run.source_path import shipped_models

CONFIG = "config.yaml"
OWN_SET = "transcoders"  # folder of a set in its model's folder
ENTRY = re.compile(r"(?m)^(feature_input_hook|feature_output_hook|scan):[ \t]*[\"']?([^\"'#\n]*?)[\"']?[ \t]*(?:#.*)?$")
NORMED_INPUT = "blocks.{}.ln2.hook_normalized"  # the norm's output without its weight: no hook point of a graph
# Names of circuit-tracer's, which are TransformerLens', -> hook points.
HOOKS = {
    "mlp.hook_in": "blocks.{}.mlp.hook_pre",
    "mlp.hook_out": "blocks.{}.mlp.hook_post",
    "hook_resid_mid": "blocks.{}.hook_resid_mid",
    "hook_mlp_out": "blocks.{}.hook_mlp_out",
    "ln2.hook_normalized": NORMED_INPUT,
}


@typed(InputError)
class TranscoderSet:
    """A transcoder for each layer, whose features stand for what the MLPs write (Ameisen et al. 2025).

    Attributes:
        hook, hook_out: the hook points that features read and stand for, with "{}" for the layer.
        scan: the name by which a page of features knows them; empty if the files do not say.
    """

    def __init__(self, layers: Sequence[SAE], hook: str = "", hook_out: str = "", scan: str = "") -> None:
        """Put transcoders together that were read one by one, layer 0 first.

        Args:
            layers: transcoders, each an `SAE` with its own output.
            hook, hook_out: see `TranscoderSet.load`; by default those of the first.
            scan: the name by which a page of features knows them.

        Raises:
            ModelError: SAEs that are no transcoders of ReLU or JumpReLU features, or of unequal widths.
            HookError: no hook points.
        """
        if not layers:
            raise InputError("a set of no transcoders: give one for each layer")
        own = layers[0].config.hook, layers[0].config.hook_out
        readers = [partial(of_sae, sae, f"layer {i}") for i, sae in enumerate(layers)]
        self._settle(readers, hook or own[0], hook_out or own[1], scan)

    @classmethod
    def load(cls, path: str | Path, hook: str = "", hook_out: str = "") -> "TranscoderSet":
        """Open the transcoders of a folder; their matrices stay on disk, and rows are read when they are needed.

        Args:
            path: a folder of circuit-tracer's (one layer, across layers), Gemma Scope's, Gemma Scope 2's, SAELens' or
                sparsify's transcoders, with one file or folder a layer; or the folder of a model, or the name of one
                that ships, with such a folder in it, named "transcoders".
            hook: the hook point that features read, as "mlp.hook_pre", where the files do not say, or say another.
            hook_out: the hook point that they stand for, as "hook_mlp_out".

        Raises:
            ModelError: nothing there, a missing layer, a damaged file, or an architecture that is not known here.
            HookError: no hook points.

        Example:
            transcoders = TranscoderSet.load("transcoders/llama", hook="mlp.hook_pre", hook_out="hook_mlp_out")
            TranscoderSet.load("world-llama")  # the set in that model's folder
        """
        folder = Path(path)
        if not folder.is_dir():
            folder = shipped_models().get(str(path), folder)
        if (folder / OWN_SET).is_dir():
            folder = folder / OWN_SET
        if not folder.is_dir():
            raise ModelError(f"{folder} is no folder of transcoders")
        files = files_of(folder)
        if len(files) > MOST_TRANSCODERS:
            raise ModelError(f"{folder} has transcoders of {len(files)} layers")
        config = folder / CONFIG
        entries: dict[str, str] = {}
        if config.is_file():
            check_regular(config, LARGEST_BESIDE)
            entries = dict(ENTRY.findall(config.read_text("utf-8", errors="replace")))
        own = hooks_of(files[0])
        one = cls.__new__(cls)
        one._settle(
            [partial(read_transcoder, file, layer) for layer, file in files.items()],
            hook or entries.get("feature_input_hook", "") or own[0],
            hook_out or entries.get("feature_output_hook", "") or own[1],
            entries.get("scan", ""),
        )
        return one

    def _settle(self, readers: Sequence[Callable[[], Transcoder]], hook: str, hook_out: str, scan: str) -> None:
        for name, point in (("hook", hook), ("hook_out", hook_out)):
            if not point:
                what = "read" if name == "hook" else "stand for"
                raise HookError(f"the files do not say what features {what}: TranscoderSet.load(path, {name}='...')")
        self._mapped: dict[int, Transcoder] = {}
        self.hook, self.hook_out, self.scan, self._readers = _pattern(hook), _pattern(hook_out), scan, tuple(readers)
        layers = [self.layer(i) for i in range(len(self))]
        self.d_in, self.d_out = layers[0].encoder.shape[1], layers[0].decoder.shape[2]
        self.skips = layers[0].skip is not None
        written = [one.decoder.shape[1] for one in layers]
        self.across = len(self) > 1 and written[0] > 1
        for i, one in enumerate(layers):
            if (one.encoder.shape[1], one.decoder.shape[2]) != (self.d_in, self.d_out):
                raise ModelError(f"layer {i} is of width {one.encoder.shape[1]}, and layer 0 of {self.d_in}")
            if (one.skip is not None) != self.skips:
                raise ModelError(f"layer {i} and layer 0: one has a skip connection, and the other has none")
            if written[i] != (len(self) - i if self.across else 1):
                raise ModelError(f"layer {i} writes to {written[i]} layers, of {len(self)}")

    def layer(self, number: int) -> Transcoder:
        """One layer's transcoder; what is no mapped file is read anew each time, so that it does not stay in memory."""
        number = index_within("layer", number, len(self))
        if number in self._mapped:
            return self._mapped[number]
        one = self._readers[number]()
        if isinstance(one.encoder, np.memmap):
            self._mapped[number] = one
        return one

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mapped": {}}  # a pickle has the files' names, and no numbers of theirs

    def __len__(self) -> int:
        return len(self._readers)

    def __repr__(self) -> str:
        kind = "across layers" if self.across else "a layer each"
        return f"TranscoderSet({len(self)} layers, {kind}, width {self.d_in}, {self.hook} to {self.hook_out})"


def _pattern(hook: str) -> str:
    """A hook point of every layer, with "{}" for the layer."""
    name = re.sub(r"^blocks\.(?:\d+|\*|\{i?\})\.", "", hook)
    return HOOKS.get(name, f"blocks.{{}}.{name}")

"""`TextsRun`: a model's plain graph, its texts, and runs of variants of it, text by text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.quantisation.windows import Ids, calls_of, digest, own_text, windows
from mionnx.bind.bound_spec import bind
from mionnx.engine.engine import Arrays, Program
from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress
from mionnx.rewrite import rewrite
from mionnx.rewrite.float_graph import FloatGraph
from mionnx.rewrite.plan import Outputs
from mionnx.run.predictions import distributions
from mionnx.run.prompt import token_text
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

Run = Iterator[tuple[int, Arrays]]


class TextsRun:
    """A model without cache outputs, on the CPU, and the windows of texts that it is run on.

    Attributes:
        ids: windows of tokens, [1, seq] each.
        own: whether the model wrote the texts itself.
    """

    def __init__(self, model: Runner, texts: str | Sequence[str] | None, progress: Progress) -> None:
        model.hooked.need_weights("measuring its numbers")
        self.hooked: HookedModel = model.hooked
        self.ids: list[Ids] = own_text(model, "texts=") if texts is None else windows(model, texts)
        if texts is None:  # rows of one window: a row by itself has no padding and a position of its own
            self.ids = [row[None] for pair in self.ids for row in pair]
        self.own = texts is None
        self.calls: list[TokenBatch] = calls_of(model, self.ids)
        self._model, self.progress = model, progress
        self.options = Options(threads=model.options.threads)

    @cached_property
    def tokens(self) -> list[list[str]]:
        """The tokens of each window, as text; numbers without a tokenizer."""
        return [[token_text(self._model, token) for token in one[0].tolist()] for one in self.ids]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts on the texts, for the record."""
        sizes = {"texts": len(self.ids), "tokens": int(sum(one.size for one in self.ids))}
        return {"text": "own" if self.own else "given", "text_sha256": digest(self.ids), **sizes}

    @cached_property
    def bound(self) -> Any:
        """The empty spec on the model, without the outputs of a cache."""
        return bind(HookSpec(), self.hooked, Outputs(carried=False))

    @cached_property
    def graph(self) -> FloatGraph:
        """The graph, with the types of its values."""
        written, _ = rewrite(self.hooked.proto, self.bound.plan, self.hooked.metadata)
        return FloatGraph(onnx_file.parse(written), self.hooked.metadata.hooks)

    def feeds(self, call: TokenBatch) -> Arrays:
        """The inputs of a window, with an empty past."""
        return {name: np.asarray(value) for name, value in self.bound.inputs(call).items()}

    @contextmanager
    def opened(self, proto: Any, options: Options | None = None, *, in_order: bool = False) -> Iterator[Program]:
        """Open a variant of the graph; `in_order` as in `Engine.opened_alone`."""
        own = options or self.options
        model = proto if isinstance(proto, bytes) else proto.SerializeToString()
        with engine_of(own).opened_alone(model, self.hooked.folder, own, in_order=in_order) as program:
            yield program

    def run(self, program: Program, outputs: Sequence[str], stage: str, **more: NDArray[Any]) -> Run:
        """Run every window, and give its outputs."""
        for number, call in enumerate(self.calls):
            self.progress(stage, number, len(self.calls))
            yield number, program.run(outputs, self.feeds(call) | more)

    @property
    def vectors(self) -> bool:
        """Whether the model gives vectors or numbers, not logits of probabilities."""
        return not self.hooked.metadata.has_distribution

    def predictions(self, outputs: Arrays) -> NDArray[Any]:
        """The logits among the outputs of a window, [..., choices], or its vectors, [..., width]."""
        return outputs[LOGITS] if self.vectors else distributions(outputs[LOGITS], self.hooked.metadata)

    def logits(self, proto: Any, stage: str) -> Iterator[NDArray[Any]]:
        """The logits of every window's predictions, [..., choices], or its vectors."""
        with self.opened(proto) as program:
            for _, outputs in self.run(program, [LOGITS], stage):
                yield self.predictions(outputs)

"""`BoundSpec`: a spec on a model, checked once; it has the plan of the graph and makes the inputs of a token batch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from numpy.typing import NDArray

from mionnx.bind.effect import (
    ByRow,
    ShownValues,
    refuse_idle_in,
    refuse_idle_states,
    refuse_idle_structure,
)
from mionnx.bind.estimate import Estimate, estimate_of
from mionnx.bind.gradients import bind_gradients, gradients_of, metric_of, read_by, refuse_metric
from mionnx.bind.hook_index import HookIndex, index_hooks
from mionnx.bind.knockout_mask import end_of
from mionnx.bind.logit_selection import Logits
from mionnx.bind.plan import BoundCapture, NamedRequest, bind_captures, edits_of, in_order
from mionnx.bind.selection import Selection, reads_keys
from mionnx.bind.state_gates import gates_of, hides, shown_in, states_of
from mionnx.bind.values import capture_inputs, columns, edit_inputs
from mionnx.graph.axes import dynamic_sizes, shape_of
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.lacking import refuse_padding
from mionnx.inputs.layer_cache import Value
from mionnx.inputs.past import past_inputs, present_names
from mionnx.inputs.token_batch import Past, Positions, TokenBatch
from mionnx.rewrite.plan import METRIC, TOP_IDS, CaptureNode, Edit, Outputs, Plan
from mionnx.spec.hook_choice import Capture, resolve
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.metric import MetricSpec

ALL_LOGITS = Logits()
REMEMBERED = 64  # sets of capture requests whose meaning a binder remembers, and sizes whose estimate a spec does


@dataclass(frozen=True)
class BoundSpec:
    """A spec on a model."""

    spec: HookSpec  # each of its interventions at one hook point
    model: HookedModel
    hooks: HookIndex
    captures: tuple[BoundCapture, ...]
    plan: Plan
    logits: Logits | None = None  # the part of the logits to compute; None for all of them, or none at all
    gradients: tuple[BoundCapture, ...] = ()

    @cached_property
    def edits(self) -> list[tuple[Edit, Intervention]]:
        """Each edit of the plan with the intervention that it comes from."""
        return [(edit, one) for edit, (_, one) in zip(self.plan.edits, self.hooks.interventions, strict=True)]

    @cached_property
    def _hiding(self) -> bool:
        """Whether it hides tokens from all layers."""
        return any(hides(state, self.model.metadata) for state in states_of(self.spec))

    @cached_property
    def weights(self) -> dict[str, NDArray[Any]]:
        """Inputs with the weights of splices, the same in every pass."""
        return {
            edit.weight_input(name): array
            for edit, one in self.edits
            if one.fragment is not None
            for name, array in one.fragment.weights.items()
        }

    def on(self, batch: TokenBatch) -> "BoundSpec":
        """The same spec, in the structure that a batch needs."""
        # An input says which scores and pattern entries are of texts: all others stay as they are. Padded batches of
        # any shape share that structure, and those without padding have nothing of it.
        bound = self.sparing_padding() if batch.padded or self._hiding else self
        outputs, part = self.plan.outputs, self.logits
        # logits of position -1 are the last column's, except where a text ends before it
        if outputs.last and part is not None and (columns("logits", part.positions_, batch) != batch.seq - 1).any():
            return bound.with_outputs(replace(outputs, last=False, at_positions=True))
        return bound

    def sparing_padding(self) -> "BoundSpec":
        """The same spec with an input at scores and patterns: their entries that are not of padding."""
        edits = [replace(edit, masked=edit.masked or reads_keys(edit, one)) for edit, one in self.edits]
        return replace(self, plan=replace(self.plan, edits=tuple(edits)))

    def with_outputs(self, outputs: Outputs) -> "BoundSpec":
        """The same spec with other outputs of the model."""
        return replace(self, plan=replace(self.plan, outputs=outputs))

    def touches(self, point: HookPoint) -> bool:
        """Whether the spec captures or changes the value at a hook point."""
        edited = (edit.hook for edit in self.plan.edits)
        return point.name in {*edited, *(capture.node.hook for capture in self.captures)}

    def values(self, batch: TokenBatch) -> dict[str, NDArray[Any]]:
        """Inputs with the values, positions and masks of the interventions."""
        return self._edit_inputs(self.selections(batch), batch)

    def _edit_inputs(self, selections: Sequence[Selection], batch: TokenBatch) -> dict[str, NDArray[Any]]:
        return edit_inputs(selections, self.hooks, batch, shown_in(batch, self.spec, self.model.metadata))

    def selections(self, batch: TokenBatch) -> list[Selection]:
        """The part of one token batch that each intervention selects."""
        sizes, experts = dynamic_sizes(batch.batch, batch.seq, batch.total), self.model.metadata.sizes.n_experts
        shown = shown_in(batch, self.spec, self.model.metadata) if self._hiding else None
        return [
            Selection(edit, one, shape_of(self.hooks.dims(HookPoint.parse(edit.hook)), sizes), batch, experts, shown)
            for edit, one in self.edits
        ]

    def inputs(
        self, batch: TokenBatch, past: Past | None = None, use_cache: bool = False, checked: bool = False
    ) -> dict[str, Value]:
        """All inputs of a pass: tokens, past, values, positions, masks, weights, gates, parts."""
        selections = self.selections(batch)
        edits = {**self._edit_inputs(selections, batch), **self.weights} if selections else {}
        inputs = self.step_inputs(batch, past_inputs(self.model, past, batch), edits)
        if not checked:
            self.refuse_idle(batch, use_cache, selections=selections)
        return inputs

    def check(self, batch: TokenBatch, use_cache: bool) -> None:
        """Check the spec on the rows of a batch that will run in several parts."""
        selections = self.selections(batch)
        if selections:
            self._edit_inputs(selections, batch)
        gates_of(self.spec, batch, self.model.metadata)
        capture_inputs((*self.captures, *self.gradients), batch)
        self.refuse_idle(batch, use_cache, selections=selections)

    def refuse_idle(
        self,
        batch: TokenBatch,
        use_cache: bool,
        logits: ByRow | None = None,
        selections: Sequence[Selection] | None = None,
    ) -> None:
        """Refuse interventions without effect in a pass, or in the generation that it begins."""
        if not self.edits and not states_of(self.spec):
            return
        places = {} if logits is None else {LOGITS: logits}
        if logits is None and self.logits is not None and self.logits.positions is not None:
            places = {LOGITS: _in_text(self.logits.positions_, batch)}
        for capture in self.captures:
            if capture.request.positions is not None:
                places[capture.node.output] = _in_text(capture.request.positions, batch)
        outputs = self.plan.outputs
        if not self.model.metadata.positional:
            places = {**self._tokens_read(batch), **places}
        carried = outputs.carried and (use_cache or self.model.metadata.state_alone)
        # token shifts of a state intervention may skip tokens: a channel mix then reads any token before
        ends = {} if states_of(self.spec) else {row: end_of(batch, row) for row in range(batch.batch)}
        shown = ShownValues(self.plan.captures, outputs.logits, carried, places, ends)
        selections = self.selections(batch) if selections is None else selections
        refuse_idle_in(selections, self.plan, shown, self.model)
        refuse_idle_states(self.spec, self.edits, shown, self.model, batch)

    def _tokens_read(self, batch: TokenBatch) -> dict[str, ByRow]:
        """Output -> text positions of the tokens that it is made of, where that is the first or last of each text."""
        sources = {node.output: HookPoint.parse(node.hook).source.name for node in self.plan.captures}
        sources[LOGITS] = self.model.metadata.main_point
        tokens = {name: self.model.influence.token_read(source) for name, source in sources.items()}
        at = {"first": [[0]] * batch.batch, "last": [[end_of(batch, row) - 1] for row in range(batch.batch)]}
        return {name: dict(enumerate(at[token])) for name, token in tokens.items() if token is not None}

    def step_inputs(self, batch: TokenBatch, past: Mapping[str, Value], edits: Mapping[str, Value]) -> dict[str, Value]:
        """As `inputs`, with the inputs of the past, and of `values` and `weights`, at hand."""
        refuse_padding(self.model, batch)
        inputs: dict[str, Value] = {**batch.feeds(), **past, **edits}
        inputs |= gates_of(self.spec, batch, self.model.metadata)
        inputs |= capture_inputs((*self.captures, *self.gradients), batch)
        return inputs if self.logits is None else {**inputs, **self.logits.feeds(batch, self.model.metadata)}

    def outputs(self, use_cache: bool) -> list[str]:
        """Names of the outputs to fetch: logits, captures, and the past of the next pass."""
        outputs = self.plan.outputs
        names = [*(["logits"] if outputs.logits else []), *([TOP_IDS] if outputs.ranked else [])]
        names += [capture.node.fetched for capture in (*self.captures, *self.gradients)]
        names += [METRIC] if self.plan.gradients is not None else []
        return [*names, *(present_names(self.model, use_cache) if outputs.carried else [])]

    def estimate(self, batch: int, seq: int, total: int) -> Estimate:
        """Bytes of the captures of a pass; `total` counts past and new tokens."""
        memo = self._estimates  # a call asks several times, and the next call again
        if (batch, seq, total) not in memo:
            if len(memo) >= REMEMBERED:
                memo.clear()
            captures = (*self.captures, *self.gradients)
            memo[batch, seq, total] = estimate_of(captures, dynamic_sizes(batch, seq, total))
        return memo[batch, seq, total]

    @cached_property
    def _estimates(self) -> dict[tuple[int, int, int], Estimate]:
        return {}


class Binder:
    """Binds specs to one model, and remembers the meaning of capture requests."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model
        self._memory: dict[tuple[NamedRequest, ...], tuple[BoundCapture, ...]] = {}
        self._empty: dict[Outputs, BoundSpec] = {}

    def bind(
        self,
        spec: HookSpec,
        outputs: Outputs | None = None,
        *,
        logits: Logits | None = None,
        cuts: Iterable[str] = (),
        differentiated: bool = False,
    ) -> BoundSpec:
        """Bind a spec; only a caller that computes a metric and gradients (`differentiated`) binds one with any."""
        outputs = outputs or Outputs()
        # most calls: no index of hook points, no plan, no checks anew
        if spec.is_empty() and not cuts and logits in (None, ALL_LOGITS):
            if outputs not in self._empty:
                self._empty[outputs] = self._bound(HookSpec(), outputs, None, (), None)
            return self._empty[outputs]
        return self._bound(spec, outputs, logits, cuts, metric_of(spec, differentiated))

    def _bound(
        self, spec: HookSpec, outputs: Outputs, logits: Logits | None, cuts: Iterable[str], metric: MetricSpec | None
    ) -> BoundSpec:
        hooks = index_hooks(spec, self.model)
        # globs and predicates become the hook points that they mean here
        if hooks.chosen:
            spec = replace(spec, interventions=[*hooks.interventions])
        captures = self._captures(spec, hooks)
        nodes = [capture.node for capture in captures]
        # where a model is cut, the value is an output whether or not the spec captures it
        if added := [node for node in map(CaptureNode, cuts) if node not in nodes]:
            nodes = sorted([*added, *nodes], key=lambda node: in_order(hooks, node))
        refuse_metric(metric, self.model.metadata)
        of = read_by(metric, hooks)
        by = bind_gradients(spec.gradients, of, hooks)
        edits = edits_of(hooks)
        if any(hides(state, self.model.metadata) for state in states_of(spec)):
            edits = tuple(replace(edit, counted=edit.at_positions) for edit in edits)
        plan = Plan(edits, tuple(nodes), outputs, gradients=gradients_of(metric, of, by))
        bound = BoundSpec(spec, self.model, hooks, captures, plan, logits, by)
        refuse_idle_structure(bound.edits, bound.plan, self.model)
        shown = ShownValues(bound.plan.captures, outputs.logits, outputs.carried)
        refuse_idle_states(spec, bound.edits, shown, self.model)
        return bound

    def _captures(self, spec: HookSpec, hooks: HookIndex) -> tuple[BoundCapture, ...]:
        chosen = tuple(map(partial(_chosen, hooks=hooks), spec.captures))
        if hooks.inner:  # a request then means values that splices bring, too
            return bind_captures(chosen, hooks)
        captures = self._memory.get(chosen)
        if captures is None:
            if len(self._memory) >= REMEMBERED:
                self._memory.clear()  # which another thread may do between any two lines here
            captures = self._memory[chosen] = bind_captures(chosen, hooks)
        return captures


def _in_text(positions: Positions, batch: TokenBatch) -> dict[int, list[int]]:
    return {row: batch.absolutes(positions, row) for row in range(batch.batch)}


def _chosen(request: Capture, hooks: HookIndex) -> NamedRequest:
    """A request with the names that its predicate chooses now: they are remembered, not the predicate."""
    if callable(request.what):
        return replace(request, what=""), tuple(resolve(request, hooks.names))
    return request, ()


def bind(spec: HookSpec, model: HookedModel, outputs: Outputs | None = None) -> BoundSpec:
    """Bind a spec to a model, and check it against the model's hook points; `outputs` are all by default."""
    return Binder(model).bind(spec, outputs)

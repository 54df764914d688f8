"""State interventions and padding as the gates of a recurrence: arrays that it multiplies its state's terms with.

    state_write     float32 [layers, batch, seq, n_heads]   factor of what a token writes
    state_erase     float32 [layers, batch, seq, n_heads]   factor of what it takes out (delta rules)
    state_decay     bool    [layers, batch, seq, n_heads]   whether the state decays at it
    shift_distance  int64   [layers, batch, seq + 1]        how many tokens back each token is mixed with
    conv_seen       bool    [layers, batch, seq, 1]         whether convolutions at later tokens read it

Layers read those of terms that they have, and `n_heads` is that of the widest. All have defaults in the graph (ones),
which leave the model as it is: a call feeds those that differ.

Other recurrent models than RWKV go by the attention mask: a token that it leaves out neither writes nor decays, stands
in no window of a convolution and is no key. So an invisible token of theirs is a 0 in the mask, in all layers at once,
and keeps its place in the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InterventionError
from mionnx.graph.layers import TERMS
from mionnx.graph.metadata import Metadata
from mionnx.inputs.token_batch import TokenBatch
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

StateEdit = StateKnockoutSpec | StateSteeringSpec


def states_of(spec: HookSpec) -> list[StateEdit]:
    """The state interventions of a spec."""
    return [*spec.state_steerings, *spec.state_knockouts]


def gates_of(spec: HookSpec, batch: TokenBatch, metadata: Metadata) -> dict[str, NDArray[Any]]:
    """The gates of one pass; none where a default will do."""
    states = states_of(spec)
    # padding needs gates too, where no mask hides it: without them it would write into the state and let it decay
    if not states and (batch.real.all() or not metadata.shifts_tokens):
        return {}
    sizes, heads = metadata.sizes, max(metadata.state_heads, 1)
    for state in states:
        refuse_terms(state, metadata)
    reached = batch.lengths if batch.final_lengths is None else batch.final_lengths
    for state in states:
        state.validate(sizes.num_layers, int(reached.min()), heads)
    factors = {name: np.ones((sizes.num_layers, batch.batch, batch.seq, heads), np.float32) for name in TERMS}
    for steering in spec.state_steerings:
        for term in steering.terms:
            for index in _indices(steering, term, batch, metadata, steering.target_heads(heads)):
                factors[term][index] *= np.float32(steering.scale)
    mask = shown_in(batch, spec, metadata).attention_mask
    for knockout in spec.state_knockouts:  # after the steering: it wins wherever both apply
        if hides(knockout, metadata):
            continue
        for term in knockout.terms:
            for index in _indices(knockout, term, batch, metadata, range(heads)):
                factors[term][index] = 0
    for state in states:
        _refuse_idle(state, batch)
    if metadata.shifts_tokens:
        for factor in factors.values():  # padding is invisible: rows of unequal length run as they would alone
            factor[:, ~batch.real] = 0
    hidden = {} if mask is batch.attention_mask else {"attention_mask": mask}
    return hidden | dict(_changed(factors, metadata))


def hides(state: StateEdit, metadata: Metadata) -> bool:
    """Whether a state intervention hides its tokens from all layers at once, by the mask."""
    return metadata.carries_state and not metadata.shifts_tokens and {*TERMS} <= {*state.terms}


def shown_in(batch: TokenBatch, spec: HookSpec, metadata: Metadata) -> TokenBatch:
    """The batch itself, or with a mask without the tokens that the state interventions of a spec hide."""
    hiding = [one for one in spec.state_knockouts if hides(one, metadata)]
    if not hiding:
        return batch
    return replace(batch, attention_mask=reduce(partial(_without, batch=batch), hiding, batch.attention_mask))


def _without(mask: NDArray[np.int64], state: StateEdit, batch: TokenBatch) -> NDArray[np.int64]:
    """A mask [batch, total] without the tokens of a state intervention, those of earlier steps too."""
    mask = mask.copy()
    for row in range(batch.batch):
        columns = np.flatnonzero(batch.attention_mask[row])
        try:
            positions = batch.so_far(state.positions_, row)
        except LookupError as error:
            raise InterventionError(f"{state.title}: {error}") from None
        mask[row, columns[[at for at in positions if at < len(columns)]]] = 0
    return mask


def state_layers(state: StateEdit, metadata: Metadata, term: str | None = None) -> list[int]:
    """The layers in which a state intervention, or one term of it, can be turned: those that it names, else all."""
    terms = {*state.terms} if term is None else {term}
    return [i for i in state.target_layers(metadata.sizes.num_layers) if terms & _terms(metadata, i)]


def _terms(metadata: Metadata, layer: int) -> set[str]:
    """The terms of a layer that can be turned."""
    recurrence = metadata.layers[layer].recurrence
    return set() if recurrence is None else {*recurrence.gates}


def _lacks_gate(metadata: Metadata, layer: int) -> bool:
    """Whether a layer has a short convolution that no gate hides a token from."""
    recurrence = metadata.layers[layer].recurrence
    return recurrence is not None and recurrence.kernel > 0 and "convolution" not in recurrence.gates


def refuse_terms(state: StateEdit, metadata: Metadata) -> None:
    """Refuse layers without a state, and terms that these do not have."""
    with_state = [i for i, layer in enumerate(metadata.layers) if layer.has_state or _terms(metadata, i)]
    targets = state.target_layers(metadata.sizes.num_layers)
    without_state = [i for i in targets if i not in with_state]
    knockout = "in attention, use a KnockoutSpec at blocks.{i}.attn.hook_scores"
    if hides(state, metadata):
        if state.layers_ is not None:
            raise InterventionError(
                f"{state.title}: an invisible token is hidden from states, convolutions and attention of all layers "
                f"of this {metadata.family} model at once: name no layers, or knock out write and decay in some"
            )
        return
    old = [i for i in targets if _lacks_gate(metadata, i)] if "convolution" in state.terms else []
    if old:
        raise InterventionError(
            f"{state.title}: the convolution of layer {old[0]} of this {metadata.family} model has no gate "
            "(conv_seen), which older exports do not write: export its checkpoint again"
        )
    if not with_state:
        raise InterventionError(f"{state.title}: this {metadata.family} model has no recurrent state; {knockout}")
    if without_state and state.layers_ is not None:
        layers = ", ".join(map(str, with_state))
        raise InterventionError(
            f"{state.title}: layer {without_state[0]} of this {metadata.family} model has no recurrent state, the "
            f"layers {layers} do; {knockout}"
        )
    gates = [term for term in TERMS if any(term in _terms(metadata, i) for i in targets)]
    where = metadata.family if state.layers_ is None else f"{metadata.family} in layer {', '.join(map(str, targets))}"
    if state.terms == ["erase"] and "erase" not in gates:
        raise InterventionError(f"{state.title}: {where} has no removal term to erase")
    absent = [term for term in TERMS if term in state.terms and term not in gates]
    if absent == ["write"] and "convolution" in state.terms:
        absent = []  # of a convolution alone its columns are all that a token writes
    # all terms mean whatever there is
    if absent and not {*TERMS} <= {*state.terms}:
        has = f"it has {', '.join(gates)}" if gates else "no term of it can be turned"
        what = "removal term (erase)" if absent == ["erase"] else f"term {absent[0]}"
        if "token_shift" in absent:
            has += "; .invisible() hides a token from convolutions, states and attention together"
        raise InterventionError(f"{state.title}: {where} has no {what}; {has}")
    if idle := [i for i in targets if state.layers_ is not None and not {*state.terms} & _terms(metadata, i)]:
        terms = ", ".join(term for term in TERMS if term in _terms(metadata, idle[0])) or "none"
        raise InterventionError(f"{state.title}: layer {idle[0]} has none of {', '.join(state.terms)}; it has {terms}")


def _refuse_idle(state: StateEdit, batch: TokenBatch) -> None:
    """Refuse a phase without tokens in a single pass; in a generation it may be another step's."""
    if batch.final_lengths is None and not any(batch.columns(state.positions_, row) for row in range(batch.batch)):
        phases = ", ".join(str(position) for position in state.positions_)
        raise InterventionError(
            f"{state.title}: no token of this call is in the phase {phases!r}; `prompt_length=` says where it begins"
        )


def _indices(
    state: StateEdit, term: str, batch: TokenBatch, metadata: Metadata, heads: Sequence[int]
) -> Iterator[tuple[NDArray[np.int64], int, int, NDArray[np.int64]]]:
    """Indices into the gate of a term at the tokens of a state intervention: layers, row, column, heads."""
    layers = np.array(state_layers(state, metadata, term), np.int64)[:, None]
    for row in range(batch.batch):
        try:
            columns = batch.columns(state.positions_, row)
        except LookupError as error:
            raise InterventionError(f"{state.title}: {error}") from None
        for column in columns:
            if column is not None:
                yield layers, row, column, np.array(heads)[None, :]


def _changed(factors: dict[str, NDArray[np.float32]], metadata: Metadata) -> Iterator[tuple[str, NDArray[Any]]]:
    if (factors["write"] != 1).any():
        yield "state_write", factors["write"]
    if "erase" in metadata.state_gates and (factors["erase"] != 1).any():
        yield "state_erase", factors["erase"]
    if (factors["decay"] != 1).any():
        yield "state_decay", factors["decay"] != 0  # a state decays or does not: there is no steering of it
    if (factors["token_shift"] != 1).any():
        yield "shift_distance", _distances(factors["token_shift"][..., 0] != 0)
    if "convolution" in metadata.state_gates and (factors["convolution"] != 1).any():
        yield "conv_seen", factors["convolution"][..., :1] != 0


def _distances(seen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[layers, batch, seq + 1]: distance to the last token seen; the last entry is for the next pass's first token."""
    # tokens that are not seen are skipped: each is mixed with the last one seen before it, -1 for the state's own
    at = np.arange(seen.shape[-1] + 1)
    last = np.maximum.accumulate(np.where(seen, at[:-1], -1), axis=-1)
    before = np.concatenate([np.full_like(last[..., :1], -1), last], axis=-1)
    return at - before

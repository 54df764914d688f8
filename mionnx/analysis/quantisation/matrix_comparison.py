"""The matrices of two models in `verify`: those of the quantised one, put into the model of floats."""

from collections.abc import Sequence

from mionnx.analysis.quantisation.candidates import of_model
from mionnx.analysis.quantisation.matrix_loss import FloatModel, MatrixLoss, matrix_losses, sample
from mionnx.engine.options import Options
from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress
from mionnx.quantise.matrices import expert_of
from mionnx.spec.hook_spec import HookSpec


def losses(
    one: HookedModel,
    other: HookedModel | None,
    calls: Sequence[TokenBatch],
    spec: HookSpec,
    matrices: bool | None,
    progress: Progress,
    notes: list[str],
    experts: bool = False,
) -> list[MatrixLoss]:
    """Measure the matrices of the quantised one of two models, those that cost most first.

    Args:
        matrices: None: where one of the two is quantised, and nothing intervenes.
        notes: is told on how many tokens.
        experts: whether each expert's matrix is measured too; it is asked for then.
    """
    pair = _pair(one, other)
    why = None
    if pair is None:
        why = "other= must be the floats of a model that mionnx quantised, or the reverse"
    elif spec.num_interventions():
        why = "matrices are measured without interventions"
    if experts and matrices is False:
        raise InputError("experts=True with matrices=False: experts are measured with the other matrices")
    if not calls or matrices is False or (why and matrices is None and not experts):
        return []
    if why or pair is None:
        raise InputError(f"{'experts' if experts else 'matrices'}=True: {why}")
    floats, blocks = pair
    model = FloatModel(floats, Options(prepack=False))
    candidates = of_model(model.uses, blocks, experts)
    if experts and not any(expert_of(one.name) for one in candidates):
        raise InputError(f"experts=True: {blocks.name} has no stack of experts in blocks")
    tokens = sum(call.input_ids.size for call in sample(calls, floats))
    notes.append(f"{len(candidates)} matrices of {blocks.name}, one at a time in {floats.name}: over {tokens} tokens")
    results = sorted(matrix_losses(model, candidates, calls, progress), key=lambda loss: (-loss.kl, loss.name))
    idle = sum(loss.output_error == 0 < loss.weight_error and expert_of(loss.name) is not None for loss in results)
    if idle:
        notes.append(f"{idle} of the experts' matrices were chosen by no token: nothing is known of their cost")
    return results


def _pair(one: HookedModel, other: HookedModel | None) -> tuple[HookedModel, HookedModel] | None:
    """A model of floats and a quantised one; None if the two are not that."""
    if other is None or bool(one.metadata.quantised) == bool(other.metadata.quantised):
        return None
    return (other, one) if one.metadata.quantised else (one, other)

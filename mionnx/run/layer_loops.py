"""`LayerLoops`: a word to those who loop over layers, where each call opens a graph of its own."""

import re
import warnings
from collections import defaultdict

from mionnx.machine.caller import caller_level, caller_verb
from mionnx.rewrite import Plan

LAYER = re.compile(r"\bblocks\.\d+\.")
ALIKE = 5  # graphs that differ in the layer only
VERBS = {"forward", "call", "run_with_hooks", "run_with_cache"}  # of one structure a call; `call` is model(tokens)


class LayerLoopWarning(UserWarning):
    """Calls that differ in the layer only, each with a graph of its own."""


class LayerLoops:
    """Graphs opened by a user's own calls, by structure without the layer; warns once."""

    def __init__(self) -> None:
        self._opened: dict[str, set[str]] = defaultdict(set)
        self._warned = False

    def opened(self, plan: Plan, functions: tuple[str, ...] = ()) -> None:
        """Note an opened graph, and warn of the fifth that differs in the layer only.

        Args:
            functions: hook points at which it is cut.
        """
        if self._warned or not (plan.edits or plan.captures) or caller_verb() not in VERBS:
            return
        structure = f"{plan} {functions}"
        alike = self._opened[LAYER.sub("blocks.*.", structure)]
        alike.add(structure)
        if len(alike) < ALIKE:
            return
        self._warned = True
        warnings.warn(
            f"{ALIKE} calls differ in the layer only, and each opened a graph of its own; {_remedy(plan, functions)}",
            LayerLoopWarning,
            stacklevel=caller_level(),
        )


def _remedy(plan: Plan, functions: tuple[str, ...]) -> str:
    changed = [*functions, *(edit.hook for edit in plan.edits)]
    if changed:
        hook = next(filter(LAYER.match, changed), changed[0]).rpartition("hook_")[2]
        return (
            f'one call does all layers: model.patch_sweep(clean, corrupted, "{hook}", "layer", answer=...) puts values '
            f'of another prompt in, model.ablation_sweep(prompt, "{hook}", "layer") zeros or means'
        )
    captured = [node.hook for node in plan.captures]
    hook = LAYER.sub("blocks.*.", next(filter(LAYER.match, captured), captured[0]))
    return f'one call captures all layers: HookSpec().capture("{hook}")'

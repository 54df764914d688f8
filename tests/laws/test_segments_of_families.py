"""Segments of exported graphs: no node that depends on the tokens stands in two."""

import pytest

from mionnx import HookSpec
from mionnx.bind import plan
from mionnx.rewrite.apply_plan import apply_plan
from mionnx.rewrite.plan import Outputs
from mionnx.rewrite.segment import cut


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_node_that_depends_on_the_tokens_stands_in_two_segments(models, family):
    hooked = models(family).hooked
    hooks = list(hooked.metadata.hooks)
    spec = HookSpec()
    for hook in hooks:
        spec.capture(hook)
    graph, _ = apply_plan(hooked.proto, plan.plan_of(spec, hooked, Outputs(carried=False)), hooked.metadata)
    weights = {tensor.name for tensor in hooked.proto.graph.initializer}
    seen: list[str] = []
    made = cut(graph, hooks)
    for segment in made:
        still = set(weights)
        for node in segment.graph.nodes:
            if all(value.name in still for value in node.inputs):
                still |= {output.name for output in node.outputs}
            else:
                seen.append(node.outputs[0].name)
    assert len(seen) == len(set(seen))
    assert {*seen} | {node.outputs[0].name for node in graph.nodes if node.op in ("Transpose", "Constant")} >= {
        node.outputs[0].name for node in graph.nodes
    }
    assert [name for segment in made for name in segment.hooks] == hooks

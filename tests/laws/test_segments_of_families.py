"""Segments of exported graphs: no node that depends on the tokens stands in two."""

import pytest

from mionnx import HookSpec
from mionnx.bind.bound_spec import bind
from mionnx.graph import onnx_file
from mionnx.rewrite import rewrite
from mionnx.rewrite.plan import Outputs
from mionnx.run.segment_chain import cut


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_node_that_depends_on_the_tokens_stands_in_two_segments(models, family):
    hooked = models(family).hooked
    hooks = list(hooked.metadata.hooks)
    spec = HookSpec()
    for hook in hooks:
        spec.capture(hook)
    model, _ = rewrite(hooked.proto, bind(spec, hooked, Outputs(carried=False)).plan, hooked.metadata)
    proto = onnx_file.parse(model)
    weights = {tensor.name for tensor in hooked.proto.graph.initializer}
    seen: list[str] = []
    made = cut(proto, hooks)
    for segment in made:
        still = set(weights)
        for node in segment.model.graph.node:
            if still.issuperset(node.input):
                still.update(node.output)
            else:
                seen.append(node.output[0])
    assert len(seen) == len(set(seen))
    assert {*seen} | {node.output[0] for node in proto.graph.node if node.op_type in ("Transpose", "Constant")} >= {
        node.output[0] for node in proto.graph.node
    }
    assert [name for segment in made for name in segment.hooks] == hooks

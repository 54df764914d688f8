"""GELU written out, as the operator that ONNX has for it since opset 20.

`nn.GELU` is traced to that operator already; transformers' own activations compute the same in eight steps, each of
which a runtime writes to memory and reads back.

1. The constants are those of the formula to 1e-5. A graph in half precision, whose constants are not, keeps the steps,
   and with them their roundings: they are what the checkpoint's own code computes.
2. A step that anything else reads, a hook point's marker for one, stays, and so do all the others.
"""

import math
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern

CUBIC = 0.044715
SCALE = math.sqrt(2 / math.pi)


class _Tanh(pattern.RewriteRuleClassBase):
    """Tanh GELU: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""

    def pattern(self, op: Any, x: Any) -> Any:
        cubic = op.Add(x, op.Mul(op.Pow(x, 3.0), CUBIC))
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(op.Mul(cubic, SCALE)), 1.0))

    def rewrite(self, op: Any, x: Any) -> Any:
        return op.Gelu(x, approximate="tanh")


class _FactoredTanh(_Tanh):
    """`FastGELUActivation`: 0.5 x (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x x)))."""

    def pattern(self, op: Any, x: Any) -> Any:
        factor = op.Add(op.Mul(op.Mul(x, CUBIC), x), 1.0)
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(op.Mul(op.Mul(x, SCALE), factor)), 1.0))


class _Erf(pattern.RewriteRuleClassBase):
    """`GELUActivation` in Python: 0.5 x (1 + erf(x / sqrt(2)))."""

    def pattern(self, op: Any, x: Any) -> Any:
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Erf(op.Div(x, math.sqrt(2))), 1.0))

    def rewrite(self, op: Any, x: Any) -> Any:
        return op.Gelu(x, approximate="none")


_RULES = pattern.RewriteRuleSet([_Tanh.rule(), _FactoredTanh.rule(), _Erf.rule()])


def fuse(model: ir.Model) -> int:
    """Put the operator in the place of its written-out forms, in place.

    Args:
        model: of opset 20 or above.

    Returns:
        how many there were.
    """
    return int(_RULES.apply_to_model(model))

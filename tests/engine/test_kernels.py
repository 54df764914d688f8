"""Which operators a provider computes, as the installed ONNX Runtime tells it."""

from types import SimpleNamespace

import onnxruntime
import pytest

from mionnx.engine import placement
from mionnx.engine.placement import without_kernel

ATTENTION, NORM = ("com.microsoft", "GroupQueryAttention"), ("com.microsoft", "SkipSimplifiedLayerNormalization")


@pytest.fixture
def told(monkeypatch):
    """Another list of kernels than that of the installed ONNX Runtime."""

    def tell(*entries):
        made = [
            SimpleNamespace(provider=provider, domain=domain, op_name=name, type_constraints=types)
            for provider, (domain, name), types in entries
        ]
        state = onnxruntime.capi.onnxruntime_pybind11_state
        monkeypatch.setattr(state, "get_all_opkernel_def", lambda: made)
        placement._kernels.cache_clear()

    yield tell
    monkeypatch.undo()
    placement._kernels.cache_clear()


def test_the_cpu_has_fused_attention_and_no_such_operator():
    here = "CPUExecutionProvider"
    assert without_kernel([ATTENTION, NORM], here, "float32") == []
    assert without_kernel([NORM, ("com.microsoft", "Nothing")], here, "float32") == [("com.microsoft", "Nothing")]
    assert without_kernel([ATTENTION], "AnotherExecutionProvider", "float32") == [ATTENTION]


def test_a_kernel_counts_for_its_dtypes_and_provider(told):
    cuda, half = "CUDAExecutionProvider", {"T": ["tensor(float16)", "tensor(bfloat16)"]}
    told((cuda, ATTENTION, half), (cuda, NORM, {"T": ["tensor(float)"]}), ("CPUExecutionProvider", NORM, half))
    assert without_kernel([ATTENTION, NORM], cuda, "float16") == [NORM]
    assert without_kernel([ATTENTION, NORM], cuda, "float32") == [ATTENTION]
    assert without_kernel([ATTENTION], cuda, "bfloat16") == []

"""Options that a provider does not have are refused before a session is made."""

import pytest

from mionnx import InputError, Options
from mionnx.engine.options import check_provider_options


def test_the_cpu_has_none():
    with pytest.raises(InputError, match="CPUExecutionProvider has no option 'nonsense'; it has none"):
        Options(provider_options={"nonsense": 1})


def test_those_of_cuda_are_known_by_name():
    Options("cuda", provider_options={"device_id": 1, "gpu_mem_limit": 2**30, "use_tf32": 0})
    with pytest.raises(InputError, match=r"no option 'gpu_mem_limitt'.*did you mean 'gpu_mem_limit'"):
        Options("cuda", provider_options={"gpu_mem_limitt": 1})


@pytest.mark.parametrize("device", ["a", "-1", "", -1])
def test_a_device_is_a_number(device):
    with pytest.raises(InputError, match="device_id is the number of a device"):
        Options("cuda", provider_options={"device_id": device})


def test_other_providers_are_left_to_onnx_runtime():
    check_provider_options("TensorrtExecutionProvider", {"trt_fp16_enable": 1})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"threads": -1}, "threads must be 0"),
        ({"threads": 10**12}, "threads must be 0"),
        ({"threads": "a"}, "threads must be an integer"),
        ({"max_graphs": 0}, "max_graphs must be 1 or above"),
        ({"max_bytes": -1}, "max_bytes must be 0 or above"),
        ({"base": "alwys"}, "base must be True or False"),
        ({"level": 3}, "level must be a text"),
    ],
)
def test_other_settings_out_of_their_range(setting, said):
    with pytest.raises(InputError, match=said):
        Options(**setting)

"""Numbers of other libraries as numpy arrays: torch tensors of every dtype, alone and in lists."""

import numpy as np
import pytest

from mionnx.machine.arrays import to_array


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"])
def test_a_tensor_of_any_floating_dtype_keeps_its_numbers(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[0.5, -1.25], [3.0, 0.0625]]).to(getattr(torch, dtype))
    assert np.array_equal(to_array(tensor).astype(np.float64), tensor.double().numpy())


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "bool"])
def test_a_tensor_of_integers_stays_one(dtype):
    torch = pytest.importorskip("torch")
    array = to_array(torch.tensor([0, 1, 3]).to(getattr(torch, dtype)))
    assert array.dtype == np.dtype(dtype)
    assert array.tolist() == np.array([0, 1, 3]).astype(dtype).tolist()


def test_tensors_that_need_gradients_alone_and_in_lists():
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.arange(3.0).bfloat16())
    assert to_array(weight).tolist() == [0, 1, 2]
    assert to_array(weight * 2).tolist() == [0, 2, 4]
    assert to_array([weight, weight + 1]).tolist() == [[0, 1, 2], [1, 2, 3]]
    assert to_array([list(weight)]).tolist() == [[0, 1, 2]]


def test_what_is_no_tensor_stays_what_it_is():
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    assert to_array(array) is array
    assert to_array([1, 2]).tolist() == [1, 2]
    assert to_array(2.5).shape == ()
    assert to_array("text").dtype.kind == "U"


def test_what_cannot_be_read_is_a_value_error():
    torch = pytest.importorskip("torch")
    for given in (torch.empty(2, device="meta"), [[1, 2], [3]], [torch.ones(2), torch.ones(3)]):
        with pytest.raises(ValueError, match=r"meta|inhomogeneous"):
            to_array(given)


@pytest.mark.gpu
def test_a_tensor_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device for torch here")
    tensor = torch.tensor([1.5, 2.5], dtype=torch.bfloat16, device="cuda", requires_grad=True)
    assert to_array(tensor).tolist() == [1.5, 2.5]
    assert to_array([tensor, tensor]).tolist() == [[1.5, 2.5], [1.5, 2.5]]

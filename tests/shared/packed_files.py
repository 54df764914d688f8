"""Tiny checkpoints of GPTQ, AWQ and compressed-tensors, packed as their packages' own code packs (see `pack`).

Every linear layer inside the blocks gets random integers, scales and zero points; the numbers that they stand for, by
the formula of each package, go into the model that is returned beside.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import CONFIGS, make_model
from safetensors.torch import save_file
from tiny_configs import tiny_config
from transformers.pytorch_utils import Conv1D

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # awq/modules/linear/gemm.py: `order_map`


@dataclass(frozen=True)
class Form:
    """One way to pack.

    Attributes:
        method, layout: quant_method, and checkpoint_format, version or format.
        bits, group: of the integers; -1 for one group.
        symmetric: all zero points are the middle.
        shuffled: inputs belong to groups out of order (desc_act).
    """

    method: str
    layout: str
    bits: int = 4
    group: int = 16
    symmetric: bool = False
    shuffled: bool = False

    def config(self) -> dict[str, Any]:
        """The `quantization_config`."""
        if self.method == "compressed-tensors":
            weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "strategy": "group"}
            weights |= {"group_size": self.group} if self.group > 0 else {"strategy": "channel"}
            group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
            return {"quant_method": self.method, "format": self.layout, "config_groups": {"group_0": group}}
        said = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return {**said, "version": self.layout, "zero_point": True}
        return {**said, "checkpoint_format": self.layout, "desc_act": self.shuffled, "sym": self.symmetric}


# Names of an expert's layers in the files of a family; those of the first one are gate and up.
EXPERTS = {
    "mixtral": (("w1", "w3"), ("w2",)),
    "qwen3_moe": (("gate_proj", "up_proj"), ("down_proj",)),
}


def write_packed(form: Form, folder: Path, family: str = "llama") -> Any:
    """Write a tiny model of a family packed; returns it with the numbers of its integers, in float32."""
    config = {} if family in CONFIGS else tiny_config(family)
    model, random = make_model(family, **config), np.random.default_rng(0)
    tensors = {name: value.to(torch.float16) for name, value in model.state_dict().items()}
    state, packed = model.state_dict(), {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear | Conv1D) or name == "lm_head":
            continue
        turned = isinstance(module, Conv1D)
        outputs, inputs = module.weight.shape[::-1] if turned else module.weight.shape
        parts, numbers = _layer(form, int(inputs), int(outputs), random)
        del tensors[f"{name}.weight"]
        packed |= {f"{name}.{part}": torch.from_numpy(np.ascontiguousarray(array)) for part, array in parts.items()}
        state[f"{name}.weight"].copy_(torch.from_numpy(numbers.T if turned else numbers))
    if family in EXPERTS:
        packed |= _experts(form, family, state, tensors, random)
    for name, value in tensors.items():
        state[name].copy_(value)
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in (tensors | packed).items()}, folder / "model.safetensors")
    config = {**model.config.to_dict(), "quantization_config": form.config(), "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def _experts(form: Form, family: str, state: dict, tensors: dict, random: Any) -> dict[str, torch.Tensor]:
    """Tensors of the layers of all experts; their numbers go into the stacks of `state`."""
    found = {}
    for stack in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        parts = EXPERTS[family][stack.endswith("down_proj")]
        module = stack.rpartition(".")[0].replace(".mlp.", ".block_sparse_moe." if family == "mixtral" else ".mlp.")
        del tensors[stack]
        for number, matrix in enumerate(state[stack]):
            outputs, inputs = matrix.shape[0] // len(parts), matrix.shape[1]
            order = random.permutation(inputs)  # gate and up read the same inputs, in the same order
            for place, part in enumerate(parts):
                layer, numbers = _layer(form, inputs, outputs, random, order)
                matrix[place * outputs : (place + 1) * outputs].copy_(torch.from_numpy(numbers))
                found |= {
                    f"{module}.{number}.{part}.{key}": torch.from_numpy(np.ascontiguousarray(array))
                    for key, array in layer.items()
                }
    return found


def _layer(
    form: Form, inputs: int, outputs: int, random: Any, order: np.ndarray | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tensors of a layer, and its numbers [outputs, inputs]; shuffled in a given order, or a random one."""
    size, middle = form.group if form.group > 0 else inputs, 2 ** (form.bits - 1)
    groups = -(-inputs // size)
    q = random.integers(0, 2**form.bits, (outputs, inputs))
    scales = (random.uniform(0.5, 1.5, (outputs, groups)) * 0.5 / 2**form.bits).astype(np.float16)
    low = 1 if form.layout == "gptq" else 0  # a zero point of 0 is what gptq_v2 was made for
    zeros = np.full((outputs, groups), middle) if form.symmetric else random.integers(low, 2**form.bits, scales.shape)
    of_input = np.arange(inputs) // size
    if form.shuffled:
        of_input = random.permutation(of_input) if order is None else of_input[order]
    numbers = (q - zeros[:, of_input]).astype(np.float32) * scales[:, of_input].astype(np.float32)
    return pack(form, q, scales, zeros, of_input), numbers


def pack(
    form: Form, q: np.ndarray, scales: np.ndarray, zeros: np.ndarray, of_input: np.ndarray
) -> dict[str, np.ndarray]:
    """Integers [outputs, inputs] and zero points [outputs, groups] as the tensors of a format.

    AutoGPTQ's `qlinear_cuda.QuantLinear.pack`, AutoAWQ's `WQLinear_GEMM.from_linear` and `WQLinear_GEMV.from_linear`,
    compressed-tensors' `pack_to_int32`: one integer after the other into words of 32 bits.
    """
    if form.method == "gptq":
        stored = zeros - (form.layout == "gptq")
        found = {"qweight": words(q, form.bits).T, "qzeros": words(stored.T, form.bits), "scales": scales.T}
        return {**found, "g_idx": of_input.astype(np.int32)}
    if form.method == "awq" and form.layout == "gemm":
        order = np.arange(q.shape[0]).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)
        return {"qweight": words(q.T[:, order], 4), "qzeros": words(zeros.T[:, order], 4), "scales": scales.T}
    if form.method == "awq":
        wide = -(-scales.shape[1] // 8) * 8
        filled = [np.pad(array, ((0, 0), (0, wide - array.shape[1]))) for array in (zeros, scales)]
        return {"qweight": words(q, 4), "qzeros": words(filled[0], 4), "scales": filled[1]}
    found = {"weight_scale": scales}
    if form.layout == "pack-quantized":
        found |= {"weight_packed": words(q, form.bits), "weight_shape": np.array(q.shape, np.int64)}
        points = words(zeros.T, form.bits).T
    else:
        found["weight"] = (q - 128).astype(np.int8)
        points = (zeros - 128).astype(np.int8)
    found |= {"weight_g_idx": of_input.astype(np.int32)} if form.shuffled else {}
    return found if form.symmetric else {**found, "weight_zero_point": points}


def words(integers: np.ndarray, bits: int) -> np.ndarray:
    """Integers as int32 words along the last axis, the first in the lowest bits."""
    count = 32 // bits
    columns = -(-integers.shape[1] // count)
    found = np.zeros((integers.shape[0], columns), np.uint32)
    for place in range(integers.shape[1]):
        found[:, place // count] |= (integers[:, place].astype(np.uint32)) << np.uint32(bits * (place % count))
    return found.view(np.int32)

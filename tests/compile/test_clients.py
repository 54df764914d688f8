"""Compiled folders in the clients that people deploy with: each opens the folder as its card says.

Every client is the real one: onnxruntime-genai, optimum-onnx in an environment of its own, transformers.js and
onnxruntime-node under Node, plain onnxruntime. A cheap test of each runs always, the other models are slow.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from repository import REPOSITORY, SHARED

from mionnx import HookPoint, HookSpec, Intervention, Knob, MIModel
from mionnx.compile.layouts.layout import CARD_PROMPT, NEW_TOKENS

GENAI, OPTIMUM = "onnxruntime-genai==0.18.0", "optimum-onnx==0.1.0"
DOSES = (0.0, 1.0, -1.0)
PADDED = [CARD_PROMPT, "When Mary and John went to the store , John gave a drink to"]


def steering(model: MIModel) -> HookSpec:
    """From France to Germany: the answer becomes another one."""
    point = HookPoint.ResidPost(0)
    ends = [model.forward(f"The capital of {name} is", HookSpec().capture(point))[point][0, 3] for name in COUNTRIES]
    return HookSpec().intervene(point, Intervention.Add(ends[1] - ends[0], positions=3))


COUNTRIES = ("France", "Germany")


def loop_of(card: Path) -> str:
    """The program on a card."""
    found = re.search(r"## Running it.*?```\w+\n(.*?)\n```", card.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def expected(model: MIModel, spec: HookSpec, new: int = NEW_TOKENS) -> list[int]:
    """The tokens that `generate` chooses."""
    return model.generate(CARD_PROMPT, spec, max_new_tokens=new, do_sample=False).new_tokens[0]


def run(command: list[Any], cwd: Path) -> str:
    """What a program prints; it knows nothing of mionnx."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=bare)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.fixture(scope="module")
def compiled(shipped: MIModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Layout -> the steered model with its strength as a knob, or for optimum a file a dose."""
    base, spec = tmp_path_factory.mktemp("compiled"), steering(shipped)

    def find(layout: str) -> Path:
        knob = Knob(low=-2, high=2, doses=DOSES if layout == "optimum" else ())
        if not (base / layout).exists():
            shipped.compile(spec, base / layout, layout=layout, knobs={"strength": knob})
        return base / layout

    return find

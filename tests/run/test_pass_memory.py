"""What a pass will need is estimated before it runs, and refused where memory does not hold it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from repository import REPOSITORY

from mionnx import HookSpec, InputError
from mionnx.machine.memory import format_bytes


def test_200000_tokens_are_refused_with_the_number_that_estimate_says(shipped):
    """FINDINGS part 1, defect 7: 1.28 TB of scores were asked for."""
    said = format_bytes(shipped.estimate(HookSpec(), batch=1, seq=200_000).passing)
    with pytest.raises(
        InputError, match=rf"a pass over 1 x 200000 tokens needs some {said} .*in pieces .*logits=False"
    ):
        shipped.forward(np.full((1, 200_000), 7))


def test_the_estimate_of_a_pass_is_near_what_it_takes():
    program = (
        "import sys, numpy as np\nfrom pathlib import Path\nfrom mionnx import HookSpec, MIModel\n"
        "status = lambda: Path('/proc/self/status').read_text().splitlines()\n"
        "peak = lambda: 1024 * next(int(line.split()[1]) for line in status() if line.startswith('VmHWM'))\n"
        "model = MIModel.from_pretrained('world-llama', threads=1, base='never')\n"
        "model.forward([3, 4]); before = peak(); model.forward(np.full((1, 1024), 7))\n"
        "print(model.estimate(HookSpec(), 1, 1024).passing / (peak() - before))"
    )
    known = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, env=known)
    assert 0.5 < float(done.stdout.split()[-1]) < 2

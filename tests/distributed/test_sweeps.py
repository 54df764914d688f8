"""A sweep over pairs by workers is that of one process, whoever is killed on the way."""

import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from worker_processes import processes

from mionnx import InputError, MIModel, distributed
from mionnx.machine.progress import reported_to

PLACES = ["France", "Japan", "Spain", "Kenya", "Egypt", "Italy", "Peru", "China"]
CLEAN, CORRUPTED = ([f"The capital of {place} is" for place in places] for places in (PLACES, [*PLACES[1:], PLACES[0]]))


@pytest.mark.slow
def test_pairs_of_two_workers_are_those_of_one_process(shipped: MIModel, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'mionnx[ray]'")
    expected = shipped.patch_sweep(CLEAN, CORRUPTED, "z", ("layer", "head"))
    killed: list[psutil.Process] = []

    def kill(stage: str, done: int, total: int) -> None:
        workers = processes("_Worker")
        if not killed and workers:
            killed.append(workers[0])
            workers[0].send_signal(signal.SIGKILL)

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with reported_to(kill):
            found = distributed.patch_sweep(
                shipped, CLEAN, CORRUPTED, "z", ("layer", "head"), workers=2, resume=tmp_path / "pairs"
            )
        again = distributed.patch_sweep(
            shipped, CLEAN, CORRUPTED, "z", ("layer", "head"), workers=2, resume=tmp_path / "pairs"
        )
    finally:
        ray.shutdown()
    assert killed
    for result in (found, again):
        np.testing.assert_allclose(result.by_pair, expected.by_pair, atol=1e-5)
        np.testing.assert_allclose(result.std, expected.std, atol=1e-5)
        assert (result.labels, result.title, result.about) == (expected.labels, expected.title, expected.about)
        assert result.cost["without effect"] == expected.cost["without effect"]


def test_a_sweep_is_checked_before_a_cluster_is_begun(shipped: MIModel) -> None:
    with pytest.raises(InputError, match="the clean and the corrupted prompt are the same"):
        distributed.patch_sweep(shipped, CLEAN, CLEAN, "z", ("layer", "head"))

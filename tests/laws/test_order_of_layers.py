"""Results list hook points in the order of layers: 2 before 10, on a model of twelve layers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from command_line import succeeded
from families import make_checkpoint, single_threaded
from filelock import FileLock

from mionnx import HookPoint, HookSpec, MIModel, probe, statistics_of

LAYERS = 12
HOOKS = ["hook_embed", *(f"blocks.{layer}.hook_resid_post" for layer in range(LAYERS)), "hook_final_norm"]
TEXTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13], [14, 15, 16], [17, 18], [19, 20, 21]]


@pytest.fixture(scope="module")
def deep(shared: Path) -> MIModel:
    """A random Llama of twelve layers."""
    folder = shared / "hooked" / "twelve-layers"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            from exporters.transformers import export

            single_threaded()
            make_checkpoint("llama", shared / "checkpoints" / folder.name, num_hidden_layers=LAYERS)
            export(shared / "checkpoints" / folder.name, folder)
    return MIModel.from_pretrained(folder, threads=1)


def ascending(names: Iterable[str]) -> bool:
    found = [layer for layer in (HookPoint.parse(name).layer for name in names) if layer is not None]
    return len({*found}) == LAYERS and found == sorted(found)


@pytest.mark.slow
def test_of_a_model_a_pass_and_gradients(deep: MIModel) -> None:
    assert ascending(map(str, deep.hook_points()))
    assert ascending(deep.forward(TEXTS[0], HookSpec().capture("*")))
    assert ascending(deep.gradients(TEXTS[0], "blocks.*.hook_resid_post", "logit", answer=3).grad)


def test_of_a_harvest_and_of_what_reads_it(deep: MIModel, tmp_path: Path) -> None:
    """FINDINGS, part 2, 1: columns were sorted as text, and a probe's line went 9, 10 to 11, 2."""
    made = deep.harvest(TEXTS, HOOKS, tmp_path / "made")
    assert [*made] == [*made.columns] == HOOKS
    found = probe(made, [0, 1, 0, 1, 0, 1], [*made][1:-1], folds=2)
    assert [*found.accuracy] == HOOKS[1:-1]
    lines = [line for axes in found.figure().axes for line in axes.get_lines()]
    assert [*lines[0].get_xdata()] == [*range(LAYERS)]
    assert statistics_of(made).hooks == HOOKS
    assert deep.statistics(TEXTS, HOOKS).hooks == HOOKS


def test_of_a_sweep_a_comparison_and_the_command_line(deep: MIModel) -> None:
    swept = deep.patch_sweep(TEXTS[0], TEXTS[3], "resid_pre", answer=3, versus=4)
    assert swept.labels["layer"] == [*map(str, range(LAYERS))]
    found = deep.verify([TEXTS[0]], ["ort-cpu:threads=1", "ort-cpu:none"], local=False, greedy=0)
    assert ascending(row.name for beside in found.besides for row in beside.rows)
    assert ascending(json.loads(succeeded("hooks", deep.hooked.folder, "--json")))

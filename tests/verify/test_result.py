"""Tables of runtimes in narrow terminals: hook points whole, in every width that holds them."""

import re

import pytest
from command_line import LLAMA, PROMPT, mionnx
from rich.console import Console

from mionnx import Verification
from mionnx.verify.difference import HookDifference
from mionnx.verify.result import NARROW_WIDTH, Beside
from mionnx.view import short_point

LONG = "blocks.31.rwkv.hook_effective_attn_raw"
ROW = HookDifference(LONG, 1e-6, 1e-7, 20.0, 5e-8, 0.999, 1.0, 0.5, False, True)
LOGITS = {"kl_max": 1e-12, "top_1": 1.0, "top_5": 1.0}
HEADS = ["relative", "at", "absolute", "cosine", "KL, nats", "top 1", "greedy"]


def verification(*titles: str, failed: dict[str, str] | None = None) -> Verification:
    besides = [Beside(title, [ROW], LOGITS, 1.0, None, {}, 1.0) for title in titles]
    return Verification("a model: 2 hook points", "ort-cpu", besides, {}, failed or {}, 5e-5, [], ["x"], {}, {})


def printed(result: Verification, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(result.table())
    return captured.get().splitlines()


@pytest.mark.parametrize("width", range(66, 132, 3))
def test_a_table_fits_and_names_stay_whole(width):
    lines = printed(verification("ort-cpu:none", "reference"), width)
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if re.match("│ (ort-cpu:none|reference) ", line)]
    assert len(rows) == 2
    named = LONG if verification("ort-cpu:none").table().natural_width <= width else short_point(LONG)
    assert all(f"│ {named} " in line for line in rows)
    assert any("without blocks. and hook_" in line for line in lines) == (named != LONG)
    assert "relative" in lines[2]


def test_more_room_tells_more():
    told = [
        sum(head in "".join(printed(verification("ort-cpu:none"), width)) for head in HEADS) for width in (66, 92, 130)
    ]
    assert told == sorted(told)
    assert told[0] < told[1] < told[2] == len(HEADS)


def test_without_a_width_it_is_wide_or_narrow():
    result = verification("ort-cpu:none", failed={"openvino": "no"})
    assert [column.header for column in result.table().columns] == ["runtime", "", *HEADS]
    assert result.table(wide=False).natural_width <= NARROW_WIDTH < result.table().natural_width
    assert "openvino" in str(result.table(wide=False))
    assert "runtime" in str(verification().table())


@pytest.mark.parametrize(
    ("hook", "short"), [("hook_embed", "embed"), ("blocks.3.hook_z", "3.z"), (LONG, "31.rwkv.effective_attn_raw")]
)
def test_short_names(hook, short):
    assert short_point(hook) == short


def test_the_command_line_says_what_it_recorded_and_prints_whole_names(tmp_path, monkeypatch):
    monkeypatch.setattr("command_line.WIDTH", {"COLUMNS": "80"})
    file = tmp_path / "run.safetensors"
    asked = ["verify", LLAMA, "--runtimes", "ort-cpu", "--prompt", PROMPT, "--greedy", "2"]
    wrote = mionnx(*asked, "--points", "blocks.1.hook_*", "--record", file)
    assert wrote.returncode == 0, wrote.stderr
    text = "".join(wrote.stdout.split())  # lines break anywhere in a long path
    size = f"{file.stat().st_size / 1024:.1f} KiB"
    said = f"run.safetensors, {size}: ort-cpu at 6 hook points from blocks.1.hook_resid_pre to hook_logits"
    assert "".join(said.split()) in text
    assert str(file) in wrote.stdout.replace("\n", "")
    assert "1prompt,2greedytokensaftereach" in text
    assert "┃" not in wrote.stdout  # no empty table
    beside = mionnx(*asked, "--against", file, "--repeat")
    assert beside.returncode == 0, beside.stderr
    assert max(map(len, beside.stdout.splitlines())) <= 80
    assert re.search(r"│ (blocks\.1\.hook_resid_pre|1\.resid_pre) +│", beside.stdout)

"""Printed results: a few lines, the top numbers among them, no arrays, no addresses."""

import json
import re

import numpy as np
import pytest

from mionnx import (
    AblationResult,
    HookSpec,
    Intervention,
    KnockoutSpec,
    MIModel,
    SpecFileError,
    StateKnockoutSpec,
    create_knockout_mask,
)
from mionnx.machine.brief import LINES, WIDTH, Brief

PROMPT, OTHER = "The capital of France is", "The capital of Germany is"
NUMBERS = re.compile(r"(-?\d+\.\d+[, ]+){9}")  # a dumped array


@pytest.fixture(scope="session")
def printable(shipped: MIModel) -> dict[str, tuple[object, str]]:
    """Name -> a result of the shipped model, and a line that its print holds."""
    model = shipped
    mask = create_knockout_mask(KnockoutSpec().edge(4, 3), model.num_heads, 5)
    knock = Intervention.Knockout(mask)
    spec = HookSpec().capture("blocks.*.attn.hook_pattern").intervene("blocks.2.attn.hook_scores", knock)
    cache = model.forward(PROMPT, spec, use_cache=True)
    directions = model.contrast([OTHER], [PROMPT])
    lens = model.logit_lens(PROMPT, k=3)
    sweep = model.patch_sweep(PROMPT, OTHER, "resid_mid", over=("layer", "position"))
    heads = model.ablation_sweep(PROMPT, "z", over=("layer", "head"))
    generation = model.generate(PROMPT, HookSpec().capture("hook_embed"), max_new_tokens=2)
    dose = model.dose_response(PROMPT, directions[2], [0, 1, 2], positions=-1)
    state = HookSpec().set_state_knockout(StateKnockoutSpec().position(0))
    plain = model.forward(PROMPT).output()[0, -1]
    ablation = AblationResult(plain, cache.output()[0, -1], KnockoutSpec().edge(4, 3))
    return {
        "sweep": (sweep, "     1.00  layer 0, position 3 'Germany'"),
        "ablation sweep": (heads, "change of kl, the largest effects:"),
        "generation": (generation, "new text 'Paris .'"),
        "spec": (spec, "  blocks.2.attn.hook_scores: Intervention.Knockout(float32 [1, 8, 5, 5])"),
        "intervention": (knock, "Intervention.Knockout(float32 [1, 8, 5, 5])"),
        "state spec": (state, "StateKnockoutSpec(positions=[0], terms=['write'])"),
        "cache": (cache, "blocks.{i}.attn.hook_pattern: float32 [1, 8, 5, 5], 4 layers"),
        "kv cache": (cache.kv_cache, "  key of each layer: float32 [1, 4, 5, 16]"),
        "ablation": (ablation, "with KnockoutSpec(edges=[[4, 3]])"),
        "lens": (lens, "  3 post  'Paris' 1.000"),
        "readout": (lens.readout, "top=float32 [4, 5, 3]"),
        "attribution": (model.attribute(PROMPT, "Paris", "Berlin"), "  3_mlp_out"),
        "attention": (model.attention(PROMPT), "the last token, 'is', reads most:"),
        "heads": (model.head_scores(batch=2), "      Induction  3.1 0.9"),
        "estimate": (model.estimate(spec, batch=1, seq=5), "  blocks.0.attn.hook_pattern"),
        "directions": (directions, "lengths [0."),
        "direction": (directions[2], "vector=float32 [128]"),
        "dose": (dose, f"  {PROMPT!r}: 'Paris' -> 'Berlin' from strength 1"),
        "tokens": (model.tokenize(PROMPT), "'France'(39)"),
    }  # fmt: skip


NAMES = [
    *("sweep", "ablation sweep", "generation", "spec", "intervention", "state spec", "cache", "kv cache", "ablation"),
    *("lens", "readout", "attribution", "attention", "heads", "estimate", "directions", "direction", "dose", "tokens"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_result_prints_in_few_lines(printable, name, capsys):
    result, line = printable[name]
    print(result)
    printed = capsys.readouterr().out.rstrip("\n")
    assert line in printed
    assert len(printed.split("\n")) <= LINES
    assert max(map(len, printed.split("\n"))) <= WIDTH
    assert "0x" not in printed
    assert NUMBERS.search(printed) is None
    assert len(repr(result)) <= WIDTH
    assert "\n" not in repr(result)


def test_every_name_is_tested(printable):
    assert [*printable] == NAMES


def test_a_state_prints_in_few_lines(capsys):
    from repository import REPOSITORY

    model = MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7", threads=1, prepack=False)
    print(state := model.forward(PROMPT, use_cache=True).state)
    assert "wkv of each layer: float32 [1, 2, 64, 64]" in capsys.readouterr().out
    assert repr(state) == "RWKVState(4 layers, 1 row, 5 positions)"


def test_no_dataclass_writes_a_repr_of_its_own():
    """One mechanism: `@dataclass(repr=False)`, or the class would dump its arrays again."""
    classes, found = [Brief], []
    while classes:
        classes += (inner := classes.pop().__subclasses__())
        found += [cls for cls in inner if cls.__module__.startswith("mionnx")]
    assert len(found) > 20
    assert [cls.__name__ for cls in found if "__repr__" in vars(cls) and cls.__name__ != "Intervention"] == []


def test_tables_print_as_tables(printable, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("sweep", "heads"):
        table = str(printable[name][0].table())
        assert "┃" in table
        assert max(map(len, table.splitlines())) <= 80


def test_a_number_for_each_hook_point_is_laid_over_a_graph(shipped, tmp_path):
    """Model Explorer's node data: keys are names of tensors of the hooked graph."""
    clean, corrupted = "The capital of France is", "The capital of Italy is"
    sweep = shipped.patch_sweep(clean, corrupted, "z", ["layer", "head"], answer="Paris", versus="Rome")
    lens = shipped.logit_lens(clean)
    tensors = {name for node in shipped.hooked.proto.graph.node for name in node.output}
    for result, values in (
        (sweep, {f"blocks.{i}.attn.hook_z": sweep.effect[i][np.abs(sweep.effect[i]).argmax()] for i in range(4)}),
        (lens, dict(zip(lens.points, lens.answer_probability[:, -1], strict=True))),
    ):
        data = json.loads(result.save(tmp_path / "x.nodedata.json").read_text())
        found = {name: entry["value"] for name, entry in data["results"].items()}
        assert found == pytest.approx({name: float(value) for name, value in values.items()})
        assert {*found} <= tensors
        assert {stop["stop"] for stop in data["gradient"]} >= {0, 1}
    with pytest.raises(SpecFileError, match="no number for each hook point"):
        shipped.attention(clean).save(tmp_path / "y.nodedata.json")
    assert not (tmp_path / "y.nodedata.json").exists()

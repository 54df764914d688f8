"""The forecast rounds every number, finds what is infinite in silence, and needs a runtime that keeps its casts."""

import numpy as np
import onnx
import pytest
from repository import REPOSITORY
from rescaled import planted

from mionnx import Forecast, InputError, ModelError
from mionnx.analysis.numerics import forecast as forecasting
from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.rewrite.rounded import cast_pair

LLAMA = REPOSITORY / "models" / "world-llama"
TEXTS = "The capital of France is Paris ."


def test_casts_survive_at_every_level(tmp_path):
    for dtype, after in (("float16", [np.inf, 0.0]), ("bfloat16", [99840.0, None])):
        for level in ("none", "basic", "extended", "all"):
            options = Options(level=level, threads=1)
            with engine_of(options).opened_alone(cast_pair(dtype), tmp_path, options) as program:
                got = program.run(["to"], {"from": np.array([1e5, 1e-12], np.float32)})["to"]
            assert got[0] == after[0]
            assert after[1] is None or got[1] == after[1]


def test_a_runtime_that_drops_casts_is_refused(monkeypatch):
    model = onnx.load_model_from_string(cast_pair("float16"))
    del model.graph.node[:]
    model.graph.node.append(onnx.helper.make_node("Identity", ["from"], ["to"]))
    monkeypatch.setattr(forecasting, "cast_pair", lambda dtype: model.SerializeToString())
    with pytest.raises(ModelError, match=r"drops casts to float16 and back at level 'none' .*onnxruntime"):
        forecasting.check_casts("float16")


def test_groups_and_layers_cost_less_than_all_or_about_as_much(shipped, tmp_path):
    result = shipped.forecast(TEXTS)
    assert result.all.sound
    assert 0 < result.kl < 1e-4
    assert result.all.top_1 == 1
    kinds = [row.kind for row in result.rows]
    assert kinds == ["all"] + ["group"] * kinds.count("group") + ["layer"] * shipped.num_layers
    by_name = {row.name: row.distance.kl for row in result.rows if row.kind == "group"}
    assert {"stream", "products", "weights", "norms", "softmax"} <= {*by_name}
    assert all(by_name.values())
    wide = shipped.forecast(TEXTS, dtype="bfloat16", alone=False)
    assert wide.kl > 10 * result.kl  # 8 bits of mantissa against 11
    sums = shipped.forecast(TEXTS, accumulate="float16", alone=False)
    assert sums.kl > result.kl
    assert [row.name for row in sums.rows] == ["all, sums in float16", "all"]
    result.save(tmp_path / "f.safetensors")
    assert Forecast.load(tmp_path / "f.safetensors").to_json() == result.to_json()


def test_what_a_decomposed_norm_does_is_silent(tmp_path):
    model = planted(LLAMA, tmp_path / "planted", "model.layers.1.mlp.down_proj.weight", 64.0)
    fused, opened = (model.forecast(TEXTS, norms=norms, alone=False) for norms in ("as written", "decomposed"))
    assert fused.all.sound
    assert not fused.absorbed
    assert fused.kl < 1e-2
    assert opened.all.sound
    assert opened.first is None
    assert opened.absorbed[0].group == "norms' insides"
    assert opened.kl > 10 * fused.kl
    insides = model.forecast(TEXTS, norms="fused", alone=False)
    assert insides.kl == fused.kl


def test_an_overflow_is_named_where_it_is(tmp_path):
    model = planted(LLAMA, tmp_path / "planted", "model.layers.2.mlp.down_proj.weight", 2.0**14)
    result = model.forecast(TEXTS, alone=False)
    assert not result.all.sound
    assert result.first.value == "blocks.2.mlp.hook_post"
    assert result.kl == float("inf")
    assert "not finite, first at blocks.2.mlp.hook_post" in result.line()


def test_wrong_choices_are_refused(shipped):
    with pytest.raises(InputError, match="norms='open': as written, fused, decomposed"):
        shipped.forecast(TEXTS, norms="open")
    with pytest.raises(InputError, match="accumulate='bfloat16': float32, float16"):
        shipped.forecast(TEXTS, accumulate="bfloat16")

"""Results as DataFrames: layers, heads and positions are integers, and one row is one cell of one pair."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mionnx import MIModel, RuntimeMissingError

FRAME = "The capital of {} is"
CLEAN, CORRUPTED = ([FRAME.format(one) for one in some] for some in (("France", "Japan"), ("Spain", "Italy")))


def test_a_sweep(shipped: MIModel) -> None:
    """FINDINGS, part 2, 7 and 20: labels were strings, and there was no frame."""
    found = shipped.patch_sweep(CLEAN, CORRUPTED, "z", ("layer", "head", "position"))
    frame = found.to_frame()
    assert [*frame.columns] == ["pair", "layer", "head", "position", "position_token", "value", "effect"]
    assert {frame[name].dtype.kind for name in ("pair", "layer", "head", "position")} == {"i"}
    cells = frame.groupby(["layer", "head", "position"]).effect.mean().to_numpy().reshape(found.values.shape)
    np.testing.assert_allclose(cells, found.effect, atol=1e-9)
    at, effect = found.top(1)[0]
    assert {type(one) for one in at.values()} == {int}
    assert found.effect[at["layer"], at["head"], at["position"]] == effect
    assert found.labels["position"] == ["The", "capital", "of", "Spain/Italy", "is"]


def test_positions_by_name(shipped: MIModel) -> None:
    places = {"country": ["France", "Japan"], "last": -1}
    found = shipped.patch_sweep(CLEAN, CORRUPTED, "resid_pre", positions=places)
    assert {at["position"] for at, _ in found.top(8)} == {"country", "last"}
    assert "position country\n" in str(found)
    assert {*found.to_frame().position} == {"country", "last"}
    over = ("layer", "position")
    many = shipped.ablation_sweep([*CLEAN, *CORRUPTED], "resid_pre", over, "probability", answer=3)
    assert many.labels["position"][3] == "France/Japan/…"


def test_edges_and_circuits(shipped: MIModel) -> None:
    found = shipped.edge_attribution(CLEAN, CORRUPTED)
    frame = found.to_frame()
    assert len(frame) == found.count
    first = frame.iloc[0]
    assert (first.sender, first.receiver, first.score) == found.top(1)[0]
    assert str(frame.sender_layer.dtype) == str(frame.receiver_head.dtype) == "Int64"
    row = frame[(frame.sender == "a1.h3") & (frame.receiver == "a2.h5<q>")].iloc[0]
    assert (row.sender_layer, row.sender_head, row.receiver_layer, row.receiver_head) == (1, 3, 2, 5)
    circuit = shipped.circuit(CLEAN, CORRUPTED, [10, 50], scores=found).to_frame()
    assert circuit[["pair", "edges"]].to_numpy().tolist() == [[0, 10], [0, 50], [1, 10], [1, 50]]


def test_attributions(shipped: MIModel) -> None:
    one, many = shipped.attribute(CLEAN[0]), shipped.attribute(CLEAN)
    frame = one.to_frame()
    heads = frame.dropna().pivot(index="layer", columns="head", values="contribution").to_numpy()
    np.testing.assert_allclose(heads, one.heads)
    assert len(many.to_frame()) == 2 * len(frame)
    assert shipped.get_logit_diff(CLEAN, ["Paris", "Tokyo"], "Rome").to_frame().difference.iloc[0] > 0


def test_without_pandas_it_says_what_to_install(shipped: MIModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RuntimeMissingError, match="pip install pandas"):
        shipped.attribute(CLEAN[0]).to_frame()


def test_pandas_is_imported_when_it_is_asked_for() -> None:
    code = "import sys, mionnx; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Rows and windows are what a loop over the tokens makes; a manifest comes back as it was written, or is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mionnx import InputError, MIModel, SpecFileError, TokenizerError
from mionnx.analysis.harvest import activations
from mionnx.analysis.harvest.formats import pieces as pieces_of
from mionnx.analysis.harvest.manifest import FORMAT, HARVEST_MANIFEST, PROGRESS, Manifest, Shard, read_manifest
from mionnx.analysis.harvest.rows import HarvestRows, digest, integers, keep_mask, separator_of

quick = settings(max_examples=60, deadline=None, derandomize=True)
TEXTS = st.lists(st.lists(st.integers(3, 30), min_size=1, max_size=9), min_size=1, max_size=6)


@given(TEXTS, st.integers(1, 7), st.sampled_from([None, 3]))
@quick
def test_packed_windows_are_a_loop_over_all_tokens(
    shipped: MIModel, texts: list[list[int]], size: int, separator: int | None
) -> None:
    tokens: list[tuple[int, int, int]] = []
    for number, text in enumerate(texts):
        if separator is not None and text[0] != separator:
            tokens.append((separator, number, -1))
        tokens += [(token, number, at) for at, token in enumerate(text)]
    windows = [*HarvestRows(shipped, texts, size, True, separator, None)]
    assert [len(row) for row in windows[:-1]] == [size] * (len(windows) - 1)
    assert 0 < len(windows[-1]) <= size
    made = [one for row in windows for one in zip(row.ids, row.text, row.position, strict=True)]
    assert made == tokens
    assert sum(row.count for row in windows) == len(tokens)


@given(TEXTS, st.sampled_from([None, 1, 4]))
@quick
def test_rows_are_the_texts_cut_to_the_context(shipped: MIModel, texts: list[list[int]], context: int | None) -> None:
    rows = [*HarvestRows(shipped, texts, context, False, None, -1)]
    assert [row.ids.tolist() for row in rows] == [text[:context] for text in texts]
    assert [row.text.tolist() for row in rows] == [[n] * len(text[:context]) for n, text in enumerate(texts)]
    assert [row.position.tolist() for row in rows] == [[*range(len(text[:context]))] for text in texts]
    assert all(row.keep.tolist() == [False] * (len(row) - 1) + [True] for row in rows)


def test_positions_of_letters_are_those_of_the_tokenizer(shipped: MIModel) -> None:
    text = "The capital of France is"
    tokens = shipped.tokenize(text)
    keep = keep_mask(np.asarray(tokens.ids), tokens, "France")
    assert [shipped.to_string(int(token)).strip() for token in np.asarray(tokens.ids)[keep]] == ["France"]
    assert keep_mask(np.arange(4), None, lambda ids: ids % 2 == 1).tolist() == [False, True, False, True]
    assert keep_mask(np.arange(4), None, [0, -1]).tolist() == [True, False, False, True]
    with pytest.raises(TokenizerError, match="Berlin"):
        keep_mask(np.asarray(tokens.ids), tokens, "Berlin")


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ("France", "came as ids: give texts"),
        (4, "position 4 of a row of 4 tokens"),
        (-5, "position -5 of a row of 4 tokens"),
        (lambda ids: ids, r"gave int64 \[4\], it must give bool \[4\]"),
        (lambda ids: ids[:2] > 0, r"gave bool \[2\], it must give bool \[4\]"),
        ([0, 1.5], "positions are integers"),
        ([True], "positions are integers"),
    ],
)
def test_positions_that_a_row_does_not_have_are_refused(positions: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        keep_mask(np.arange(4), None, positions)


def test_the_number_of_the_text_is_in_the_refusal(shipped: MIModel) -> None:
    with pytest.raises(InputError, match="text 1: position 2 of a row of 2 tokens"):
        [*HarvestRows(shipped, [[3, 4, 5], [6, 7]], None, False, None, 2)]
    with pytest.raises(InputError, match="give packed=True"):
        separator_of(shipped, False, 0)
    assert separator_of(shipped, True, None) is None
    assert integers(np.int64(3)) == [3]


def test_the_digest_of_rows_sees_every_part(shipped: MIModel) -> None:
    def of(texts: list[list[int]], size: int = 3, positions: Any = None) -> str:
        return digest(HarvestRows(shipped, texts, size, True, None, positions))

    base = of([[3, 4, 5], [6, 7]])
    others = [of([[3, 4, 6], [6, 7]]), of([[3, 4], [5, 6, 7]]), of([[3, 4, 5], [6, 7]], 2)]
    others += [of([[3, 4, 5], [6, 7]], 3, 0), of([[6, 7], [3, 4, 5]])]
    assert base == of([[3, 4, 5], [6, 7]])
    assert len({base, *others}) == 1 + len(others)


@given(st.integers(0, 200), st.integers(1, 17), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
@quick
def test_any_order_has_each_token_once(count: int, size: int, block: int, mixed: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "BLOCK", block)
        patch.setattr(activations, "MIXED", mixed)
        pieces = [*activations.shuffled(count, size, seed)]
        again = [*activations.shuffled(count, size, seed)]
    assert [piece.tolist() for piece in pieces] == [piece.tolist() for piece in again]
    assert sorted(token for piece in pieces for token in piece.tolist()) == [*range(count)]
    assert all(len(piece) == size for piece in pieces[:-1])
    ordered = [at for piece in pieces_of(count, size) for at in range(count)[piece]]
    assert ordered == [*range(count)]


def manifest() -> Manifest:
    columns = {f"blocks.{layer}.hook_z": ("float16", (2, layer + 1)) for layer in (0, 2, 10, 11)}
    shards = [Shard({"shard-00000.safetensors": "ab"}, 7, 2, "cd"), Shard({}, 5, 1, "ef")]
    return Manifest({"context": 4}, columns, shards, True, 3, 1)


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / PROGRESS).mkdir()
    assert read_manifest(tmp_path) is None
    manifest().write(tmp_path)
    again = read_manifest(tmp_path)
    assert again == manifest()
    assert [*again.columns] == [*manifest().columns]  # in execution order, not in that of letters
    assert not (tmp_path / PROGRESS).exists()
    plain = json.loads((tmp_path / HARVEST_MANIFEST).read_text())
    assert (plain["tokens"], plain["rows"], plain[FORMAT]) == (12, 3, 1)
    first = (tmp_path / HARVEST_MANIFEST).read_bytes()
    manifest().write(tmp_path)
    assert (tmp_path / HARVEST_MANIFEST).read_bytes() == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({FORMAT: 2}, "is no manifest of activations of version 1"),
        ({"shards": [{"files": {}}]}, "is damaged"),
        ({"columns": {"z": ["float16"]}}, "is damaged"),
        ({"texts": "many"}, "is damaged"),
        ({"columns": None}, "is damaged"),
    ],
)
def test_a_damaged_manifest_is_refused_by_its_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    manifest().write(tmp_path)
    plain = json.loads((tmp_path / HARVEST_MANIFEST).read_text())
    (tmp_path / HARVEST_MANIFEST).write_text(json.dumps(plain | change))
    with pytest.raises(SpecFileError, match=f"{HARVEST_MANIFEST}.*{message}"):
        read_manifest(tmp_path)

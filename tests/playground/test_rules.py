"""Interventions by one set of rules: what Python refuses the page's engine refuses, and all else gives the same logits.

One table of entries, and random ones, are run by both; random links by the page's modules alone, in Node.
"""

from __future__ import annotations

import json
import os
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from nasty import NASTY
from playground_cases import CLAMPED, EQUAL, POST, PROMPT, REFUSED, Entry, entry, of_file, random_case
from playground_rules import Rules, node
from repository import SHARED

from mionnx import HookSpec, MIModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def rules(shipped: MIModel, modules: Path) -> Rules:
    return Rules(shipped, modules)


@pytest.mark.slow
def test_valid_entries_give_pythons_logits(rules: Rules, tmp_path: Path):
    found = rules.compare(EQUAL, tmp_path)
    assert {name: said for name, said in found.items() if said != "equal"} == {}
    plain = rules.of_python(HookSpec())
    for name, case in EQUAL.items():
        if "the zero of a dose" not in name and name != "no strength":
            assert np.abs(rules.of_python(rules.spec(case)) - plain).max() > 1e-3, name


def test_what_python_refuses_the_page_refuses(rules: Rules, tmp_path: Path):
    found = rules.compare(REFUSED, tmp_path)
    assert {name: said for name, said in found.items() if said != "both refuse"} == {}


@pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_random_entries_mean_the_same_in_both(rules: Rules, tmp_path: Path, count: int):
    """Refused by both, or the same logits; MIONNX_RULES_SEED draws others."""
    chance = Random(int(os.environ.get("MIONNX_RULES_SEED", "32")))
    hooks = [name for name in rules.graph.sites if "hook_act" not in name]
    cases = {str(n): random_case(chance, hooks) for n in range(count)}
    found = rules.compare(cases, tmp_path)
    wrong = {said: cases[name] for name, said in found.items() if said not in ("equal", "both refuse")}
    assert wrong == {}
    assert [*found.values()].count("equal") > count / 3
    assert [*found.values()].count("both refuse") > count / 20


WORDS = [PROMPT, "a", "__proto__", "constructor", "toString", "hasOwnProperty", "polluted", "length", NASTY]


def test_random_links_are_taken_or_refused_with_a_sentence(rules: Rules):
    """1,000 links in at most 5 seconds; MIONNX_LINKS=200000, and a seed, MIONNX_RULES_SEED, for a long run."""
    count, seed = int(os.environ.get("MIONNX_LINKS", "1000")), os.environ.get("MIONNX_RULES_SEED", "32")
    asked = {"manifest": rules.manifest, "entries": [one for case in EQUAL.values() for one in case], "words": WORDS}
    command = [SHARED / "playground_links.mjs", rules.folder, seed, count, max(5, count // 400)]
    found = json.loads(node(*command, given=json.dumps(asked)))
    assert found["wrong"] == []
    assert min(found["refusedByLink"], found["refusedByEngine"], found["taken"]) > found["links"] / 50 > 2
    assert found["slowest"] < 1000  # milliseconds: of the slowest link


@pytest.mark.parametrize(
    "given",
    [
        entry(POST, "replace", {"from": "prompt", "text": "a"}),
        entry(POST, "scale", {"from": "spec", "tensor": "constructor"}),
        entry(POST, "add", {"from": "spec", "tensor": "__proto__"}),
        entry(POST, "add", {"from": "spec", "tensors": []}),
        entry(CLAMPED, "clamp", 1.0),
        entry(CLAMPED, "clamp", of_file(0, "low", "high"), positions=[1]),
    ],
)
def test_links_that_broke_the_page(rules: Rules, given: Entry):
    """Said in words, and refused by the engine with a sentence or taken."""
    asked = {"manifest": rules.manifest, "entries": [given], "words": [PROMPT]}
    found = json.loads(node(SHARED / "playground_links.mjs", rules.folder, 1, 30, 5, given=json.dumps(asked)))
    assert found["wrong"] == []

"""The README's code runs, in its order, and prints what the README says."""

import re

import pytest
from repository import REPOSITORY

TEXT = (REPOSITORY / "README.md").read_text()


NUMBER = re.compile(r"-?\d+\.\d+")


def test_the_python_runs_and_prints_what_is_shown(monkeypatch, capsys):
    """Words exactly, fractions to the last digit that is shown but one."""
    monkeypatch.chdir(REPOSITORY)
    blocks = re.findall(r"```python\n(.*?)```(?:(?:\n\nprints)?\n\n```\n(.*?)```)?", TEXT, re.S)
    assert len(blocks) >= 10
    assert sum(bool(shown) for _, shown in blocks) >= 4
    namespace, everything = {}, ""
    for block, shown in blocks:
        exec(block, namespace)
        printed = capsys.readouterr().out
        everything += printed
        if shown:
            assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
            for one, other in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
                assert float(one) == pytest.approx(float(other), abs=1e-3)
    assert "did you mean 'blocks.2.hook_resid_post'" in everything
    assert float(everything.split()[-1]) < 5e-5


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:mionnx|exporters|benchmarks|models)/[\w/.-]+)`", TEXT))))
def test_the_files_it_names_exist(path):
    assert (REPOSITORY / path).exists()

"""The README's code runs, in its order, and prints what the README says."""

import re

import pytest
from conftest import REPOSITORY

TEXT = (REPOSITORY / "README.md").read_text()


def test_the_python_runs_and_prints_what_is_shown(monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) >= 8
    namespace: dict = {}
    exec(blocks[0], namespace)
    shown = re.search(r"prints\n\n```\n(.*?)```", TEXT, re.S)[1]
    assert capsys.readouterr().out == shown
    for block in blocks[1:]:
        exec(block, namespace)
    printed = capsys.readouterr().out
    assert "did you mean 'blocks.2.hook_resid_post'" in printed
    assert "blocks.2.hook_resid_post.0.add.changed:Add" in printed
    assert float(printed.split()[-1]) < 5e-5
    assert re.search(r"\d\.\d+ nats", printed)
    assert "Paris" in printed


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:mionnx|exporters|benchmarks|models)/[\w/.-]+)`", TEXT))))
def test_the_files_it_names_exist(path):
    assert (REPOSITORY / path).exists()

"""`MIModel` is a table of contents: verbs are functions of a model; help() and mypy follow their signatures."""

import ast
import inspect
import pydoc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from repository import REPOSITORY

import mionnx
from mionnx import MIModel
from mionnx.machine.dialects import Translated
from mionnx.run.runner import Runner

LONGEST = 740  # characters of a signature in help(): `generate` has nineteen parameters
SNIPPET = """
from mionnx import MIModel
model = MIModel.from_pretrained("x")
model.patch_sweep("a", "b", over=5)
model.run_with_hooks("a", return_type=5)
model.attention("a", nobody=1)
model.to_single_token(5)
model.W_E = 3
reveal_type(model.to_tokens("a"))
reveal_type(model.cfg.n_layers)
"""


def members() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, classes and methods, by the names that users write."""
    for name in mionnx.__all__:
        what = getattr(mionnx, name)
        yield name, what
        for member in dir(what) if inspect.isclass(what) else ():
            if not member.startswith("_") and callable(getattr(what, member)):
                yield f"{name}.{member}", getattr(what, member)


def test_the_model_inherits_from_the_runner_and_the_words_of_others_alone() -> None:
    assert MIModel.__bases__ == (Runner, Translated)


def test_the_model_holds_nothing_private_and_nothing_of_the_runner() -> None:
    own = {name for name in vars(MIModel) if not (name.startswith("__") and name.endswith("__"))}
    assert {name for name in own if name.startswith("_")} - {"_abc_impl"} == {"_repr_html_"}  # notebooks' name
    assert own & {*dir(Runner)} == set()


def test_no_verb_is_assigned_twice() -> None:
    (body,) = (node.body for node in ast.parse(inspect.getsource(MIModel)).body if isinstance(node, ast.ClassDef))
    names = [ast.unparse(target) for line in body if isinstance(line, ast.Assign) for target in line.targets]
    assert len({*names}) == len(names) > 40


def test_every_verb_is_a_function_of_a_model_in_a_room() -> None:
    for name, verb in vars(MIModel).items():
        if inspect.isfunction(verb) and name != "__dir__":
            assert verb.__module__.split(".")[1] in ("run", "analysis", "verify", "compile", "quantise"), name
            assert next(iter(inspect.signature(verb).parameters)) == "model", name


@pytest.mark.parametrize(("name", "what"), [*members()])
def test_a_signature_is_short_and_names_types_by_a_word(name: str, what: Callable[..., Any]) -> None:
    try:
        signature = str(inspect.signature(what))
    except (TypeError, ValueError):  # an exception's
        return
    assert "_SupportsArray" not in signature
    assert len(signature) <= LONGEST


def test_help_shows_the_documentation_of_verbs_and_properties() -> None:
    text = pydoc.plain(pydoc.render_doc(MIModel))
    assert "_SupportsArray" not in text
    for name in ("patch_sweep", "attention", "W_E", "verify"):
        doc = inspect.getdoc(inspect.getattr_static(MIModel, name))
        assert doc is not None
        assert doc.splitlines()[0] in text, name


@pytest.mark.slow
def test_type_checkers_see_the_parameters_of_a_verb(tmp_path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--follow-imports", "silent", str(tmp_path / "snippet.py")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    wrong = {int(line.split(":")[1]) for line in run.stdout.splitlines() if " error: " in line}
    assert wrong == {4, 5, 6, 7, 8}, run.stdout
    assert "ndarray" in run.stdout
    assert '"int"' in run.stdout

"""Other libraries' words: the table, the page that shows it, and the errors that answer with its lines.

FINDINGS, part 2, friction 17. `python tests/machine/test_dialects.py` writes the page anew.
"""

import copy
import importlib
import pickle
import re
from inspect import signature
from pathlib import Path

import pytest

import mionnx
from mionnx import HookCache, HookPoint, HookSpec, KVCache, MIError, MIModel
from mionnx.machine.dialects import LIBRARIES, TABLE, Word

ROOM = Path(mionnx.__file__).parent / "analysis" / "python_hooks"
PAGE = ROOM / "DIALECTS.md"
OWNERS = {"MIModel": MIModel, "HookCache": HookCache, "HookSpec": HookSpec, "KVCache": KVCache, "mionnx": mionnx}
ATTRIBUTES = [(word, name) for word in TABLE if word.owner in OWNERS for name in word.names]
KEYWORDS = [(word, name) for word in TABLE if word.owner and word.owner not in OWNERS for name in word.names]
PROMPT = "The capital of France is"


def page() -> str:
    """The table as markdown."""
    parts = [
        "# Their word, ours\n\n[python_hooks](README.md) · Words of other libraries that are written in another way "
        "here. An attribute or a keyword of this table raises an `MIError` with its line (`hasattr` stays False). "
        "Written by `python tests/machine/test_dialects.py` from `mionnx/machine/dialects.py`: do not edit.\n"
    ]
    for library in LIBRARIES:
        rows = [f"| {word.theirs} | {word.ours} |" for word in TABLE if word.library == library]
        parts.append("\n".join([f"## {library}\n", "| there | here |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page()


@pytest.mark.parametrize(("word", "name"), ATTRIBUTES, ids=lambda one: one if isinstance(one, str) else one.owner)
def test_an_attribute_of_theirs_raises_with_its_line(word: Word, name: str) -> None:
    owner = OWNERS[word.owner]
    assert not hasattr(owner, name)
    assert getattr(owner, name, None) is None
    with pytest.raises(MIError) as caught:
        getattr(owner, name)
    assert isinstance(caught.value, AttributeError)
    assert word.line in str(caught.value)


@pytest.mark.parametrize(("word", "name"), KEYWORDS, ids=lambda one: one if isinstance(one, str) else one.owner)
def test_a_keyword_of_theirs_raises_with_its_line(word: Word, name: str, shipped: MIModel) -> None:
    verb = getattr(shipped, word.owner)
    assert name not in signature(verb).parameters
    with pytest.raises(MIError, match=re.escape(word.line)) as caught:
        verb(PROMPT, **{name: 1})
    assert isinstance(caught.value, TypeError)


def test_a_word_has_one_line() -> None:
    known = [(word.owner, name) for word in TABLE for name in word.names]
    assert len(known) == len({*known})


def test_what_a_line_says_exists(shipped: MIModel) -> None:
    """Names of ours in the table: methods of a model, a cache, the package."""
    text = "\n".join(word.ours for word in TABLE)
    methods = {*re.findall(r"\bmodel\.(\w+)", text)} - {"onnx"}
    assert len(methods) > 25
    assert [name for name in methods if not hasattr(shipped, name)] == []
    for call, keyword in re.findall(r"\bmodel\.(\w+)\([^()]*?(\w+)=", text):
        assert keyword in signature(getattr(shipped, call)).parameters, (call, keyword)
    classes = {*re.findall(r"\b([A-Z]\w+)\(", text), *re.findall(r"`([A-Z]\w+)`", text)} - {"Netron"}
    for name in classes - {*vars(mionnx.Intervention)} - {*vars(HookPoint)}:
        assert hasattr(mionnx, name) or hasattr(shipped, name), name


def test_instances_answer_as_their_classes(shipped: MIModel) -> None:
    cache = shipped.forward(PROMPT, HookSpec().capture("hook_embed"), use_cache=True)
    for one, name in (
        (shipped, "W_Q"),
        (cache, "decompose_resid"),
        (HookSpec(), "new"),
        (cache.kv_cache, "with_layers"),
    ):
        assert not hasattr(one, name)
        with pytest.raises(MIError, match="a word of"):
            getattr(one, name)


def test_a_misspelled_name_is_told_the_nearest(shipped: MIModel) -> None:
    with pytest.raises(MIError, match="MIModel has no 'forwrd'; did you mean 'forward'"):
        shipped.forwrd  # noqa: B018
    with pytest.raises(MIError, match=r"forward\(\) has no keyword 'attenton_mask'; did you mean 'attention_mask'"):
        shipped.forward(PROMPT, attenton_mask=None)
    with pytest.raises(MIError, match="mionnx has no 'HookCahe'; did you mean 'HookCache'"):
        mionnx.HookCahe  # noqa: B018


def test_an_import_by_name_keeps_the_line() -> None:
    """`from mionnx import` drops the message of an AttributeError, so it gets an ImportError."""
    with pytest.raises(ImportError, match=r"a word of LARQL; here: .*capture_residuals") as caught:
        from mionnx import RecordHook  # noqa: F401
    assert isinstance(caught.value, MIError)
    assert importlib.import_module("mionnx.machine") is mionnx.machine


def test_a_property_that_fails_tells_its_own_error(shipped: MIModel) -> None:
    class Broken(MIModel):
        @property
        def wrong(self) -> None:
            return None.missing  # type: ignore[attr-defined]

    broken = Broken(shipped.hooked)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'missing'"):
        broken.wrong  # noqa: B018


def test_copies_and_pickles_are_not_asked_for_words(shipped: MIModel) -> None:
    spec = HookSpec().capture("hook_embed")
    assert copy.deepcopy(spec) == spec == pickle.loads(pickle.dumps(spec))
    assert not hasattr(shipped, "__array__")


if __name__ == "__main__":
    PAGE.write_text(page())

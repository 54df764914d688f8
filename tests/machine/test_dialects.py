"""Other libraries' words: the page of them, and the errors that answer with its lines."""

import copy
import importlib
import pickle
import re
from inspect import signature

import pytest
from repository import REPOSITORY

import mionnx
from mionnx import HookCache, HookPoint, HookSpec, KVCache, MIError, MIModel
from mionnx.machine import dialects
from mionnx.machine.dialects import PAGE, dialect_lines

OWNERS = {"MIModel": MIModel, "HookCache": HookCache, "HookSpec": HookSpec, "KVCache": KVCache, "mionnx": mionnx}
ATTRIBUTES = [word for word in dialect_lines() if word[0] in OWNERS]
KEYWORDS = [word for word in dialect_lines() if word[0] not in OWNERS]
ROWS = [row for row in PAGE.read_text().splitlines() if row.startswith("| `")]
PROMPT = "The capital of France is"


def test_the_page_is_read_whole() -> None:
    """Every word of the page is one of ours to answer, or belongs to an object of theirs."""
    words = [word for row in ROWS for word in re.findall("`([^`]+)`", row.strip("| ").split(" | ")[0])]
    theirs = [
        word
        for word in words
        if re.match(r"\w+\.|\w+::", word) and not re.match(r"(model|cache|\w+[a-z]Spec|KVCache)\.\w+$", word)
    ]
    assert len(words) - len(theirs) == len(dialect_lines()) == len({*dialect_lines()})
    assert all(row.count(" | ") == 1 for row in ROWS)
    for library in ("TransformerLens", "nnsight", "LARQL", "candle-mi"):
        assert sum(f"a word of {library};" in line for line in dialect_lines().values()) > 10


@pytest.mark.parametrize("word", ATTRIBUTES, ids=".".join)
def test_an_attribute_of_theirs_raises_with_its_line(word: tuple[str, str]) -> None:
    owner, name = OWNERS[word[0]], word[1]
    assert not hasattr(owner, name)
    assert getattr(owner, name, None) is None
    with pytest.raises(MIError) as caught:
        getattr(owner, name)
    assert isinstance(caught.value, AttributeError)
    assert dialect_lines()[word] in str(caught.value)


@pytest.mark.parametrize("word", KEYWORDS, ids=".".join)
def test_a_keyword_of_theirs_raises_with_its_line(word: tuple[str, str], shipped: MIModel) -> None:
    verb, name = getattr(shipped, word[0]), word[1]
    assert name not in signature(verb).parameters
    with pytest.raises(MIError, match=re.escape(dialect_lines()[word])) as caught:
        verb(PROMPT, **{name: 1})
    assert isinstance(caught.value, TypeError)


def test_what_a_line_says_exists(shipped: MIModel) -> None:
    """Names of ours in the table: methods of a model, a cache, the package."""
    text = "\n".join(row.strip("| ").split(" | ")[1] for row in ROWS)
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
        (shipped, "unembed"),
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


def test_a_call_asks_no_class_for_what_it_lacks(monkeypatch):
    """The nearest name takes longer to find than a small model's pass."""
    model = MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")
    asked = []
    monkeypatch.setattr(dialects, "unknown_name", lambda *word: asked.append(word[1]) or AttributeError())
    model.forward(PROMPT, HookSpec().capture("blocks.0.hook_resid_post"))
    model.generate(PROMPT, max_new_tokens=1)
    assert asked == []

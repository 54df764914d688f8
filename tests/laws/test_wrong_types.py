"""Every public parameter takes effect or is refused by an `MIError`, whatever it is given.

Values of wrong types are put in the place of each parameter of each public call, the others being right
(`tests/shared/wrong_types.py`). A call may return, or raise an `MIError`; an exception of the caller's own functions
passes through as it is.
"""

import inspect
import json
import resource
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
import pytest
from repository import REPOSITORY
from wrong_types import GROUPS, PROMPT, WRONG, Call

import mionnx
from mionnx import (
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    KnockoutSpec,
    KVCache,
    Logits,
    MIError,
    MIModel,
    StateKnockoutSpec,
    create_knockout_mask,
)

SECONDS = 20  # of one call, on a machine with other work
MEMORY = 6 * 2**30  # bytes that a call may take besides
# Methods that take what other parts of mionnx hand them, two that refuse whatever they are given, and four of Python's.
INSIDE = {
    "Attributions.count", "Attributions.index",
    "Compiled.run", "Fragment.evaluate", "HookCache.output",
    "Intervention.from_entry", "MIModel.ids",
    "Intervention.to_entry", "KVCache.layer_of", "KVCache.left", "KVCache.parts_of", "KVCache.put_layer",
    "LayerCache.layer_of", "LayerCache.left", "LayerCache.parts_of", "LayerCache.put_layer", "LayerCache.trim_to",
    "Logits.feeds", "Logits.outputs", "Options.for_many_graphs", "RWKVState.layer_of", "RWKVState.left",
    "RWKVState.clone_layer_position_range", "RWKVState.parts_of", "RWKVState.put_layer", "RWKVState.trim_to",
    "Report.add",
    "StateAblationResult.logit_diff", "KnockoutSpec.length_of_any_text", "Spans.of",
    # of heads that no model that ships has: tests/run/test_encoder_verbs.py
    "MIModel.answer_span", "MIModel.attribute_similarity", "MIModel.classify", "MIModel.embed", "MIModel.similarity",
    "MIModel.tag",
    "StateAblationResult.top_changed_tokens", "StateKnockoutSpec.from_entry", "StateSteeringSpec.from_entry",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory() -> Iterator[None]:
    """What would take all memory fails instead."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def calls(shipped: MIModel, recurrent: MIModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    """Group -> its calls."""
    folder = tmp_path_factory.mktemp("calls")
    return {group: list(make(shipped, recurrent, folder)) for group, make in GROUPS.items()}


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"no answer in {SECONDS} s")


def raw(call: Call, **changed: Any) -> str | None:
    """What a call raises that is no `MIError`, in words."""
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        call(**changed)
    except MIError:
        return None
    except Exception as error:
        signal.alarm(0)  # words may take their time too
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return None


def check(calls: Iterable[Call], one_in: int) -> None:
    """Try every parameter with one in so many of the wrong values, in turn."""
    found, number = [], 0
    for call in calls:
        for parameter in call.parameters:
            for name, value in WRONG.items():
                number += 1
                if number % one_in:
                    continue
                shutil.rmtree("compiled", ignore_errors=True)
                if said := raw(call, **{parameter: value}):
                    found.append(f"{call.name}({parameter}={name}): {said}")
    assert not found, "\n".join(ascii(line) for line in found)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to write into."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
def test_nothing_raw_comes_of_a_wrong_value(group: str, calls: dict[str, list[Call]]) -> None:
    check([call for call in calls[group] if not call.slow], 7)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
def test_nothing_raw_comes_of_any_wrong_value(group: str, calls: dict[str, list[Call]]) -> None:
    check([call for call in calls[group] if not call.slow], 1)
    check([call for call in calls[group] if call.slow], 5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.slow
def test_the_right_arguments_are_right(calls: dict[str, list[Call]]) -> None:
    """So that what a wrong value is refused for is that value."""
    for call in (call for group in calls.values() for call in group):
        shutil.rmtree("compiled", ignore_errors=True)
        call()


def test_every_public_call_is_tried(calls: dict[str, list[Call]]) -> None:
    tried = {call.name for group in calls.values() for call in group}
    frozen = json.loads((REPOSITORY / "tests" / "laws" / "public_api.json").read_text())["names"]
    public = {
        f"{name}.{member}"
        for name in frozen
        if inspect.isclass(getattr(mionnx, name)) and not issubclass(getattr(mionnx, name), BaseException)
        for member, parameters in frozen[name]["members"].items()
        if parameters and {*parameters} - {"self"}
    }
    points = frozen["HookPoint"]["members"].items()
    layered = {f"HookPoint.{name}" for name, parameters in points if parameters and "layer" in parameters}
    assert not (missing := public - tried - INSIDE - layered), sorted(missing)
    assert {"create_knockout_mask", "sample_token"} <= tried


@pytest.mark.parametrize(
    "given",
    [
        {"hooks": []},
        {"hooks": {}},
        {"logits": "last"},
        {"hooks": StateKnockoutSpec()},
        {"use_cache": "yes"},
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_with_what_is_meant(shipped: MIModel, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(given))} must be "):
        shipped.forward(PROMPT, **given)


def test_unknown_keywords_are_python_s_own_error_and_name_the_nearest(shipped: MIModel) -> None:
    with pytest.raises(TypeError, match=r"generate\(\) has no keyword 'max_new_token'; did you mean 'max_new_tokens'"):
        shipped.generate(PROMPT, max_new_token=3)
    assert issubclass(mionnx.UnknownKeywordError, MIError)


class OwnError(Exception):
    """An exception of the caller's."""


def _raising(*_: Any, **__: Any) -> Any:
    raise OwnError


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.forward(PROMPT, HookSpec().capture(_raising)),
        lambda model: model.run_with_hooks(PROMPT, fwd_hooks=[("hook_embed", _raising)]),
        lambda model: model.generate(PROMPT, max_new_tokens=2, streamer=_raising),
        lambda model: model.patch_sweep(PROMPT, "The capital of Japan is", layers=[1], metric=_raising),
    ],
    ids=["predicate", "hook", "streamer", "metric"],
)
def test_an_exception_of_the_caller_s_own_function_passes_through(shipped: MIModel, call: Any) -> None:
    with pytest.raises(OwnError):
        call(shipped)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: model.estimate(HookSpec().capture("*"), 1, -5), "seq must be 1 or above, got -5"),
        (lambda model: model.estimate(HookSpec().capture("*"), 0, 5), "batch must be 1 or above"),
        (lambda model: model.estimate(HookSpec().capture("*"), 1, 5, past=-1), "past must be 0 or above"),
        (lambda model: HookSpec().capture("hook_embed", positions={3: 1}), "positions must be"),
        (lambda model: Intervention.Zero(positions={3: 1}), "positions must be .* got the dictionary"),
        (lambda model: Intervention.Zero(heads={3: 1}), "heads must be .* got the dictionary"),
        (lambda model: model.forward(PROMPT, logits=Logits(positions={3: 1})), "positions must be"),
        (lambda model: model.generate(PROMPT, do_sample=True, seed=-1), "seed must be an integer of 0 or above"),
        (lambda model: model.compile(_adding(), "compiled", knobs={"": None}), "no name for one"),
        (lambda model: KVCache.empty(2, -1, 2, 4, np.float32), "sizes are 0 or above"),
        (lambda model: KnockoutSpec().layer_range(0, 10**12), "a model has 0 to"),
        (lambda model: create_knockout_mask(KnockoutSpec().edge(2, 1), 10**12, 4), "more than is free"),
        (lambda model: HookPoint.parse(None), "a hook point is a HookPoint or its name"),
        (lambda model: model.forward(["a", "\ud800"]), r"text must be a text, got '\\ud800'"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_what_would_mean_nothing_or_something_else_is_refused(shipped: MIModel, call: Any, said: str) -> None:
    with pytest.raises(MIError, match=said):
        call(shipped)


def _adding() -> HookSpec:
    return HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Add(1.0))


def test_the_largest_of_some_tokens_are_their_places_among_them(shipped: MIModel) -> None:
    """`tokens` and `top_k` together have a meaning of their own."""
    every = shipped.forward(PROMPT, logits=Logits(positions=-1)).output()[0, 0]
    tokens = [7, 300, 21, 150]
    cache = shipped.forward(PROMPT, logits=Logits(positions=-1, token_ids=tokens, k=2))
    order = np.argsort(-every[tokens])[:2]
    assert cache.top_ids is not None
    assert np.array_equal(np.asarray(cache.top_ids)[0, 0], order)
    assert np.array_equal(cache.output()[0, 0], every[tokens][order])


@pytest.mark.usefixtures("elsewhere")
def test_an_empty_spec_compiles_to_the_model_itself(shipped: MIModel) -> None:
    session = onnxruntime.InferenceSession(str(shipped.compile(HookSpec(), "itself", plain=True) / "model.onnx"))
    ids = shipped.tokenize(PROMPT).ids[None]
    sizes = {"batch_size": 1, "sequence_length": ids.shape[1], "past_sequence_length": 0}
    feeds = {
        value.name: np.zeros([one if isinstance(one, int) else sizes.get(one, 0) for one in value.shape], np.float32)
        for value in session.get_inputs()
    }
    feeds |= {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    (logits,) = session.run(["logits"], {name: feeds[name] for name in (one.name for one in session.get_inputs())})
    assert np.allclose(logits, shipped.forward(PROMPT).output(), atol=1e-5)

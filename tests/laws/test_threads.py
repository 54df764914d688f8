"""A model may be used by threads: each gets what a single thread gets, and a graph is opened once for all of them."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from repository import REPOSITORY

from mionnx import HookPoint, HookSpec, Intervention, MIModel, Options
from mionnx.engine.onnx_runtime import OnnxRuntime
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.once import once_property

TEXT, OTHER = "The capital of France is", "The capital of Japan is"
THREADS = 8
DIFFERENT = [
    HookPoint.ResidPost(0),
    HookPoint.MlpOut(1),
    HookPoint.AttnZ(2),
    HookPoint.AttnPattern(3),
]  # no graph serves two
Job = Callable[[MIModel], Any]


@pytest.fixture(autouse=True)
def _hurried() -> Iterator[None]:
    """Threads change places a hundred times as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def fresh(name: str = "world-llama", **options: Any) -> MIModel:
    hooked = HookedModel.open(REPOSITORY / "models" / name)
    return MIModel(hooked, Options(**{"threads": 1, "base": False, **options}))


def captured(hook: HookPoint) -> Job:
    spec = HookSpec().capture(hook).intervene(hook, Intervention.Scale(0.5, positions=-1))
    return lambda model: (lambda cache: [cache.output(), cache[hook]])(model.forward(TEXT, spec))


def chosen(name: str) -> Job:
    """A capture by a predicate of its own: a binder remembers 64 meanings, and forgets them all when it is full."""
    spec = HookSpec().capture(lambda hook: hook == name)
    return lambda model: model.forward(OTHER, spec, logits=False)[name]


def generated(model: MIModel) -> Any:
    steer = HookSpec().intervene(HookPoint.ResidPost(1), Intervention.Scale(0.9, positions="generated"))
    made = model.generate([TEXT, OTHER], steer, max_new_tokens=4, do_sample=True, seed=3)
    return [*made.ids, made.texts]


def hooked_call(model: MIModel) -> Any:
    def halve(activation: Any, hook: Any) -> None:
        activation *= 0.5

    return model.run_with_hooks(TEXT, [("blocks.1.hook_mlp_out", halve), ("blocks.2.attn.hook_z", halve)])


def read(model: MIModel) -> Any:
    lens = model.logit_lens(TEXT)
    return [model.W_E, model.cfg.n_layers, lens.to_dict(), model.to_single_token("Paris")]


def swept(model: MIModel) -> Any:
    return model.patch_sweep(TEXT, OTHER, answer="Paris", versus="Tokyo").values


def attributed(model: MIModel) -> Any:
    return model.attribute(TEXT, "Paris").to_dict()


def jobs(layers: int = 4) -> list[Job]:
    variants = (HookPoint.ResidPost, HookPoint.MlpOut, HookPoint.AttnZ, HookPoint.AttnPattern)
    many = [captured(point(layer)) for point in variants[:3] for layer in range(layers)]
    names = [chosen(str(point(layer))) for point in variants for layer in range(layers)]
    return [*many, *names, generated, hooked_call, read, swept, attributed]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return np.array_equal(one, other, equal_nan=True) if isinstance(one, np.ndarray) else one == other


def crowd(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """The results of so many threads that begin together."""
    gate = Barrier(count)

    def begin(number: int) -> Any:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(begin, range(count))]


def check(model: MIModel, alone: MIModel, what: list[Job], calls: int) -> None:
    expected = [job(alone) for job in what]

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        for at in random.permutation(np.arange(max(calls, len(what))) % len(what))[:calls]:
            assert same(what[at](model), expected[at]), at

    crowd(work)


def test_threads_get_what_a_single_thread_gets() -> None:
    """With a pool of five graphs, so that they are closed and opened again all the time."""
    check(fresh(max_graphs=5), fresh(), jobs(2), 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
@pytest.mark.parametrize("options", [{"max_graphs": 5}, {"max_graphs": 2}, {"base": True, "max_graphs": 9}])
def test_threads_get_what_a_single_thread_gets_for_long(name: str, options: dict[str, Any]) -> None:
    model = fresh(name, **options)
    assert not options.get("base") or model.prepare()
    check(model, fresh(name), jobs(), 10)


@pytest.mark.parametrize("engine", ["openvino", "reference"])
def test_threads_share_a_graph_of_another_engine(engine: str) -> None:
    """An infer request of OpenVINO's serves one thread at a time; the reference evaluator one thread altogether."""
    if engine == "openvino":
        pytest.importorskip("openvino")
    model, alone = (MIModel(fresh().hooked, Options(engine=engine)) for _ in range(2))
    count = 20 if engine == "openvino" else 2
    texts = [f"The capital of {name} is" for name in ("France", "Japan", "Germany", "Italy")]
    expected = [alone.forward(text).output() for text in texts]

    def work(number: int) -> None:
        for n in range(count):
            at = (number + n) % len(texts)
            np.testing.assert_array_equal(model.forward(texts[at]).output(), expected[at])

    crowd(work)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs that ONNX Runtime opens during the test."""
    found: list[object] = []
    real = OnnxRuntime.open

    def spy(self: OnnxRuntime, model: Any, *rest: Any, **named: Any) -> Any:
        found.append(model)
        return real(self, model, *rest, **named)

    monkeypatch.setattr(OnnxRuntime, "open", spy)
    return found


def test_threads_open_a_graph_once(opened: list[object]) -> None:
    model = fresh()
    specs = [HookSpec().capture(hook) for hook in DIFFERENT]
    crowd(lambda number: [model.forward(TEXT, specs[(number + n) % 4]) for n in range(4)])
    assert len(opened) == len({*map(bytes, opened)}) == len(model.compiled) == 4
    crowd(lambda number: hooked_call(model))
    assert len(opened) == 4 + 3  # a chain of three segments


def test_different_graphs_open_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    model, both, real = fresh(), Barrier(2, timeout=60), OnnxRuntime.open

    def met(self: OnnxRuntime, *given: Any, **named: Any) -> Any:
        both.wait()  # for ever, if one waited for the other
        return real(self, *given, **named)

    monkeypatch.setattr(OnnxRuntime, "open", met)
    crowd(lambda number: model.warm(HookSpec().capture(DIFFERENT[number])), 2)


def test_a_failure_to_open_is_each_thread_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who waited tries for itself."""
    model, calls, real = fresh(), [], OnnxRuntime.open

    def fails_once(self: OnnxRuntime, *given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise MemoryError
        return real(self, *given, **named)

    monkeypatch.setattr(OnnxRuntime, "open", fails_once)

    def work(number: int) -> bool:
        try:
            return model.forward(TEXT).output() is not None
        except MemoryError:
            return False

    assert sorted(crowd(work)) == [False] + [True] * (THREADS - 1)
    assert len(calls) == 2


def test_a_property_is_computed_once() -> None:
    calls = []

    class Slow:
        @once_property
        def value(self) -> object:
            calls.append(sum(range(100_000)))
            return object()

    one = Slow()
    assert len({id(found) for found in crowd(lambda number: one.value)}) == 1
    assert len(calls) == 1
    assert Slow.value.__doc__ is None
    model = fresh()
    assert len({id(found) for found in crowd(lambda number: model.tokenizer)}) == 1
    assert len({id(found) for found in crowd(lambda number: model.opened(Counted))}) == 1
    assert Counted.made == 1


class Counted:
    """What `Runner.opened` makes one of."""

    made = 0

    def __init__(self, hooked: HookedModel, options: Options) -> None:
        Counted.made += 1
        sum(range(100_000))

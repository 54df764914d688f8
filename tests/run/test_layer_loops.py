"""A loop over layers is told of the verb that does it in one call; FINDINGS, part 2, friction 3."""

import warnings
from collections.abc import Callable

import pytest
from families import make_checkpoint

from exporters.transformers import export
from mionnx import HookSpec, Intervention, LayerLoopWarning, MIModel

IDS = [3, 9, 14, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("deep")
    make_checkpoint("llama", path / "checkpoint", num_hidden_layers=6)
    export(path / "checkpoint", path / "hooked")
    return path / "hooked"


@pytest.fixture
def model(folder) -> MIModel:
    return MIModel.from_pretrained(folder, threads=1)


def mute(activation, hook):
    activation[:] = 0


def told(loop: Callable[[], object]) -> list[str]:
    """What a loop is told of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop()
    return [str(one.message) for one in caught if one.category is LayerLoopWarning]


LOOPS = {
    "run_with_hooks": lambda model, layer: model.run_with_hooks(
        IDS, [(f"blocks.{layer}.attn.hook_z", mute)], return_type=None
    ),
    "forward": lambda model, layer: model.forward(  # without logits a graph ends at its last capture
        IDS,
        HookSpec().capture("*.hook_resid_post").intervene(f"blocks.{layer}.attn.hook_z", Intervention.Scale(0.5)),
        logits=False,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.slow_beyond(1)
def test_the_fifth_layer_of_a_loop_names_the_verb_once(model, name):
    assert told(lambda: [LOOPS[name](model, layer) for layer in range(4)]) == []
    assert told(lambda: [LOOPS[name](model, layer) for layer in range(4)]) == []  # known graphs
    (message,) = told(lambda: [LOOPS[name](model, layer) for layer in range(6)])
    assert 'model.ablation_sweep(prompt, "z", "layer")' in message
    assert 'model.patch_sweep(clean, corrupted, "z", "layer", answer=...)' in message
    assert told(lambda: [model.run_with_hooks(IDS, [(f"blocks.{n}.hook_mlp_out", mute)]) for n in range(6)]) == []


def test_a_loop_that_only_captures_is_told_of_the_glob(model):
    captures = [HookSpec().capture(f"blocks.{layer}.hook_mlp_out") for layer in range(6)]
    assert told(lambda: [model.forward(IDS, spec) for spec in captures]) == []  # they share a graph of every layer
    (message,) = told(lambda: [model.forward(IDS, spec, logits=False) for spec in captures])
    assert 'HookSpec().capture("blocks.*.hook_mlp_out")' in message


def test_the_warning_points_to_the_loop(model):
    with pytest.warns(LayerLoopWarning) as caught:
        [LOOPS["forward"](model, layer) for layer in range(6)]
    assert caught[0].filename == __file__


def test_verbs_that_open_many_graphs_are_silent(model):
    """Sweeps, generations and lenses, and calls that differ in more than the layer."""

    def verbs():
        model.ablation_sweep(IDS, "z", "layer")
        model.patch_sweep(IDS, [3, 8, 14, 5], "z", "layer", answer=7, versus=8)
        model.path_patch(IDS, [3, 8, 14, 5], "hook_final_norm", "z", answer=7, versus=8)
        for layer in range(6):
            model.generate(
                IDS, HookSpec().intervene(f"blocks.{layer}.attn.hook_z", Intervention.Zero()), max_new_tokens=2
            )
            model.forward_ablate(IDS, layer, [5])
        for count in range(1, 6):
            model.forward(IDS, HookSpec().capture([f"blocks.{layer}.hook_mlp_out" for layer in range(count)]))

    assert told(verbs) == []

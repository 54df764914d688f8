"""Sparse autoencoders and transcoders as parts of the graph: equal to plain numpy on the same files."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from repository import SHARED
from saelens_fixture import CASES as CASES_OF_SAELENS
from saelens_fixture import D_IN, D_SAE, K, random_weights
from safetensors.numpy import save_file

from mionnx import SAE, HookError, HookSpec, InputError, Intervention, InterventionError, MIModel, ModelError

PROMPT = "The capital of France is"
HOOK = "blocks.2.hook_resid_post"
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained("models/world-llama", threads=1)


def folder_of(path: Path, weights, **config) -> Path:
    path.mkdir()
    facts = {"d_in": D_IN, "d_sae": D_SAE, "dtype": "float32", "device": "cpu", **config}
    (path / "cfg.json").write_text(json.dumps(facts))
    save_file(weights, path / "sae_weights.safetensors")
    return path


def six(architecture: str, **config) -> dict:
    """The configuration as version 6 of SAELens writes it."""
    metadata = {"sae_lens_version": "6.54.12", "hook_name": HOOK, "model_name": "world", **config.pop("metadata", {})}
    plain = {"normalize_activations": "none", "reshape_activations": "none", "apply_b_dec_to_input": True}
    return {"architecture": architecture, **plain, "metadata": metadata, **config}


class Plain:
    """SAELens' `encode` and `decode`, written out in float64 numpy from its source."""

    def __init__(self, weights, architecture, apply_b_dec=True, normalise="none", k=K, rescale=False):
        self.w = {name: array.astype(np.float64) for name, array in weights.items()}
        self.architecture, self.apply_b_dec, self.normalise, self.k, self.rescale = (
            architecture, apply_b_dec, normalise, k, rescale
        )  # fmt: skip

    def normal(self, x):
        if self.normalise == "layer_norm":
            self.mu = x.mean(-1, keepdims=True)
            self.std = (x - self.mu).std(-1, ddof=1, keepdims=True)
            return (x - self.mu) / (self.std + 1e-5)
        if self.normalise == "constant_norm_rescale":
            self.coeff = x.shape[-1] ** 0.5 / np.linalg.norm(x, axis=-1, keepdims=True)
            return x * self.coeff
        return x

    def encode(self, x):
        w = self.w
        x = self.normal(x.astype(np.float64)) - (w["b_dec"] if self.apply_b_dec else 0)
        if self.architecture == "gated":
            gate = (x @ w["W_enc"] + w["b_gate"]) > 0
            self.pre = x @ (w["W_enc"] * np.exp(w["r_mag"])) + w["b_mag"]
            return gate * np.maximum(self.pre, 0)
        self.pre = x @ w["W_enc"] + w["b_enc"]
        if self.architecture == "topk":
            ranked = self.pre * (np.linalg.norm(w["W_dec"], axis=-1) if self.rescale else 1)
            largest = np.argsort(-ranked, axis=-1)[..., : self.k]
            out = np.zeros_like(ranked)
            np.put_along_axis(out, largest, np.maximum(np.take_along_axis(ranked, largest, -1), 0), -1)
            return out
        acts = np.maximum(self.pre, 0)
        return acts * (self.pre > w["threshold"]) if "threshold" in w else acts

    def decode(self, acts, denormalise=True):
        if self.rescale:
            acts = acts / np.linalg.norm(self.w["W_dec"], axis=-1)
        out = acts @ self.w["W_dec"] + self.w["b_dec"]
        if denormalise and self.normalise == "layer_norm":
            return out * self.std + self.mu
        return out / self.coeff if denormalise and self.normalise == "constant_norm_rescale" else out


CASES = {
    "relu": ("standard", {}, {}),
    "relu, no bias subtracted": ("standard", {"apply_b_dec_to_input": False}, {"apply_b_dec": False}),
    "jumprelu": ("jumprelu", {}, {}),
    "batch top-k": ("batchtopk", {}, {}),
    "gated": ("gated", {}, {}),
    "topk": ("topk", {"k": K}, {}),
    "topk by decoder norm": ("topk", {"k": K, "rescale_acts_by_decoder_norm": True}, {"rescale": True}),
    "layer norm": ("standard", {"normalize_activations": "layer_norm"}, {"normalise": "layer_norm"}),
    "layer norm, topk": ("topk", {"normalize_activations": "layer_norm", "k": K}, {"normalise": "layer_norm"}),
    "constant norm": (
        "jumprelu", {"normalize_activations": "constant_norm_rescale"}, {"normalise": "constant_norm_rescale"}
    ),
    "expected average": ("standard", {"normalize_activations": "expected_average_only_in"}, {}),
}  # fmt: skip


def case(name: str, tmp_path: Path) -> tuple[SAE, Plain]:
    architecture, config, plain = CASES[name]
    kind = "jumprelu" if architecture == "batchtopk" else architecture
    weights = random_weights(kind)
    return SAE.load(folder_of(tmp_path / "sae", weights, **six(architecture, **config))), Plain(weights, kind, **plain)


def near(found: np.ndarray, expected: np.ndarray) -> bool:
    return np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_features_equal_numpy_and_the_error_term_keeps_the_logits(model, tmp_path, name):
    sae, plain = case(name, tmp_path)
    hooks = ("hook_sae_input", "hook_sae_acts_pre", "hook_sae_acts_post", "hook_sae_acts", "hook_sae_recons")
    spec = sae.spec().capture(HOOK, before=True).capture(HOOK)
    for hook in (*hooks, "hook_sae_error", "hook_sae_output"):
        spec.capture(f"{HOOK}.{hook}")
    cache = model.forward(PROMPT, spec)
    x = cache[f"{HOOK}.before"]
    acts = plain.encode(x)
    pre = plain.pre
    recons = plain.decode(acts)
    assert 0.02 < (acts > 0).mean() < 0.9
    expected = (x, pre, acts, acts, plain.decode(acts, denormalise=False))
    for hook, value in zip(hooks, expected, strict=True):
        assert near(cache[f"{HOOK}.{hook}"], value), hook
    assert near(cache["sae_error", 2], x - recons)
    assert near(cache["sae_output", 2], x)
    assert np.abs(cache.output() - model.forward(PROMPT).output()).max() < TOLERANCE
    dropped = model.forward(PROMPT, sae.spec("dropped").capture(HOOK))
    assert near(dropped[HOOK], recons)
    replaced = HookSpec().intervene(HOOK, Intervention.Replace(recons.astype(np.float32)))
    assert np.abs(dropped.output() - model.forward(PROMPT, replaced).output()).max() < 10 * TOLERANCE
    assert np.abs(dropped.output() - cache.output()).max() > 0.01


@pytest.mark.parametrize("name", ["relu", "topk", "layer norm", "gated", "topk by decoder norm"])
def test_the_largest_features_are_ranked_in_the_graph(model, tmp_path, name):
    sae, plain = case(name, tmp_path)
    x = model.forward(PROMPT, HookSpec().capture(HOOK))[HOOK][0]
    acts = plain.encode(x)
    found = model.features(PROMPT, sae, k=5, follow=[3, 1])
    assert near(found.values, -np.sort(-acts, axis=-1)[:, :5])
    assert near(np.take_along_axis(acts, found.ids, -1), found.values)
    assert near(found.of(3), acts[:, 3])
    assert near(found.activations, acts[:, [3, 1]])
    best = model.features(PROMPT, sae, k=5)
    assert near(best.activations, acts[:, best.followed])
    assert np.argmax(acts.max(axis=0)) == best.followed[0]
    assert best.top(4)[0][0] == acts[4].argmax()


def test_no_array_of_all_features_leaves_the_graph(model, tmp_path):
    sae, _ = case("relu", tmp_path)
    model.features(PROMPT, sae, k=3, follow=[0])
    plan, compiled = [*model.compiled.items()][-1]
    assert {want.hook.rpartition(".")[2] for want in plan.captures} == {
        "hook_top_ids",
        "hook_top_values",
        "hook_followed",
    }
    assert not any("blocks.3" in node for nodes in compiled.report.added.values() for node in nodes)
    before = len(model.compiled)
    model.features("three four five six", sae, k=9, follow=[4, 5, 6])
    assert len(model.compiled) == before  # how many are ranked, and which are followed, are inputs


def test_steering_a_feature_adds_its_row_of_the_decoder(model, tmp_path):
    sae, plain = case("relu", tmp_path)
    x = model.forward(PROMPT, HookSpec().capture(HOOK))[HOOK]
    acts = plain.encode(x)
    feature = int(acts[0, -1].argmax())
    row = sae.weights["W_dec"][feature]
    changes = {
        "fix": ({"fix": {feature: 9.0}}, 9.0 - acts[..., feature]),
        "scale": ({"scale": {feature: 2.5}}, 1.5 * acts[..., feature]),
        "ablate": ({"scale": {feature: 0.0}}, -acts[..., feature]),
        "clamp": ({"clamp": {feature: (0.1, 0.2)}}, np.clip(acts[..., feature], 0.1, 0.2) - acts[..., feature]),
    }
    for name, (change, by) in changes.items():
        for positions in (None, -1):
            moved = by.copy()
            if positions is not None:
                moved[:, :-1] = 0
            steer = Intervention.Add((moved[..., None] * row).astype(np.float32))
            expected = model.forward(PROMPT, HookSpec().intervene(HOOK, steer)).output()
            found = model.forward(PROMPT, sae.spec(**change, positions=positions)).output()
            assert np.abs(found - expected).max() < TOLERANCE * 2, (name, positions)
            assert np.abs(found - model.forward(PROMPT).output()).max() > 1e-3
    by_hand = sae.spec().intervene(sae.acts, Intervention.Add(np.eye(D_SAE)[feature] * 2))
    direction = sae.direction(feature).spec(2.0)
    assert np.abs(model.forward(PROMPT, by_hand).output() - model.forward(PROMPT, direction).output()).max() < TOLERANCE


@pytest.mark.parametrize("name", ["relu", "topk by decoder norm"])
def test_a_direction_is_what_a_feature_writes_at_activation_1(model, tmp_path, name):
    sae, plain = case(name, tmp_path)
    direction, none = sae.direction(5).vector, np.zeros((1, D_SAE))
    assert near(direction, (plain.decode(np.eye(D_SAE)[5]) - plain.decode(none))[0])
    at = [model.forward(PROMPT, sae.spec(fix={5: value}).capture(HOOK))[HOOK] for value in (1.0, 0.0)]
    assert near(at[0] - at[1], np.broadcast_to(direction, at[0].shape))


@pytest.mark.parametrize("name", ["layer norm", "constant norm"])
def test_what_is_scaled_for_each_token_is_no_direction(tmp_path, name):
    with pytest.raises(InterventionError, match="which is no direction"):
        case(name, tmp_path)[0].direction(5)


def test_without_the_error_only_the_reconstruction_is_left(model, tmp_path):
    """x = recons + error: an error of zero puts the reconstruction in place, as "dropped" does."""
    sae, plain = case("jumprelu", tmp_path)
    kept = sae.spec().intervene(f"{HOOK}.hook_sae_error", Intervention.Zero()).capture(HOOK)
    dropped = model.forward(PROMPT, sae.spec("dropped").capture(HOOK))
    found = model.forward(PROMPT, kept)
    assert (found[HOOK] == dropped[HOOK]).all()
    assert (found.output() == dropped.output()).all()
    assert np.abs(found.output() - model.forward(PROMPT, sae.spec()).output()).max() > 0.01
    half = sae.spec().intervene(f"{HOOK}.hook_sae_error", Intervention.Scale(0.5)).capture(HOOK)
    x = model.forward(PROMPT, HookSpec().capture(HOOK))[HOOK]
    assert near(model.forward(PROMPT, half)[HOOK], (x + plain.decode(plain.encode(x))) / 2)


def test_options_that_would_do_nothing_are_refused(model, tmp_path):
    folder = folder_of(tmp_path / "sae", random_weights("standard"), **six("standard"))
    sae = SAE.load(folder)
    for ask in (lambda: SAE.load(folder, hook_out=HOOK), lambda: sae.at(hook_out=HOOK)):
        with pytest.raises(InputError, match="only a transcoder"):
            ask()
    for error in ("kept", "dropped"):
        with pytest.raises(InterventionError, match="none is"):
            sae.spec(error, positions=-1)
    limited = HookSpec().intervene(sae.hook, sae.splice("dropped", positions=-1)).capture(HOOK)
    x, found = model.forward(PROMPT, HookSpec().capture(HOOK))[HOOK], model.forward(PROMPT, limited)[HOOK]
    assert (found[0, :-1] == x[0, :-1]).all()
    assert np.abs(found[0, -1] - x[0, -1]).max() > 0.01
    for prompt in ([3, 4, 5], [PROMPT, PROMPT], np.array([3, 4])):
        with pytest.raises(InputError, match="one text"):
            model.features(prompt, sae)


def test_the_error_term_does_not_see_changes_before_the_activation(model, tmp_path):
    """What SAELens recomputes with its hooks off: else a change to the input would cancel itself."""
    sae, plain = case("relu", tmp_path)
    x = model.forward(PROMPT, HookSpec().capture(HOOK))[HOOK]
    clean = plain.decode(plain.encode(x))
    for hook, changed in (
        ("hook_sae_input", plain.encode(2 * x.astype(np.float64))),
        ("hook_sae_acts_pre", 2 * plain.encode(x)),  # ReLU of twice as much is twice the ReLU
    ):
        spec = sae.spec().intervene(f"{HOOK}.{hook}", Intervention.Scale(2.0)).capture(HOOK)
        expected = plain.decode(changed) + (x - clean)
        assert near(model.forward(PROMPT, spec)[HOOK], expected), hook


def test_generation_and_compilation(model, tmp_path):
    sae, _ = case("jumprelu", tmp_path)
    spec = sae.spec(fix={2: 30.0}, positions=[4]).capture(sae.acts)
    made = model.generate(PROMPT, spec, max_new_tokens=5, eos_token_id=[])
    whole = model.forward(made.ids[0][:-1], spec, prompt_length=5)
    assert near(made.captured(sae.acts), whole[sae.acts])
    assert (made.captured(sae.acts)[0, :, 2] == 30).sum() >= 1
    kept = model.generate(PROMPT, sae.spec(), max_new_tokens=5)
    assert (kept.ids[0] == model.generate(PROMPT, max_new_tokens=5).ids[0]).all()
    folder = model.compile(spec, tmp_path / "compiled")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    ids = model.tokenize(PROMPT).ids[None]
    past = np.zeros((1, model.num_kv_heads, 0, model.head_dim), np.float32)
    feeds = {f"past_key_values.{i}.{part}": past for i in range(model.num_layers) for part in ("key", "value")}
    feeds |= {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(5)[None]}
    logits, acts = session.run(["logits", sae.acts], feeds)
    cache = model.forward(PROMPT, spec)
    assert np.abs(logits - cache.output()).max() < TOLERANCE
    assert near(acts, cache[sae.acts])
    spec.save(tmp_path / "spec.safetensors")
    again = model.forward(PROMPT, HookSpec.load(tmp_path / "spec.safetensors"))
    assert (again.output() == cache.output()).all()


def test_saes_of_one_shape_share_a_graph(model):
    def made(seed: int) -> SAE:
        from mionnx.analysis.features.config import Config

        return SAE(Config("standard", hook=HOOK), random_weights("standard", seed))

    one, two = made(1).spec("dropped"), made(2).spec("dropped")
    assert model.compile_graph(one) is model.compile_graph(two)
    assert np.abs(model.forward(PROMPT, one).output() - model.forward(PROMPT, two).output()).max() > 0.01


@pytest.mark.parametrize(
    "architecture", ["transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"]
)
def test_transcoders_read_one_hook_point_and_give_another(model, tmp_path, architecture):
    weights = random_weights(architecture)
    source, target = "blocks.1.mlp.hook_pre", "blocks.1.hook_mlp_out"
    metadata = {"hook_name": source, "hook_name_out": target}
    config = six(architecture, d_out=D_IN, apply_b_dec_to_input=False, metadata=metadata)
    sae = SAE.load(folder_of(tmp_path / "sae", weights, **config))
    plain = Plain(weights, architecture, apply_b_dec=False)
    spec = sae.spec().capture(source).capture(target).capture(target, before=True).capture(f"{target}.hook_sae_acts")
    cache = model.forward(PROMPT, spec)
    x, y = cache[source], cache[f"{target}.before"]
    acts = plain.encode(x)
    given = plain.decode(acts) + (x @ weights["W_skip"].T if "W_skip" in weights else 0)
    assert near(cache[f"{target}.hook_sae_acts"], acts)
    assert near(cache[target], y)
    assert np.abs(cache.output() - model.forward(PROMPT).output()).max() < TOLERANCE
    assert near(model.forward(PROMPT, sae.spec("dropped").capture(target))[target], given)
    feature = int(acts[0, -1].argmax())
    steer = HookSpec().intervene(
        target, Intervention.Add((acts[..., feature, None] * weights["W_dec"][feature]).astype("f"))
    )
    found = model.forward(PROMPT, sae.spec(scale={feature: 2.0})).output()
    assert np.abs(found - model.forward(PROMPT, steer).output()).max() < TOLERANCE
    assert near(model.features(PROMPT, sae, k=4).values, -np.sort(-acts[0], axis=-1)[:, :4])


def test_gemma_scope(model, tmp_path):
    weights = random_weights("jumprelu")
    np.savez(tmp_path / "params.npz", **weights)
    plain = Plain(weights, "jumprelu", apply_b_dec=False)
    x = model.forward(PROMPT, HookSpec().capture(HOOK))[HOOK]
    for path in (tmp_path, tmp_path / "params.npz"):
        sae = SAE.load(path, hook=HOOK)
        cache = model.forward(PROMPT, sae.spec("dropped").capture(sae.acts).capture(HOOK))
        assert near(cache[sae.acts], plain.encode(x))
        assert near(cache[HOOK], plain.decode(plain.encode(x)))
    source, target = "blocks.1.mlp.hook_pre", "blocks.1.hook_mlp_out"
    transcoder = SAE.load(tmp_path, hook=source, hook_out=target)
    y = model.forward(PROMPT, HookSpec().capture(source))[source]
    found = model.forward(PROMPT, transcoder.spec("dropped").capture(target))[target]
    assert near(found, plain.decode(plain.encode(y)))
    with pytest.raises(HookError, match="hook="):
        SAE.load(tmp_path).spec()


def test_heads_are_read_as_one_vector_a_token(model, tmp_path):
    hook, weights = "blocks.1.attn.hook_z", random_weights("standard")
    old = {"hook_point": hook, "architecture": "standard", "activation_fn_str": "relu", "normalize_activations": False}
    sae = SAE.load(folder_of(tmp_path / "sae", weights, **old))  # as before version 6: hook_z is reshaped unasked
    plain = Plain(weights, "standard")
    spec = sae.spec("dropped").capture(hook, before=True).capture(hook).capture(f"{hook}.hook_sae_acts")
    cache = model.forward(PROMPT, spec)
    z = cache[f"{hook}.before"].reshape(1, 5, D_IN)
    assert near(cache[f"{hook}.hook_sae_acts"], plain.encode(z))
    assert near(cache[hook].reshape(1, 5, D_IN), plain.decode(plain.encode(z)))
    with pytest.raises(InterventionError, match="several heads"):
        sae.direction(0)


def test_older_configurations_mean_what_they_did(tmp_path):
    old = {"hook_point": HOOK, "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}}
    sae = SAE.load(folder_of(tmp_path / "a", {**random_weights("topk"), "scaling_factor": np.ones(D_IN, "f")}, **old))
    assert (sae.config.activation, sae.config.k, sae.config.subtracts_bias, sae.hook) == ("topk", 3, True, HOOK)
    later = six("topk", k=3, apply_b_dec_to_input=False)
    assert not SAE.load(folder_of(tmp_path / "b", random_weights("topk"), **later)).config.subtracts_bias


BAD = {
    "architecture": ({"architecture": "temporal"}, {}, "'temporal'"),
    "activation": ({"architecture": "standard", "activation_fn_str": "tanh-relu"}, {}, "'tanh-relu'"),
    "normalisation": ({"architecture": "standard", "normalize_activations": "covariance_whitening"}, {}, "whitening"),
    "k": ({"architecture": "topk"}, {}, "k=None"),
    "too many": ({"architecture": "topk", "k": 1000}, {}, "largest 1000 of 96"),
    "missing": ({"architecture": "jumprelu"}, {}, r"missing \['threshold'\]"),
    "surplus": ({"architecture": "standard"}, {"extra": np.ones(3, "f")}, r"surplus \['extra'\]"),
    "shape": ({"architecture": "standard"}, {"b_enc": np.ones(5, "f")}, r"b_enc is \[5\].*\[96\]"),
    "NaN": ({"architecture": "standard"}, {"b_enc": np.full(D_SAE, np.nan, "f")}, "NaN"),
    "scaled": ({"architecture": "standard"}, {"scaling_factor": np.full(D_SAE, 2, "f")}, "not 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_mean_something_else_are_refused(tmp_path, name):
    config, more, message = BAD[name]
    with pytest.raises(ModelError, match=message):
        SAE.load(folder_of(tmp_path / "sae", {**random_weights("standard"), **more}, hook_name=HOOK, **config))


def test_damaged_files_and_bad_requests_are_refused(model, tmp_path):
    folder = folder_of(tmp_path / "sae", random_weights("standard"), **six("standard"))
    sae = SAE.load(folder)
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ModelError, match="neither"):
            SAE.load(path)
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    with pytest.raises(ModelError, match=r"bad\.npz"):
        SAE.load(tmp_path / "bad.npz")
    whole = (folder / "sae_weights.safetensors").read_bytes()
    (folder / "sae_weights.safetensors").write_bytes(whole[:-10])
    with pytest.raises(ModelError, match="damaged"):
        SAE.load(folder)
    (folder / "cfg.json").write_text("{")
    with pytest.raises(ModelError, match=r"cfg\.json"):
        SAE.load(folder)
    with pytest.raises(InterventionError, match=r"96.*0 to 95"):
        sae.spec(fix={96: 1.0})
    with pytest.raises(InterventionError, match="fixed"):
        sae.spec(fix={1: 1.0}, scale={1: 0.0})
    with pytest.raises(InterventionError, match="between 2 and 1"):
        sae.spec(clamp={1: (2, 1)})
    with pytest.raises(InterventionError, match="finite"):
        sae.spec(fix={1: np.nan})
    with pytest.raises(InputError, match="'kept'"):
        sae.spec("keep")
    with pytest.raises(InputError, match="k=97"):
        model.features(PROMPT, sae, k=97)
    with pytest.raises(InterventionError, match="not followed"):
        model.features(PROMPT, sae, follow=[1]).of(2)
    with pytest.raises(InterventionError, match=r"\[\?, \?, 128\]"):
        model.forward(PROMPT, sae.at("blocks.1.mlp.hook_act").spec())
    with pytest.raises(HookError, match="hook_resid_post"):
        model.forward(PROMPT, sae.at("blocks.9.hook_resid_post").spec())


NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def test_the_page_and_the_picture(model, tmp_path, chromium):
    sae, _ = case("topk", tmp_path)
    found = model.features(f"{PROMPT} {NASTY}", sae, k=6)
    page = chromium(found.save(tmp_path / "features.html"))
    assert page.troubles == []
    assert page.locator(".text span").count() == len(found.tokens)
    assert page.locator("table.chips tr").count() == len(found.tokens)
    chip = page.locator(".chip").nth(3)
    chosen = chip.text_content().split()[0]
    chip.click()
    assert page.locator(".text + p").text_content().startswith(f"feature {chosen} is active at")
    assert page.evaluate("data.options[chosen]") == chosen
    active = int((found.of(int(chosen)) > 0).sum())
    assert f"active at {active} of {len(found.tokens)}" in page.locator(".text + p").text_content()
    assert page.locator("table.chips tr.here").count() == active
    page.locator(".text span").first.hover()
    assert f"feature {chosen}" in page.locator("#tip").text_content()
    assert page.locator("img").count() == 0
    assert found.save(tmp_path / "a.png").stat().st_size > 5000
    assert json.loads(found.to_json())["ids"] == found.ids.tolist()


@pytest.mark.parametrize("name", CASES_OF_SAELENS)
def test_it_computes_what_saelens_computes(model, tmp_path, name):
    """The numbers are SAELens' own, of the same folder: see `saelens_fixture.py`."""
    architecture, config = CASES_OF_SAELENS[name]
    given = np.load(SHARED / "saelens.npz")
    metadata = {"hook_name": "blocks.2.hook_resid_mid", "hook_name_out": HOOK} if "transcoder" in name else {}
    written = six(architecture, metadata=metadata, **config)
    sae = SAE.load(folder_of(tmp_path / "sae", random_weights(architecture), **written))
    spec = HookSpec().intervene(sae.config.hook, Intervention.Replace(given["x"]))
    spec.extend(sae.spec("dropped")).capture(sae.acts).capture(sae.hook)
    cache = model.forward(PROMPT, spec)
    assert near(cache[sae.acts], given[f"{name}: acts"])
    assert near(cache[sae.hook], given[f"{name}: out"])

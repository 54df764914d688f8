"""Models and generations in a notebook."""

from nasty import NASTY

from mionnx import HookSpec, Intervention, MIModel
from mionnx.run.generation import Generation


def shown(html: str, chromium, tmp_path):
    (tmp_path / "cell.html").write_text(f"<meta charset=utf-8><h1>notebook</h1>{html}")
    page = chromium(tmp_path / "cell.html")
    assert page.troubles == []
    return page


def test_a_model_shows_its_sizes_and_hook_points(shipped: MIModel, chromium, tmp_path):
    page = shown(shipped._repr_html_(), chromium, tmp_path)
    text = page.locator("body").inner_text()
    assert "MIModel(llama, 4 layers, 8 heads" in text
    assert "blocks.{i}.attn.hook_pattern\t[batch, n_heads=8, seq_q, seq_k]" in text
    assert text.count("hook_resid_post") == 1


def test_a_generation_shows_its_new_text_in_bold(shipped: MIModel, chromium, tmp_path):
    spec = HookSpec().capture("blocks.2.hook_resid_post")
    made = shipped.generate(["The capital of France is", "The capital of Germany is"], spec, max_new_tokens=1)
    page = shown(made._repr_html_(), chromium, tmp_path)
    assert [text.strip() for text in page.locator("td b").all_inner_texts() if text.strip()] == ["Paris", "Berlin"]
    assert "blocks.2.hook_resid_post\tfloat32 [2, " in page.locator("body").inner_text()


def test_markup_in_a_text_stays_text(chromium, tmp_path):
    page = shown(Generation([], [], [NASTY + NASTY], [NASTY])._repr_html_(), chromium, tmp_path)
    assert NASTY in page.locator("td b").first.text_content()
    assert page.locator("img").count() == 0


def test_results_that_were_plain_text_are_tables(shipped: MIModel, chromium, tmp_path):
    """FINDINGS, part 2, section 4: `HookCache`, `HookSpec`, `Tokens`, `cfg`."""
    spec = HookSpec().capture("blocks.*.hook_resid_post").intervene("blocks.0.attn.hook_z", Intervention.Zero(heads=1))
    tokens = shipped.tokenize("The capital of France is")
    shapes = [
        (shipped.forward(tokens, spec), "blocks.{i}.hook_resid_post\tfloat32 [1, 5, 128], 4 layers"),
        (spec, "blocks.0.attn.hook_z\tIntervention.Zero(heads=[1])"),
        (tokens, "3\tFrance39"),
        (shipped.cfg, "d_model\t128"),
    ]
    text = shown("".join(one._repr_html_() for one, _ in shapes), chromium, tmp_path).locator("body").inner_text()
    for _, row in shapes:
        assert row in text
    many = HookSpec()
    for number in range(150):
        many.intervene("blocks.0.attn.hook_z", Intervention.Add(float(number + 1)))
    assert many._repr_html_().count("<tr>") == 101
    assert "… and 50 more" in many._repr_html_()


def test_completion_lists_verbs_and_no_insides(shipped: MIModel):
    """FINDINGS, part 2, section 4."""
    names = {*dir(shipped)}
    assert {"forward", "generate", "hook_points", "cfg", "W_E"} <= names
    assert not names & {"binder", "hooked", "opened", "parts", "variants", "options", "idle", "decomposition_hooks"}

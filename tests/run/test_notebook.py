"""Models and generations in a notebook."""

from nasty import NASTY

from mionnx import HookSpec, MIModel
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

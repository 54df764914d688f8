"""The tokenizer of the small models: one token per whitespace-separated word, nothing added to the text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from world import EOS, PAD, SPECIAL_WORDS, UNK, World


def build_tokenizer(world: World) -> Tokenizer:
    """Return the tokenizer whose ids are those of ``world.id_of``."""
    tokenizer = Tokenizer(WordLevel(dict(world.id_of), unk_token=UNK))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # Without continuation prefixes in the vocabulary, this decoder does no more than put a space between words.
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL_WORDS])
    return tokenizer


def save_tokenizer(world: World, folder: Path, longest: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for a model of ``longest`` positions."""
    build_tokenizer(world).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "bos_token": EOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

"""Small encoders that read words: a random BERT with each head, and a tokenizer of BERT's form."""

import json
from pathlib import Path

from encoders import make_encoder
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = [
    "a",
    "an",
    "the",
    "is",
    "on",
    "in",
    "of",
    "for",
    "and",
    "to",
    ".",
    ",",
    "?",
    "man",
    "woman",
    "plays",
    "guitar",
    "music",
    "stage",
    "someone",
    "performs",
    "audience",
    "it",
    "rains",
    "paris",
    "france",
    "capital",
    "city",
    "good",
    "bad",
    "day",
    "where",
    "does",
    "ann",
    "live",
    "rome",
    "lives",
    "now",
    "play",
    "##ing",
    "sing",
    "##s",
    "un",
    "##like",
    "##ly",
]
LABELS = {
    "classes": ("bad", "fair", "good"),
    "token_classes": ("O", "B-PER", "I-PER"),
}
POOLING = {
    "word_embedding_dimension": 32,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}


def make_tokenizer(folder: Path) -> Tokenizer:
    """Write a tokenizer of BERT's form, `[CLS] a [SEP] b [SEP]`, of few words."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]", "pad_token": "[PAD]"}))
    return tokenizer


def make_text_encoder(head: str, folder: Path) -> PreTrainedModel:
    """Save a random BERT with a head and the tokenizer; an embedding model as a folder of sentence-transformers."""
    labels = dict(enumerate(LABELS.get(head, ())))
    named = {"id2label": labels, "label2id": {name: number for number, name in labels.items()}} if labels else {}
    model = make_encoder("bert", folder, "none" if head == "embedding" else head, **named)
    make_tokenizer(folder)
    if head == "embedding":
        kinds = ("Transformer", "Pooling", "Normalize")
        paths = ("", "1_Pooling", "2_Normalize")
        modules = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16, "do_lower_case": False}))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    return model

"""Offsets of an encoder's tokens: texts are tokenised apart from their special tokens, and stand where they stood."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mionnx.run.encoder_texts import _joined

WORDS = ("<s>", "</s>", "a", "b", "Ġa", "Ġb", "Ġ", "c")
ENDS = [("<s>", 0), ("</s>", 1)]
TEMPLATE = processors.TemplateProcessing("<s> $A", "<s> $A </s> $B:1", ENDS)
PROCESSORS = {
    "none": None,
    "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    "roberta, spaces kept": processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=False),
    "bytes": processors.ByteLevel(trim_offsets=True),
    "bytes and a template": processors.Sequence([processors.ByteLevel(trim_offsets=True), TEMPLATE]),
    "the second text first": processors.TemplateProcessing("<s> $A", "<s> $B:0 </s> $A:1", ENDS),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("text", ["a b c a", ("a b", " b a c")])
def test_offsets_are_those_of_texts_that_are_tokenised_at_once(name, text):
    """The first letter of each word behind a space was lost with a tokenizer of RoBERTa's form."""
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(WORDS)}, [("Ġ", "a"), ("Ġ", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if PROCESSORS[name] is not None:
        tokenizer.post_processor = PROCESSORS[name]
    parts = text if isinstance(text, tuple) else (text,)
    tokens = _joined(tokenizer, text, iter(tokenizer.encode_batch([*parts], add_special_tokens=False)), None)
    expected, begin = tokenizer.encode(*parts), len(parts[0]) + 1
    assert tokens.ids.tolist() == expected.ids
    places = zip(expected.offsets, expected.sequence_ids, strict=True)
    assert tokens.offsets == [(start + begin, end + begin) if of == 1 else (start, end) for (start, end), of in places]

"""Answers in contexts longer than a model reads: windows, and the answer that there is none."""

import numpy as np
import pytest
import torch

from mionnx import InputError

QUESTION = "where does ann live?"  # 5 tokens: with the special ones 32 of 40 are left to a context
CONTEXT = " ".join(["it rains in paris, the man plays music.", "ann lives in rome now, a good day for the city."] * 5)


def by_definition(model, reference, stride):
    """(score, start, end) of each span in each window, and the least of none, as transformers' pipeline has it."""
    first, second = model.tokenizer.encode_batch([QUESTION, CONTEXT], add_special_tokens=False)
    room = 40 - 3 - len(first.ids)
    spans, none = [], 1.0
    for begin in range(0, len(second.ids), room - stride):
        ids = second.ids[begin : begin + room]
        given = torch.tensor([[2, *first.ids, 3, *ids, 3]])
        types = torch.tensor([[0] * (len(first.ids) + 2) + [1] * (len(ids) + 1)])
        with torch.no_grad():
            output = reference(input_ids=given, token_type_ids=types)
        counted = [0, *range(len(first.ids) + 2, given.shape[1] - 1)]
        starts, ends = (one[0, counted].softmax(-1).numpy() for one in (output.start_logits, output.end_logits))
        none = min(none, starts[0] * ends[0])
        for i in range(len(ids)):
            for j in range(i, min(i + 4, len(ids))):
                at = second.offsets[begin + i][0], second.offsets[begin + j][1]
                spans.append((starts[i + 1] * ends[j + 1], *at))
        if begin + room >= len(second.ids):
            break
    return sorted(spans, reverse=True), none


@pytest.mark.parametrize("stride", [None, 0, 7])
def test_long_contexts_are_answered_in_windows(text_encoder, stride):
    """They were cut without a word."""
    model, reference = text_encoder("span")
    spans, none = by_definition(model, reference, 16 if stride is None else stride)
    found = model.answer_span(QUESTION, CONTEXT, k=400, max_answer_length=4, stride=stride, no_answer=True)
    scores = {}
    for score, start, end in spans:
        scores.setdefault(CONTEXT[start:end], score)
    scores[""] = none
    assert {*found.parts} == {*scores}
    assert (np.diff(found.probabilities) <= 0).all()
    assert np.allclose(found.probabilities, [scores[part] for part in found.parts], atol=5e-6)
    whole = model.tokenize(QUESTION, CONTEXT)
    for n, (first, last) in enumerate(found.positions.tolist()):
        if found.parts[n]:
            ends = whole.offsets[first][0], whole.offsets[last][1]
            assert (found.starts[n], found.ends[n]) == tuple(end - len(QUESTION) - 1 for end in ends)
    assert len(found.tokens[0]) == len(whole)


def test_windows_that_do_not_move_or_have_no_room_are_refused(text_encoder):
    model, _ = text_encoder("span")
    with pytest.raises(InputError, match="stride=32: windows have 32 tokens of the context, and share fewer"):
        model.answer_span(QUESTION, CONTEXT, stride=32)
    with pytest.raises(InputError, match="the question has 60 tokens: of 40 it leaves no room"):
        model.answer_span("music " * 60, CONTEXT)
    with pytest.raises(InputError, match="has no tokens"):
        model.answer_span(QUESTION, "")

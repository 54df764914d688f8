"""What heads of encoders say of texts, beside transformers: masks, labels, tags, spans and embeddings."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from mionnx import HookSpec, InputError, Intervention, InterventionError, MIModel
from mionnx.run.encoder_texts import tokens_of
from mionnx.run.spans import _words

ATOL = 5e-5
TEXTS = ["the man plays the guitar on stage.", "it rains", "a good day for music and for paris, france"]


def inputs(model, *texts):
    """One text or pair as transformers' inputs."""
    tokens = model.tokenize(*texts)
    types = np.zeros_like(tokens.ids) if tokens.type_ids is None else tokens.type_ids
    named = {"input_ids": tokens.ids, "attention_mask": np.ones_like(tokens.ids), "token_type_ids": types}
    return {name: torch.from_numpy(array[None]) for name, array in named.items()}


def eager(reference, given):
    with torch.no_grad():
        return reference(**given)


def test_masks_are_filled_as_transformers_does(text_encoder):
    model, reference = text_encoder("masked_lm")
    texts = ["paris is the [MASK] of [MASK].", "it [MASK]"]
    filled = model.fill_mask(texts, k=3)
    assert filled.positions == (4, 6, 2)
    assert filled.rows == (0, 0, 1)
    for place, (row, at) in enumerate(zip(filled.rows, filled.positions, strict=True)):
        shares = eager(reference, inputs(model, texts[row])).logits[0, at].softmax(-1)
        expected = shares.topk(3)
        assert filled.ids[place].tolist() == expected.indices.tolist()
        assert np.abs(filled.probabilities[place] - expected.values.numpy()).max() < ATOL
    assert filled.probability(filled.top[0]) == filled.probabilities[0][0]
    assert filled.to_frame().shape == (9, 6)


def test_labels_of_texts_and_of_pairs(text_encoder):
    model, reference = text_encoder("classes")
    pair = ("where does ann live?", "ann lives in rome now")
    found = model.classify([TEXTS[0], pair])
    for row, texts in enumerate(([TEXTS[0]], pair)):
        shares = eager(reference, inputs(model, *texts)).logits[0].softmax(-1).numpy()
        assert found.choices[row] == tuple(("bad", "fair", "good")[n] for n in np.argsort(-shares))
        assert np.abs(found.probabilities[row] - np.sort(shares)[::-1]).max() < ATOL
    separate = model.classify(f"{pair[0]} {pair[1]}")
    assert np.abs(separate.probabilities - found.probabilities[1:]).max() > 1e-4  # token types, and the [SEP] between


def test_tags_are_those_of_first_tokens_merged_into_spans(text_encoder):
    model, reference = text_encoder("token_classes")
    text = "ann plays unlikely music in rome"
    tokens = model.tokenize(text)
    shares = eager(reference, inputs(model, text)).logits[0].softmax(-1).numpy()
    found = model.tag(text)
    words = _words(tokens)
    assert [len(word) for word in words] == [1, 1, 3, 1, 1, 1]
    names = [("O", "B-PER", "I-PER")[shares[word[0]].argmax()] for word in words]
    begins = [
        n for n, name in enumerate(names) if name == "B-PER" or (name == "I-PER" and (not n or names[n - 1] == "O"))
    ]
    assert len(found.parts) == len(begins)
    for start, end, part in zip(found.starts, found.ends, found.parts, strict=True):
        assert text[start:end] == part


def test_the_best_span_of_a_context(text_encoder):
    model, reference = text_encoder("span")
    question, context = "where does ann live?", "ann lives in rome, and it rains."
    tokens = model.tokenize(question, context)
    output = eager(reference, inputs(model, question, context))
    first = tokens.ids.tolist().index(3) + 1  # behind the separator
    places = range(first, len(tokens) - 1)
    counted = [0, *places]  # the first token stands for no answer
    starts, ends = (one[0, counted].log_softmax(-1)[1:].numpy() for one in (output.start_logits, output.end_logits))
    scores = {(i, j): starts[i - first] + ends[j - first] for i in places for j in places if i <= j}
    best = max(scores, key=scores.__getitem__)
    found = model.answer_span(question, context, k=3)
    assert tuple(found.positions[0]) == best
    assert abs(found.probabilities[0] - np.exp(scores[best])) < ATOL
    assert found.parts[0] == context[found.starts[0] : found.ends[0]]
    assert len({*found.parts}) == 3


def pooled(reference, model, text):
    """Mean pooling and length 1, by hand."""
    stream = eager(reference, inputs(model, text)).last_hidden_state[0].mean(0)
    return (stream / stream.norm()).numpy()


def test_embeddings_are_those_of_single_texts_whatever_their_batch(text_encoder):
    model, reference = text_encoder("embedding")
    expected = np.stack([pooled(reference, model, text) for text in TEXTS])
    for batch_size in ("auto", 1, 2, None):
        assert np.abs(model.embed(TEXTS, batch_size=batch_size) - expected).max() < ATOL
    assert np.abs(model.similarity(TEXTS[0], TEXTS) - expected[:1] @ expected.T).max() < ATOL
    assert np.abs(model.similarity(expected[:2], TEXTS) - expected[:2] @ expected.T).max() < ATOL
    assert np.abs(model.embed(iter(TEXTS)) - expected).max() < ATOL


def test_long_texts_are_cut_with_their_special_tokens(text_encoder):
    model, _ = text_encoder("embedding")
    long = " ".join(["music"] * 40)
    assert model.hooked.longest_text == 16
    assert np.abs(model.embed(long) - model.embed(" ".join(["music"] * 14))).max() < ATOL
    assert np.abs(model.embed(long, max_length=6) - model.embed(" ".join(["music"] * 4))).max() < ATOL


def test_texts_are_cut_at_the_end_that_the_tokenizer_names(text_encoder, tmp_path):
    """`truncation_side` was not read: a text's end was lost, where sentence-transformers drops its beginning."""
    folder = tmp_path / "model"
    shutil.copytree(text_encoder("embedding")[0].hooked.folder, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"truncation_side": "left"}))
    model = MIModel.from_pretrained(folder, threads=1)
    long = " ".join(["it rains"] * 10 + ["music"] * 10)
    assert np.array_equal(model.embed(long), model.embed(" ".join(["it rains"] * 2 + ["music"] * 10)))
    first, second = "music " * 3, "it rains " * 9 + "music " * 3
    (pair,) = tokens_of(model, [(first, second)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), truncation_side="left")
    assert pair.ids.tolist() == tokenizer(first, second, truncation=True, max_length=16)["input_ids"]


def test_texts_in_arrays_are_texts(text_encoder):
    """`similarity` took them for embeddings, and failed as numpy does."""
    model, _ = text_encoder("embedding")
    for side in (np.array(TEXTS), np.array(TEXTS, object)):
        assert np.array_equal(model.similarity(side, np.str_("it rains")), model.similarity(TEXTS, "it rains"))


@pytest.mark.parametrize("name", ["sentence_xlm-roberta_config.json", "tokenizer_config.json"])
def test_a_length_is_read_wherever_sentence_transformers_has_written_it(text_encoder, tmp_path, name):
    """Version 6 writes that of the tokenizer alone, earlier ones a file by the architecture."""
    folder = tmp_path / "model"
    shutil.copytree(text_encoder("embedding")[0].hooked.folder, folder)
    settings, table = folder / "sentence_bert_config.json", folder / name
    settings.unlink()
    kept = json.loads(table.read_text()) if table.is_file() else {}
    table.write_text(json.dumps(kept | {"max_seq_length": 8, "model_max_length": 8}))
    model = MIModel.from_pretrained(folder, threads=1)
    assert model.hooked.longest_text == 8
    assert np.array_equal(model.embed(" ".join(["music"] * 40)), model.embed(" ".join(["music"] * 6)))
    table.write_text(json.dumps(kept | {"model_max_length": 10**30}))
    assert MIModel.from_pretrained(folder, threads=1).hooked.longest_text == model.hooked.metadata.sizes.max_positions


def test_no_length_is_not_taken_for_every_length(text_encoder):
    with pytest.raises(InputError, match="max_length must be 1 or above, got 0"):
        text_encoder("embedding")[0].embed("it rains", max_length=0)


def test_interventions_hold_and_rows_count_in_the_whole_list(text_encoder):
    model, _ = text_encoder("embedding")
    spec = HookSpec().intervene("blocks.0.hook_attn_out", Intervention.Zero(rows=[2]))
    plain, changed = model.embed(TEXTS, batch_size=1), model.embed(TEXTS, spec, batch_size=1)
    assert np.abs(plain - changed)[:2].max() == 0
    assert np.abs(plain - changed)[2].max() > 1e-3


def test_a_value_for_each_row_and_position_means_the_same_in_batches(text_encoder):
    """Rows are padded on the right, and a value's columns are those of all rows as one batch."""
    model, _ = text_encoder("embedding")
    ids = [model.tokenize(text).ids for text in TEXTS]
    width = max(map(len, ids))
    value = np.random.default_rng(0).normal(size=(3, width, 32)).astype(np.float32)
    spec = HookSpec().intervene("blocks.0.hook_resid_pre", Intervention.Add(value))
    whole, single = (model.forward(ids, spec, batch_size=size).output() for size in (None, 1))
    assert np.abs(whole - single).max() < ATOL


@pytest.mark.parametrize(
    ("head", "call", "message"),
    [
        ("classes", lambda model: model.fill_mask("it [MASK]"), "'masked_lm', and .* has the head 'classes'"),
        ("masked_lm", lambda model: model.fill_mask("it rains"), r"write \[MASK\]"),
        ("masked_lm", lambda model: model.fill_mask("music " * 50 + "[MASK]"), r"cut off: the model reads 40 tokens"),
        ("masked_lm", lambda model: model.fill_mask("[MASK] " + "music " * 50 + "[MASK]"), r"cut off"),
        ("masked_lm", lambda model: model.embed("it rains"), "'embedding'"),
        ("masked_lm", lambda model: model.classify("it rains"), "'classes'"),
        ("embedding", lambda model: model.embed([]), "nothing to run on"),
        ("embedding", lambda model: model.embed(iter(int, 1)), "each of the texts is a text"),
        ("embedding", lambda model: model.embed([3]), "each of the texts is a text"),
        ("embedding", lambda model: model.embed({"text": ["a"]}), "a list of them, got a dict"),
        ("embedding", lambda model: model.embed("a", prompt_name="query"), "names no prompt"),
        ("embedding", lambda model: model.embed("a", prompt_name="s2p-query"), "names no prompt"),
        ("embedding", lambda model: model.embed("a", normalize=False), "hook_pooled"),
        ("embedding", lambda model: model.embed("a", max_length=2), "no room"),
        ("embedding", lambda model: model.similarity(np.zeros((2, 3)), "a"), r"\[n, 32\]"),
        ("embedding", lambda model: model.logit_lens("it rains"), "gives none"),
        ("masked_lm", lambda model: model.generate("it"), "generate has no meaning for an encoder"),
        ("masked_lm", lambda model: model.forward("it", use_cache=True), "use_cache has no meaning for an encoder"),
        ("masked_lm", lambda model: model.run_with_hooks("it", return_type="loss"), "loss of the next token"),
        ("masked_lm", lambda model: model.head_scores("induction", batch=1), "no kind of head 'induction'"),
        ("masked_lm", lambda model: model.forward([("a", "b")], HookSpec(), cache=3), "cache"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(text_encoder, head, call, message):
    with pytest.raises(InputError, match=message):
        call(text_encoder(head)[0])


@pytest.fixture(scope="module")
def embedder(text_encoder, tmp_path_factory):
    """A decoder that embeds as Qwen3-Embedding does, by the last token, and its transformer in torch."""
    words, _ = text_encoder("embedding")
    tmp_path = tmp_path_factory.mktemp("embedder")
    source = words.hooked.folder.parent / "checkpoint"
    beside = shutil.ignore_patterns("config.json", "model.safetensors")
    folder = shutil.copytree(
        source, tmp_path / "embedder", ignore=lambda at, names: beside(at, names) if at == str(source) else []
    )
    pooling = folder / "1_Pooling" / "config.json"
    modes = {name: value for name, value in json.loads(pooling.read_text()).items() if "pooling_mode" not in name}
    pooling.write_text(json.dumps({**modes, "pooling_mode_lasttoken": True}))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocabulary = words.hooked.metadata.sizes.vocab_size
    config = Qwen3Config(vocab_size=vocabulary, num_hidden_layers=2, head_dim=8, **sizes)
    reference = Qwen3Model(config).eval()
    reference.save_pretrained(folder)
    return MIModel.from_pretrained(folder, threads=1), reference


@pytest.mark.slow
def test_a_decoder_embeds_by_its_last_token(embedder):
    """Left to right, the last token of each text, length 1."""
    model, reference = embedder
    assert not model.bidirectional
    for text, vector in zip(TEXTS, model.embed(TEXTS), strict=True):
        with torch.no_grad():
            last = reference(input_ids=torch.from_numpy(model.tokenize(text).ids[None])).last_hidden_state[0, -1]
        assert np.abs(vector - torch.nn.functional.normalize(last, dim=0).numpy()).max() < ATOL


@pytest.mark.parametrize(
    ("head", "shown"), [("classes", None), ("classes", "pooler.hook_out"), ("last", None), ("last", "hook_pooled")]
)
@pytest.mark.slow_beyond(1)
def test_what_no_pooling_reads_is_refused(text_encoder, embedder, head, shown):
    """An edit has an effect or is refused, at each position of texts whose classes or embedding one token gives."""
    model, _ = embedder if head == "last" else text_encoder(head)
    ids = [model.tokenize(text).ids for text in TEXTS[:2]]
    width = min(map(len, ids))
    seen = HookSpec() if shown is None else HookSpec().capture(shown)

    def value(spec):
        cache = model.forward(ids, spec, logits=shown is None)
        return cache.output() if shown is None else cache[shown]

    whole, idle = value(seen), set()
    for hook in ("hook_resid_post", "attn.hook_z", "attn.hook_q", "attn.hook_k", "attn.hook_v"):
        for layer in (0, 1):
            for at in (0, 1, width - 1, -1):
                edit = Intervention.Scale(1.5, positions=[at])
                spec = HookSpec().intervene(f"blocks.{layer}.{hook}", edit)
                try:
                    changed = value(spec if shown is None else spec.capture(shown))
                except InterventionError as error:
                    idle.add((layer, hook.removeprefix("attn."), at, "changes nothing that is asked for" in str(error)))
                else:  # a decoder's first token reads one key, whatever it asks
                    alone = head == "last" and (hook, at) == ("attn.hook_q", 0)
                    assert np.array_equal(changed, whole) == alone, (hook, layer, at)
    where = (0, 1) if head == "last" else (1, width - 1, -1)
    assert idle == {(1, f"hook_{name}", at, True) for name in ("resid_post", "z", "q") for at in where}

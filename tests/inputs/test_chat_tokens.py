"""Chats as tokens, beside transformers' `apply_chat_template`, and positions by message and role."""

import json

import pytest
from chat_templates import CHATML, QWEN3, TEMPLATES, byte_tokenizer

from mionnx import ChatTokens, HookPoint, HookSpec, InputError, Intervention, MIModel, TokenizerError

ASKED = {"role": "user", "content": " Where is Paris?\n"}
ANSWERED = {"role": "assistant", "content": "Paris is in France. "}
SYSTEM = {"role": "system", "content": "Be brief: user é 🙂"}
THOUGHT = {"role": "assistant", "content": "<think>\nA city?\n</think>\n\nIn France."}
CHATS = {
    "one": [ASKED],
    "three": [ASKED, ANSWERED, {"role": "user", "content": "Is Paris big, and is user a word?"}],
    "answered": [ASKED, ANSWERED],
    "system": [SYSTEM, ASKED],
    "thought": [ASKED, THOUGHT, ASKED],
    "thinking": [ASKED, THOUGHT],
    "reasoned": [ASKED, {**ANSWERED, "reasoning": "A city?", "tool_calls": None}],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def chatty(copy):
    """The shipped Llama with a tokenizer of bytes and a chat template."""

    def open_with(template=CHATML, **config):
        byte_tokenizer().save(str(copy / "tokenizer.json"))
        eos = {"content": "</s>", "special": True}
        (copy / "tokenizer_config.json").write_text(json.dumps({**TOKENS, "eos_token": eos, **config}))
        if template is not None:
            (copy / "chat_template.jinja").write_text(template)
        return MIModel.from_pretrained(copy, threads=1)

    return open_with


@pytest.fixture(scope="module")
def peers():
    """The same tokenizer in transformers, with each template."""
    from transformers import PreTrainedTokenizerFast

    found = {}
    for name, template in TEMPLATES.items():
        found[name] = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **TOKENS)
        found[name].chat_template = template
    return found


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_ids_are_those_of_transformers(chatty, peers, family):
    model, refused = chatty(TEMPLATES[family]), []
    for name, chat in CHATS.items():
        for prompt in (True, False):
            try:
                theirs = peers[family].apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"]
            except Exception as error:  # the template's own refusal
                with pytest.raises(TokenizerError, match=str(error)):
                    model.tokenize_chat(chat, add_generation_prompt=prompt)
                refused.append(name)
                continue
            assert model.tokenize_chat(chat, add_generation_prompt=prompt).ids.tolist() == theirs, (name, prompt)
    assert {*refused} == ({"system"} if family == "gemma" else set())


def test_variables_and_parts_as_in_transformers(chatty, peers):
    chat = [{"role": "user", "content": [{"type": "text", "text": "Paris"}, {"type": "text", "text": "or Rome?"}]}]
    found = chatty(QWEN3).tokenize_chat(chat, variables={"enable_thinking": False})
    theirs = peers["qwen3"].apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False)
    assert found.ids.tolist() == theirs["input_ids"]
    assert found.text.endswith("</think>\n\n")
    read = "".join(found.text[slice(*found.offsets[i])] for i in found.positions_in(message=0))
    assert read == "Parisor Rome?"  # " + " between the parts is the template's


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "qwen3"])
@pytest.mark.parametrize("content", ["Paris is", "Paris is ", "\nParis is\n\n"])
def test_a_message_is_continued_as_in_transformers(chatty, peers, family, content):
    chat = [ASKED, {"role": "assistant", "content": content}]
    theirs = peers[family].apply_chat_template(chat, continue_final_message=True)["input_ids"]
    assert chatty(TEMPLATES[family]).tokenize_chat(chat, continue_final_message=True).ids.tolist() == theirs


def test_the_generation_prompt_follows_the_last_role(chatty):
    model = chatty()
    assert model.tokenize_chat([ASKED]).text.endswith("<|im_start|>assistant\n")
    assert model.tokenize_chat([ASKED, ANSWERED]).text.endswith("France. <|im_end|>\n")


def texts(tokens, positions):
    return "".join(tokens.text[slice(*tokens.offsets[position])] for position in positions)


@pytest.mark.parametrize("family", TEMPLATES)
def test_positions_by_message_and_role(chatty, family):
    tokens = chatty(TEMPLATES[family]).tokenize_chat(CHATS["three"])
    if family == "zephyr":  # this one writes every message again, as JSON
        assert texts(tokens, tokens.positions_in(message=1)) == "Paris is in France." * 2
        assert tokens.positions_of("Paris", 0, message=1) == tokens.positions_of("Paris", 1)
        return
    starts = [tokens.text.index(part) for part in ("Paris?", "Paris is", "Paris big")]
    for message, start in enumerate(starts):
        found = tokens.positions_of("Paris", message=message)
        assert texts(tokens, found) == "Paris"
        assert tokens.offsets[found[0]][0] == start
        assert tokens.positions_of("Paris", message=message - 3) == found
    assert tokens.positions_of("Paris", role="assistant") == tokens.positions_of("Paris", message=1)
    assert tokens.positions_of("Paris", 1, role="user") == tokens.positions_of("Paris", message=2)
    assert texts(tokens, tokens.positions_of("user", role="user")) == "user"  # the header is not the message
    assert texts(tokens, tokens.positions_in(message=1)) == "Paris is in France."
    assert texts(tokens, tokens.positions_in(role="user")) == "Where is Paris?Is Paris big, and is user a word?"


def test_positions_in_what_a_template_cuts(chatty):
    """Qwen's template drops the reasoning of earlier answers; what is left has its position."""
    tokens = chatty(QWEN3).tokenize_chat(CHATS["thought"])
    assert texts(tokens, tokens.positions_in(message=1)) == "In France."
    with pytest.raises(TokenizerError, match=r"'city' does not occur in message 1 \(assistant\)"):
        tokens.positions_of("city", message=1)


def test_refusals_name_what_there_is(chatty):
    model = chatty()
    tokens = model.tokenize_chat(CHATS["three"])
    with pytest.raises(InputError, match="message 3 of a chat of 3 messages"):
        tokens.positions_of("Paris", message=3)
    with pytest.raises(InputError, match=r"no message of the role 'usr'.*did you mean 'user'"):
        tokens.positions_in(role="usr")
    with pytest.raises(InputError, match="no message of the role 'user'; the chat has 1 'assistant'"):
        tokens.positions_in(message=1, role="user")
    with pytest.raises(InputError, match="message= or role="):
        tokens.positions_in()
    with pytest.raises(TokenizerError, match=r"occurs 2 times in message 0 \(user\), message 2 \(user\)"):
        tokens.positions_of("Paris", role="user")
    hidden = model.tokenize_chat([ASKED], chat_template="{{ messages[0].role }}")
    with pytest.raises(TokenizerError, match="does not show it"):
        hidden.positions_in(message=0)


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        ([], {}, "at least one message"),
        ("hello", {}, "messages"),
        (
            [{"rolle": "user", "content": "x"}],
            {},
            "message 0 has no role; it has 'rolle', 'content'; did you mean 'role'",
        ),
        ([{"role": "user", "content": 3}], {}, "content of message 0"),
        ([ASKED], {"add_generation_prompt": True, "continue_final_message": True}, "give one"),
        ([{**ASKED, "image": object()}], {}, "plain values"),
    ],
)
def test_no_chat(chatty, messages, options, said):
    with pytest.raises(InputError, match=said):
        chatty().tokenize_chat(messages, **options)


def test_a_model_without_a_template_says_so(chatty):
    with pytest.raises(
        TokenizerError, match=r"no chat template, neither chat_template\.jinja nor .*chat_template=TEXT"
    ):
        chatty(None).tokenize_chat([ASKED])


def test_templates_of_the_config(chatty):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    expected = chatty().tokenize_chat([ASKED]).ids.tolist()
    assert isinstance(chatty(None).tokenize_chat([ASKED]), ChatTokens)  # the file is still there
    for template in (CHATML, named):
        model = chatty(None, chat_template=template)
        (model.hooked.folder / "chat_template.jinja").unlink(missing_ok=True)
        assert model.tokenize_chat([ASKED]).ids.tolist() == expected
    with pytest.raises(TokenizerError, match="no default chat template, but tool_use"):
        chatty(None, chat_template=named[:1]).tokenize_chat([ASKED])


def test_a_chat_is_generated_from_and_steered_by_message(chatty):
    model = chatty()
    tokens = model.tokenize_chat(CHATS["three"])
    plain = model.generate(tokens, max_new_tokens=3)
    assert plain.ids[0][: len(tokens)].tolist() == tokens.ids.tolist()
    positions = tokens.positions_of("Paris", message=1)
    edit = Intervention.Zero(positions=positions)
    spec = HookSpec().intervene(HookPoint.Embed, edit).capture("hook_embed")
    embedded = model.forward(tokens, spec)["hook_embed"][0]
    assert [i for i, row in enumerate(embedded) if not row.any()] == positions

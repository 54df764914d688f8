"""The text around a message: what a model's chat template makes of it, without a template engine on the page."""

from mionnx.errors import MIError
from mionnx.inputs.chat_template import load_chat_template
from mionnx.inputs.chat_tokens import tokenize_chat
from mionnx.model import MIModel

MESSAGE = "Name the colour of the sky."


def chat_of(model: MIModel) -> dict[str, str] | None:
    """The text before and after one message of a chat, the beginning of the answer included.

    None where the model has no template, where the template changes the message, or where the text around it does not
    give the ids of `tokenize_chat`: a template writes the token that begins a text, which a tokenizer adds too.
    """
    try:
        template = load_chat_template(model.hooked.folder)
        chat = tokenize_chat(model.tokenizer, template, [{"role": "user", "content": MESSAGE}], True, False, {})
    except MIError:
        return None
    if chat.text.count(MESSAGE) != 1:
        return None
    before, _, after = chat.text.partition(MESSAGE)
    begins = template.tokens.get("bos_token", "")
    for start in (before, before.removeprefix(begins)):
        if model.tokenizer.encode(start + MESSAGE + after).ids == [*chat.ids]:
            return {"before": start, "after": after}
    return None

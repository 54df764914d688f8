"""How a playground's model reads texts: its mask, pairs, the text before each text, and a chat's template.

Whatever is said here, a page's tokens are those of Python: what would give others is left out, and None.
"""

from typing import Any

from mionnx.errors import MIError
from mionnx.inputs.chat_template import load_chat_template
from mionnx.inputs.chat_tokens import tokenize_chat
from mionnx.inputs.world_tokenizer import WorldTokenizer
from mionnx.model import MIModel
from mionnx.run.embedding import prompt_before

MESSAGE = "Name the colour of the sky."
PAIR = ("The sky is blue.", "What colour is the sky?")


def reading_of(model: MIModel) -> dict[str, Any]:
    """How texts are read besides their tokens: the mask, unknown words, pairs, and what an embedding model expects.

    Raises:
        InputError: an embedding model whose prompt its graph cannot leave out of the pooling.
    """
    meta, mask = model.hooked.metadata, model.hooked.mask_token
    pooling = meta.pooling if meta.head == "embedding" else {}
    return {
        "mask": None if mask is None else {"id": mask, "text": model.tokenizer.id_to_token(mask)},
        "unknown": model.unknown_words.token,
        "special": special_tokens(model),
        "pair": pair_of(model) if meta.head == "classes" else None,
        "before": prompt_before(model, None) if pooling else "",
        "lower": bool(pooling.get("lower_case")),
        "similarity": (pooling.get("similarity") or "cosine") if pooling else None,
    }


def special_tokens(model: MIModel) -> list[int]:
    """The ids of the tokens that a tokenizer has for its own signs, [CLS] and masks among them."""
    if isinstance(model.tokenizer, WorldTokenizer):
        return []
    return sorted(token for token, added in model.tokenizer.get_added_tokens_decoder().items() if added.special)


def pair_of(model: MIModel) -> dict[str, Any] | None:
    """The special tokens between two texts that are read together: written between them they give the same ids.

    None where they do not, or where the token types of the pair are not 1 behind them.
    """
    tokenizer = model.tokenizer
    if isinstance(tokenizer, WorldTokenizer):
        return None
    both = tokenizer.encode(*PAIR)
    whose = both.sequence_ids
    if 1 not in whose:
        return None
    first, second = len(whose) - whose[::-1].index(0), whose.index(1)
    between = "".join(both.tokens[first:second])
    if not between or tokenizer.encode(between.join(PAIR)).ids != both.ids:
        return None
    if model.hooked.has_token_types and both.type_ids != [int(at >= second) for at in range(len(both.ids))]:
        return None
    return {"between": between, "ids": both.ids[first:second]}


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

"""A chat as tokens, with the positions of each message and role."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from mionnx.errors import InputError, TokenizerError, nearest
from mionnx.inputs.chat_template import ChatTemplate, Message, RenderedChat, Span, as_messages
from mionnx.inputs.tokens import Tokens, tokenize
from mionnx.inputs.world_tokenizer import WorldTokenizer
from mionnx.machine.brief import count
from mionnx.machine.typed import typed

ASSISTANT = "assistant"


@dataclass(frozen=True, repr=False)
@typed(InputError)
class ChatTokens(Tokens):
    """A tokenised chat; `text` is what the chat template makes of it.

    Attributes:
        roles: per message its role.
        spans: per message (start, end) of its content in the text, in characters; empty where the template leaves it
            out, several where it repeats it or puts something between its parts.
    """

    roles: tuple[str, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self.roles), "message"), count(len(self), "token"))

    def positions_of(
        self, part: str, occurrence: int | None = None, *, message: int | None = None, role: str | None = None
    ) -> list[int]:
        """The positions of the tokens that make up a part of the text.

        Args:
            part: a substring of the text.
            occurrence: which occurrence, 0-based, negative from the last; needed if there are several.
            message: look in the content of this message only, 0-based, negative from the last.
            role: look in messages of this role only, "user" for one.

        Raises:
            InputError: no such message or role.
            TokenizerError: the part does not occur there, or does so more than once and none was chosen, or no token
                covers it; the template does not show the message.

        Example:
            chat = [{"role": "user", "content": "Is Paris big?"}, {"role": "assistant", "content": "Paris is big."}]
            model.tokenize_chat(chat).positions_of("Paris", message=1)
        """
        if message is None and role is None:
            return super().positions_of(part, occurrence)
        chosen = self._chosen(message, role)
        spans = [span for number in chosen for span in self.spans[number]]
        return self._find(part, occurrence, spans, self._named(chosen))

    def positions_in(self, *, message: int | None = None, role: str | None = None) -> list[int]:
        """The positions of the tokens of a message's content, or of all messages of a role.

        Args:
            message: 0-based, negative from the last.
            role: "user" for one. With `message` too, that message has to have it.

        Raises:
            InputError: no such message or role, or neither is given.
            TokenizerError: the template does not show the message.

        Example:
            model.tokenize_chat([{"role": "user", "content": "Is Paris in France?"}]).positions_in(role="user")
        """
        if message is None and role is None:
            raise InputError("give message= or role=, or both")
        return self._covering([span for number in self._chosen(message, role) for span in self.spans[number]])

    def _chosen(self, message: int | None, role: str | None) -> list[int]:
        """Numbers of messages that the template shows."""
        if message is not None and not -len(self.roles) <= message < len(self.roles):
            raise InputError(f"message {message} of a chat of {count(len(self.roles), 'message')}")
        numbers = [*range(len(self.roles))] if message is None else [message % len(self.roles)]
        chosen = [number for number in numbers if role in (None, self.roles[number])]
        if not chosen:
            has = ", ".join(f"{number} {self.roles[number]!r}" for number in numbers)
            near = nearest(str(role), self.roles)
            raise InputError(f"no message of the role {role!r}; the chat has {has}{near}")
        # some templates leave reasoning or a system message out
        shown = [number for number in chosen if self.spans[number]]
        if not shown:
            raise TokenizerError(f"{self._named(chosen)}: the chat template does not show it as it is")
        return shown

    def _named(self, numbers: Sequence[int]) -> str:
        return ", ".join(f"message {number} ({self.roles[number]})" for number in numbers)


def tokenize_chat(
    tokenizer: Tokenizer | WorldTokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> ChatTokens:
    """Tokenise messages by a template: the special tokens are those that the template writes."""
    chat_messages = as_messages(messages)
    if add_generation_prompt and continue_final_message:
        raise InputError(
            "add_generation_prompt begins a new message, and continue_final_message none: give one of them"
        )
    if add_generation_prompt is None:
        # after an assistant's message the chat is complete, after any other the assistant is to answer
        add_generation_prompt = not continue_final_message and chat_messages[-1]["role"] != ASSISTANT
    chat = template.render(chat_messages, add_generation_prompt, variables)
    text = _cut(chat, chat_messages[-1]) if continue_final_message else chat.text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} of what the chat template makes is half of a pair of surrogates "
            f"({text[error.start]!a}), no text: it stands in a message or in the template"
        ) from error
    tokens = tokenize(tokenizer, text, add_special_tokens=False)  # a second beginning-of-text token would shift all
    roles = tuple(one["role"] for one in chat_messages)
    return ChatTokens(tokens.text, tokens.ids, tokens.offsets, tokens.pieces, roles, chat.spans)


def _cut(chat: RenderedChat, last: Message) -> str:
    if not chat.spans[-1]:
        raise TokenizerError("the chat template does not show the last message as it is, so it cannot be continued")
    end, content = chat.spans[-1][-1][1], last["content"]
    if not isinstance(content, str):
        return chat.text[:end]
    # spans leave white space out; a message that is continued keeps its own at the end, where the template does
    tail = content[len(content.rstrip()) :]
    return chat.text[: end + len(tail)] if chat.text.startswith(tail, end) else chat.text[:end]

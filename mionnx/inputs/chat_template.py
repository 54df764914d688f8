"""Chat templates of a model's folder: messages as the text that the model was trained on.

`chat_template.jinja` goes before `chat_template` of `tokenizer_config.json`, as in transformers. Among several
templates by name, `default` is the model's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from mionnx.errors import InputError, ModelError, TokenizerError, nearest
from mionnx.graph.folder_file import check_regular, files_beside, read_json
from mionnx.inputs.chat_renderer import chats

FILE, TOKENIZER_CONFIG, OLDER = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
LARGEST_TEMPLATE = 2**20  # bytes of a template
PRIVATE = range(0xF0000, 0x10FFFE)  # characters without a meaning of their own: marks
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that a message's reasoning has
Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class RenderedChat:
    """Messages as one text."""

    text: str
    # Per message where its content stands in the text; none where the template leaves it out.
    spans: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template, and the special tokens that it may name, `bos_token` for one."""

    source: str
    tokens: Mapping[str, str]

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> RenderedChat:
        """Render messages, and find where each one stands in the text."""
        # transformers passes these two always, and templates count on it
        plain = {"tools": None, "documents": None, **self.tokens, **variables}
        plain["add_generation_prompt"] = add_generation_prompt
        text = chats.render(self.source, {**plain, "messages": messages})
        # a second rendering has a mark at both ends of each content, and has to be the same otherwise
        marked, marks = _marked(messages)
        try:
            spans = _spans(chats.render(self.source, {**plain, "messages": marked}), text, marks)
        except TokenizerError:  # the template refuses marks: it gives no positions by message
            spans = {}
        return RenderedChat(text, tuple(tuple(spans.get(i, ())) for i in range(len(messages))))


def load_chat_template(folder: Path, chosen: str | None = None) -> ChatTemplate:
    """Load the chat template of a model's folder, or use a chosen one in its place."""
    try:
        config, older = _settings(folder, TOKENIZER_CONFIG), _settings(folder, OLDER)
        source = chosen if chosen is not None else _source(folder, config)
    except (ModelError, OSError, UnicodeError) as error:
        raise TokenizerError(f"the chat template of {folder} cannot be read: {error}") from error
    tokens = {name: token for name, token in {**older, **config}.items() if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return ChatTemplate(source, {name: text for name, text in texts.items() if isinstance(text, str)})


def _source(folder: Path, config: Mapping[str, Any]) -> str:
    for path in files_beside(folder, [FILE]):
        check_regular(path, LARGEST_TEMPLATE)
        return path.read_text("utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {str(one["name"]): one.get("template") for one in source if isinstance(one, dict) and "name" in one}
        source = named.get("default")
        if source is None and named:
            raise TokenizerError(f"{folder} has no default chat template, but {', '.join(named)}: give one of them")
    if not isinstance(source, str):
        raise TokenizerError(
            f"{folder} has no chat template, neither {FILE} nor chat_template in {TOKENIZER_CONFIG}: "
            "give the prompt as one text, or a template, chat_template=TEXT"
        )
    return source


def _settings(folder: Path, name: str) -> dict[str, Any]:
    path = next(iter(files_beside(folder, [name])), None)
    settings = {} if path is None else read_json(path)
    if not isinstance(settings, dict):
        raise ModelError(f"{path} holds {type(settings).__name__}, no settings")
    return settings


def as_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Check messages."""
    # As in transformers, a key without a value is left out, and reasoning gets every name that templates read.
    if not messages:
        raise InputError("a chat needs at least one message, {'role': 'user', 'content': TEXT}")
    return [_as_message(i, message) for i, message in enumerate(messages)]


def _as_message(number: int, entry: Message) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise InputError(f"message {number} is a {type(entry).__name__}, and not {{'role': 'user', 'content': TEXT}}")
    if not isinstance(entry.get("role"), str):
        near = next((near for key in entry if (near := nearest(str(key), ["role"]))), "")
        raise InputError(f"message {number} has no role; it has {', '.join(map(repr, entry)) or 'nothing'}{near}")
    content = entry.get("content")
    parts = content if isinstance(content, list | tuple) else []
    if not isinstance(content, str | list | tuple | None) or not all(isinstance(part, Mapping) for part in parts):
        raise InputError(f"the content of message {number} must be a text, or a list of parts {{'type', 'text'}}")
    message = {str(key): value for key, value in entry.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Mark(NamedTuple):
    message: int
    start: str
    end: str
    text: str


def _marked(messages: Sequence[Message]) -> tuple[list[Message], list[_Mark]]:
    """Messages with a mark at both ends of each text; white space stays outside."""
    unused = (chr(code) for code in PRIVATE if chr(code) not in str(messages))
    marks: list[_Mark] = []

    def mark(number: int, text: str) -> str:
        # templates strip contents: marks around the white space would keep it from them
        core = text.strip()
        if not core:
            return text
        start, end = islice(unused, 2)
        marks.append(_Mark(number, start, end, core))
        lead, _, tail = text.partition(core)
        return lead + start + core + end + tail

    def marked_content(number: int, content: Any) -> Any:
        if isinstance(content, str):
            return mark(number, content)
        return [
            {**part, "text": mark(number, part["text"])} if isinstance(part.get("text"), str) else part
            for part in content
        ]

    changed = [
        {**one, "content": marked_content(i, one["content"])} if "content" in one else one
        for i, one in enumerate(messages)
    ]
    return changed, marks


def _spans(marked: str, text: str, marks: Sequence[_Mark]) -> dict[int, list[Span]]:
    """Message -> its ranges in the text; empty where the marks change more than themselves."""
    places: dict[str, list[int]] = {sign: [] for mark in marks for sign in (mark.start, mark.end)}
    plain: list[str] = []
    for character in marked:
        if character in places:
            places[character].append(len(plain))
        else:
            plain.append(character)
    # the template looks into contents (a prefix, a length), so that places in the marked text are not those in the text
    if "".join(plain) != text:
        return {}
    ranges: dict[int, list[Span]] = {}
    for mark in marks:
        starts, ends = places[mark.start], places[mark.end]
        if len(starts) == len(ends):
            spans = [*zip(starts, ends, strict=True)]
        elif not starts:  # the template cuts the beginning off
            lengths = [_shared(text[:end][::-1], mark.text[::-1].rstrip()) for end in ends]
            spans = [(end - len(text[end - n : end].lstrip()), end) for n, end in zip(lengths, ends, strict=True)]
        else:
            # the template cuts the end off: as many characters as the text and the content share
            spans = [(start, start + _shared(text[start:], mark.text)) for start in starts if not ends]
        ranges.setdefault(mark.message, []).extend(spans)
    return {number: sorted(spans) for number, spans in ranges.items()}


def _shared(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))

"""The ids of a GGUF file's special tokens, with those that llama.cpp assumes."""

import warnings

from exporters.gguf.header import Header

NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding")  # of a text's begin and end, a turn's, a message's end
ASSUMED = {"llama": {"unknown": 0, "bos": 1, "eos": 2}}  # by the kind of vocabulary


def special_ids(header: Header) -> dict[str, int]:
    """The ids of special tokens, by llama.cpp's names for them.

    An id outside the vocabulary is left out with a warning: converters write -1 for a token that is not there.
    """
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    size = len(tokens) if isinstance(tokens, list) else 0
    assumed = ASSUMED.get(str(header.metadata.get("tokenizer.ggml.model")), {})
    found = {}
    for name in NAMES:
        key = f"tokenizer.ggml.{name}_token_id"
        number = header.metadata.get(key, assumed.get(name))
        if isinstance(number, int) and 0 <= number < size:
            found[name] = int(number)
        elif key in header.metadata:
            warnings.warn(f"{header.file}: {key} is {number!r}, and the vocabulary has {size} tokens", stacklevel=2)
    return found

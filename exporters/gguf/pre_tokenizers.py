"""Names of pre-tokenizers in llama.cpp as the regular expressions that cut a text.

A file names its pre-tokenizer (`tokenizer.ggml.pre`) and holds no rule. Each name stands for expressions that cut one
after the other, every match and every gap a piece. The expressions are those of the tokenizers that the names come
from; llama.cpp's own differ where its engine lacks a class or a flag.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_OF_CASED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Cut:
    """A pre-tokenizer.

    Attributes:
        patterns: regular expressions, applied one after the other.
        whole_words: a piece that is in the vocabulary is one token, whatever its merges give.
        begins: a text begins with the BOS token where the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False

    def build(self) -> PreTokenizer:
        """The `tokenizers` pre-tokenizer, bytes spelled in GPT-2's alphabet."""
        cuts = [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = Cut((_WORDS,))
DIGITS = Cut((r"\p{N}", _WORDS))
LLAMA3 = Cut((rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, begins=True)
QWEN2 = Cut((rf"{_SHORT}|{_WORD}|\p{{N}}|{_REST}",))
TEKKEN = Cut((rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_OF_CASED}",), whole_words=True, begins=True)
GPT4O = Cut((rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_REST_OF_CASED}",))
DEFAULT = Cut((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"))

CUTS: dict[str, Cut] = {
    "default": DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "a.x-4.0", "exaone4"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Cut(LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), QWEN2),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    "falcon": Cut((r"[\p{P}\$\+<=>\^~\|`]+", _WORDS, "[0-9][0-9][0-9]")),
}

"""The growth of a text by the rules of a `tokenizer.json`, bounded before the first text is given to them.

Each `Replace` of a normalizer or a decoder may make a text longer, and those of a sequence multiply: 28 that make two
letters of one make 256 MB of a letter, in a call that nothing interrupts.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mionnx.errors import TokenizerError

FACTOR = 2**14  # by which all rules of a part together may multiply a text
ADDED = 2**20  # bytes that they may add to it


def check_growth(tokenizer: Tokenizer, path: Path) -> None:
    """Check that no part of a tokenizer makes a text longer without bound.

    Args:
        tokenizer: as its file says, not used yet.
        path: of the file, for the refusal.

    Raises:
        TokenizerError: a part does.
    """
    for name in ("normalizer", "decoder", "post_processor"):
        part = getattr(tokenizer, name)
        factor, added = (1, 0) if part is None else _growth(json.loads(part.__getstate__()), 1, 0)
        if factor > FACTOR or added > ADDED:
            raise TokenizerError(
                f"the {name} of {path} makes a text up to {factor:,} times as long, and {added:,} bytes longer: "
                f"refused beyond {FACTOR:,} times and {ADDED:,} bytes"
            )


def _growth(rule: Any, factor: int, added: int) -> tuple[int, int]:
    """The length of a text of n bytes after a rule, factor * n + added, from that before it."""
    if not isinstance(rule, dict):
        return factor, added
    for one in [*rule.get("normalizers", []), *rule.get("decoders", []), *rule.get("processors", [])]:
        factor, added = _growth(one, factor, added)
    kind = rule.get("type")
    if kind == "Replace":
        content, pattern = len(rule["content"].encode()), rule["pattern"]
        matched = len(pattern.get("String", "").encode())
        # what a regular expression matches may be empty, and then it stands before every byte
        more = max(1, -(-content // matched)) if matched else content + 1
        return factor * more, added * more + content
    if kind == "Prepend":
        return factor, added + len(rule["prepend"].encode())
    if kind == "TemplateProcessing":
        texts = sum("Sequence" in piece for piece in rule["single"])
        return factor * max(1, texts), added * max(1, texts)
    return factor, added

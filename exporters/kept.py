"""What is kept beside a hooked model, where the checkpoint has it: the config, and what tokenizers are made of."""

import shutil
from pathlib import Path

KEPT = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.txt",
)
KEPT_PATTERNS = ("rwkv_vocab*.txt",)


def keep_files(folder: Path, target: Path) -> None:
    """Copy a checkpoint's small files into the hooked model's folder."""
    if folder.resolve() == target.resolve():
        return
    names = [*KEPT, *(file.name for pattern in KEPT_PATTERNS for file in folder.glob(pattern))]
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)

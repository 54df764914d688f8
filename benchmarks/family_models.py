"""Small random checkpoints of every family that transformers has, or the reason why there is none."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from families import make_checkpoint, make_model
from recurrent_families import CONFIGS, make_recurrent
from rwkv4_eager import make_rwkv4
from tiny_configs import tiny_config
from unlisted_families import FAMILIES, make

from exporters.transformers.refused import ENCODER, REASONS, RECURRENT, carries_state

RWKV4 = "rwkv"  # transformers' name
OTHER_INPUTS = {"vision_config", "audio_config", "vq_config", "audio_encoder_config", "text_config"}


class MissingError(Exception):
    """Why a family is not in the table."""


def make_decoder(family: str, folder: Path) -> Any:
    """A small random checkpoint of a family, saved; the same in transformers.

    Raises:
        MissingError: the family is no text decoder with keys and values.
    """
    if family in FAMILIES:
        reference = make(family)
        reference.save_pretrained(folder)
        return reference
    if family == RWKV4:
        return make_rwkv4(folder)
    if family in CONFIGS:
        return make_recurrent(family, folder)
    check_kind(family)
    return make_checkpoint(family, folder, **tiny_config(family))


def check_kind(family: str) -> None:
    """Refuse what is no text decoder with keys and values.

    Raises:
        MissingError: the reason.
    """
    if family in REASONS:
        raise MissingError(REASONS[family])
    try:
        config = AutoConfig.for_model(family)
    except Exception as error:
        raise MissingError(f"transformers' own default config is refused: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise MissingError("has an encoder and a decoder")
    if OTHER_INPUTS & {*config.sub_configs}:
        raise MissingError("reads images or sound; its text part, where it has one, is a family of its own")
    try:
        model = make_model(family, **tiny_config(family))
    except Exception as error:
        raise MissingError(f"does not build at tiny size: {first_line(error)}") from error
    if carries_state(model):
        raise MissingError(RECURRENT)
    if getattr(config, "is_decoder", True) is False and "type_vocab_size" in config.to_dict():
        raise MissingError(ENCODER)


def first_line(error: BaseException) -> str:
    """An error's class and the beginning of what it says, in one line."""
    said = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


def for_each(
    names: list[str],
    function: Callable[[str, Path], tuple[list[str], bool]],
    rows: Path | None,
    kept: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """What was measured of each family, or why it is missing, on top of what is `kept`."""
    lines = [json.loads(line) for line in rows.read_text().splitlines()] if rows and rows.exists() else []
    found = kept | {entry["family"]: entry for entry in lines}
    for name in track([name for name in names if name not in found], "families", console=Console(stderr=True)):
        entry: dict[str, Any] = {"family": name}
        with tempfile.TemporaryDirectory() as folder:
            try:
                entry["row"], entry["reduced"] = function(name, Path(folder))
            except MissingError as error:
                entry["missing"] = str(error)
            except Exception as error:  # of any library: the table says it
                entry["missing"] = f"refused: {first_line(error)}"
        found[name] = entry
        if rows:
            with rows.open("a") as file:
                file.write(json.dumps(entry) + "\n")
    return found

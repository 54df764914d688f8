"""Where a metric reads a model's main output, by its head: the last token's logits, a mask's, a tag's, a text's."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.logit_selection import Logits
from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import NEXT_TOKEN
from mionnx.inputs.token_batch import MASK, Place, make_token_batch

# Head -> the position that is read if none is said; None where one has to be said.
DEFAULT_PLACE: dict[str, Place | None] = {NEXT_TOKEN: -1, "masked_lm": MASK}


def place_of(model: HookedModel, position: Place | None) -> Place | None:
    """The position of a text at which a metric reads; None where a text has one row of numbers."""
    metadata = model.metadata
    if metadata.head == "span" and position is None:
        return None
    if not metadata.positional:
        if position is not None:
            raise InputError(f"position={position!r} has no effect: this model's {metadata.head} are of a whole text")
        return None
    place = DEFAULT_PLACE.get(metadata.head) if position is None else position
    if place is None:
        raise InputError("position= says which token's tag the metric reads, counted from 0")
    return place


def part_read(model: HookedModel, position: Place | None) -> Logits:
    """The part of the main output that a metric reads."""
    place = place_of(model, position)
    return Logits() if place is None else Logits(positions=place)


def values_read(model: HookedModel, output: NDArray[Any]) -> NDArray[Any]:
    """[batch, columns] of the part that a metric reads; of a span head start and end of each token in turn."""
    if model.metadata.head == "span":
        return output.reshape(len(output), -1)
    return output[:, -1] if model.metadata.positional else output


def index_read(model: HookedModel, position: Place | None, ids: NDArray[np.int64]) -> int | None:
    """The index in a text, [seq], at which a metric reads; None where a text has one row of numbers."""
    place = place_of(model, position)
    if place is None:
        return None
    try:
        return make_token_batch(ids[None], None, None, model).absolute(place, 0)
    except LookupError as error:
        raise InputError(str(error)) from None

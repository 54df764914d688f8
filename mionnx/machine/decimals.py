"""Decimal fractions as text: the one format of numbers in tables, pictures and messages."""

from typing import SupportsFloat


def decimal(value: SupportsFloat, places: int = 2, sign: bool = False) -> str:
    """A number with some decimal places; what rounds to zero has no sign: "0.00", never "-0.00"."""
    number = float(value)
    if number != number:
        return "nan"
    rounded = round(number, places) + 0.0  # which makes -0.0 a 0.0
    return f"{rounded:{'+' if sign and rounded else ''}.{places}f}"

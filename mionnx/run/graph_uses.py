"""Count of the graphs asked for."""

_uses = [0]  # how often any model's graph was asked for


def count_use() -> None:
    """Count a graph that is asked for."""
    _uses[0] += 1


def uses() -> int:
    """Count of graphs asked for, of all models."""
    return _uses[0]

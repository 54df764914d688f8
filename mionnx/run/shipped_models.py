"""Models that ship with mionnx: in `models/` of the repository, or inside an installed wheel."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "shipped", PACKAGE.parent / "models")  # of a wheel, of the repository


def shipped_models(folders: tuple[Path, ...] = FOLDERS) -> dict[str, Path]:
    """Folders of the shipped models by name, `world-llama` for one.

    Args:
        folders: where to look, the first that has models counts.
    """
    for folder in folders:
        models = {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}
        if models:
            return models
    return {}

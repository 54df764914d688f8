"""Runtimes by their names: "torch", "ort-cpu:none:threads=1", an execution provider's own name, .."""

from pathlib import Path
from typing import Any

from mionnx.engine.engines import ENGINES
from mionnx.engine.options import OPTIMISATION_LEVELS, PROVIDERS, Options, installed_providers, known_providers
from mionnx.errors import InputError, nearest
from mionnx.verify.runtime import GraphRuntime, Runtime
from mionnx.verify.torch_eager import Eager

OTHER_ENGINES = {name: engine.settings for name, engine in ENGINES.items() if name != Options.engine}
RUNTIME_NAMES = ("torch", *(f"ort-{short}" for short in PROVIDERS), *OTHER_ENGINES)
WITH_THREADS = ("torch", "ort-cpu", *(name for name, settings in OTHER_ENGINES.items() if "threads" in settings))
PROVIDER = "ExecutionProvider"  # what the full name of every provider of ONNX Runtime ends in


def runtime_of(title: str, checkpoint: Path | None = None) -> Runtime:
    """The runtime of a name.

    Args:
        title: one of `RUNTIME_NAMES`, or an execution provider's full name; then, after colons, an optimisation level
            of ONNX Runtime ("none", "basic", "extended", "all") and "threads=N".
        checkpoint: where "torch" finds the weights, if not in the hooked model's folder.

    Raises:
        InputError: no such runtime, level or setting.
    """
    name, *settings = title.split(":")
    providers = known_providers()
    if name not in (*RUNTIME_NAMES, *providers, *installed_providers()):
        choices = (*RUNTIME_NAMES, *providers)
        raise InputError(f"no runtime {name!r}; there are {', '.join(RUNTIME_NAMES)}, and ONNX Runtime's providers by "
                         f"their full names{nearest(name, choices)}")  # fmt: skip
    options = _settings(title, name, settings)
    threads = options.get("threads", 0)
    if name == "torch":
        return Eager(title, checkpoint, threads)
    if name in OTHER_ENGINES:
        return GraphRuntime(title, Options(threads=threads, fast="fast" in OTHER_ENGINES[name], engine=name))
    provider = next((short for short in PROVIDERS if name == f"ort-{short}"), name)
    return GraphRuntime(title, Options(provider, threads, level=options.get("level", "all")))


def _settings(title: str, name: str, settings: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    ort = name.startswith("ort-") or name.endswith(PROVIDER)
    for setting in settings:
        key, _, value = setting.partition("=")
        if options.keys() & {"level" if setting in OPTIMISATION_LEVELS else key}:
            raise InputError(f"runtime {title!r}: {setting!r} is given after another setting of the same thing")
        if ort and setting in OPTIMISATION_LEVELS:
            options["level"] = setting
        elif key == "threads" and value.isdigit() and int(value) and (ort or name in WITH_THREADS):
            options["threads"] = int(value)
        else:
            choices = [*(OPTIMISATION_LEVELS if ort else ()), *(["threads=N"] if ort or name in WITH_THREADS else [])]
            raise InputError(
                f"runtime {title!r}: {name} has no setting {setting!r}; it has {', '.join(choices) or 'none'}"
                f"{nearest(setting, choices)}"
            )
    return options

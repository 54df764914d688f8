"""The table of engines. A new engine is one file of this room and one entry here."""

from dataclasses import fields
from pathlib import Path

from mionnx.engine.browser import Browser
from mionnx.engine.engine import Engine, Program
from mionnx.engine.onnx_runtime import OnnxRuntime
from mionnx.engine.openvino import OpenVino
from mionnx.engine.options import Options
from mionnx.engine.reference import Reference
from mionnx.engine.web import Web
from mionnx.engine.webgpu import WebGpu
from mionnx.errors import InputError, RuntimeMissingError, nearest

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (OnnxRuntime(), OpenVino(), Web(), Browser(), WebGpu(), Reference())
}
# What people deploy to -> how it is opened, and the dtype in which it adds up products of float16.
DEPLOYMENTS = {"webgpu": (Options(engine=WebGpu.name), "float16"), "cuda": (Options("cuda"), "float32")}
COMMON = ("engine", "max_graphs", "max_bytes")  # settings of the pool of open graphs, whatever opens them


def engine_of(options: Options) -> Engine:
    """The engine that some options name, which has all of their settings."""
    engine = ENGINES.get(options.engine)
    if engine is None:
        raise InputError(
            f"no engine {options.engine!r}; there are {', '.join(ENGINES)}{nearest(options.engine, ENGINES)}"
        )
    plain = Options(engine=options.engine)
    for setting in fields(Options):
        name = setting.name
        if name not in (*COMMON, *engine.settings) and getattr(options, name) != getattr(plain, name):
            raise InputError(
                f"engine={engine.name!r} has no {name}={getattr(options, name)!r}: leave it out, or use "
                f"engine={Options.engine!r}"
            )
    return engine


def ready_engine(options: Options) -> Engine:
    """As `engine_of`, and it can run on this machine."""
    engine = engine_of(options)
    if why := engine.missing(options):
        raise RuntimeMissingError(why)
    return engine


def open_to_try(model: Path | bytes, folder: Path) -> Program:
    """Open a graph in the engine of choice for runs that may fail; see `Engine.open_to_try`."""
    return engine_of(Options()).open_to_try(model, folder)

"""mionnx: interpretability on ONNX graphs.

A Hugging Face language model becomes an ONNX graph whose activations carry their hook names; a `HookSpec` says what to
capture and where to intervene; the graph is rewritten and runs in ONNX Runtime.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers know an unknown name themselves
    from mionnx.names import *  # noqa: F403
    from mionnx.names import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        # `mionnx --help` and `import mionnx` are to be quick: all names come with the first that is asked for.
        if name == "__version__":
            from mionnx.graph.own_version import own_version

            return own_version()
        if name.startswith("__") and name != "__all__":  # asked for by the import system and by inspect
            raise AttributeError(f"module 'mionnx' has no attribute {name!r}")
        names = _names()
        if name in globals():
            return globals()[name]
        from mionnx.machine.dialects import unknown_import

        raise unknown_import(name, names)

    def __dir__() -> list[str]:
        return sorted({*_names(), *globals()})

    def _names() -> list[str]:
        from importlib import import_module

        names = import_module("mionnx.names")
        globals().update({name: getattr(names, name) for name in ("__all__", *names.__all__)})
        return names.__all__

"""The outside does not move: public names, their parameters and defaults, and the command line, as they were frozen.

A name, parameter or option may be added where old calls keep their meaning. `python tests/laws/test_public_api.py`
writes `public_api.json` anew, for a change that is meant.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import mionnx
from mionnx.cli.main import COMMANDS, load

FROZEN = Path(__file__).with_name("public_api.json")


def _parameter(parameter: inspect.Parameter) -> str:
    """Kind and default of a parameter, as text; a default that is an object goes by its class."""
    default, kind = parameter.default, parameter.kind.name.lower()
    if default is inspect.Parameter.empty:
        return kind
    named = default is None or isinstance(default, str | int | float | tuple)
    return f"{kind} = {default!r}" if named else f"{kind} = {type(default).__name__}"


def _signature(what: Any) -> dict[str, str] | None:
    try:
        found = inspect.signature(what)
    except (TypeError, ValueError):
        return None
    return {name: _parameter(parameter) for name, parameter in found.parameters.items()}


def _members(cls: type) -> dict[str, Any]:
    """Public attributes of a class: a method's parameters; None for a property or a plain value."""
    names = [name for name in dir(cls) if not name.startswith("_")]
    return {name: _member(cls, name) if callable(getattr(cls, name)) else None for name in names}


def _member(cls: type, name: str) -> dict[str, str] | None:
    """A member's parameters; the first one of a method is "self", whatever it is called: no call names it."""
    found = _signature(getattr(cls, name))
    if not found or not inspect.isfunction(inspect.getattr_static(cls, name)):
        return found
    first, *others = found
    return {"self": found[first], **{other: found[other] for other in others}}


def _name(what: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"parameters": _signature(what)}
    if inspect.isclass(what):
        found["members"] = _members(what)
    return found


def public_api() -> dict[str, Any]:
    """Everything that users write: names of `mionnx`, and commands with their options."""
    commands = {name: load(name) for name in COMMANDS}
    return {
        "names": {name: _name(getattr(mionnx, name)) for name in sorted(mionnx.__all__)},
        "commands": {
            name: sorted(option for parameter in commands[name].params for option in parameter.opts)
            for name in sorted(commands)
        },
    }


frozen = json.loads(FROZEN.read_text()) if FROZEN.exists() else {"names": {}, "commands": {}}
now = public_api()


def _compatible(before: dict[str, str] | None, after: dict[str, str] | None) -> None:
    """Every call that was right before is right now, and means the same."""
    if before is None or after is None:
        assert before == after
        return
    assert [name for name in after if name in before] == [*before], "a parameter is gone, or stands elsewhere"
    for name, parameter in before.items():
        assert after[name] == parameter, name
    added = {name: parameter for name, parameter in after.items() if name not in before}
    for name, parameter in added.items():
        assert parameter.startswith("keyword_only") or [*after].index(name) >= len(before), f"{name} moves others"
        assert "=" in parameter or parameter.startswith("var_"), f"{name} must be given now"


def test_every_public_name_is_known() -> None:
    assert {*frozen["names"]} <= {*now["names"]}


@pytest.mark.parametrize("name", frozen["names"])
def test_a_public_name_keeps_its_parameters(name: str) -> None:
    before, after = frozen["names"][name], now["names"][name]
    _compatible(before["parameters"], after["parameters"])
    for member, parameters in before.get("members", {}).items():
        assert member in after["members"], f"{name}.{member} is gone"
        _compatible(parameters, after["members"][member])


@pytest.mark.parametrize("command", frozen["commands"])
def test_a_command_keeps_its_options(command: str) -> None:
    assert {*frozen["commands"][command]} <= {*now["commands"][command]}


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(public_api(), indent=1) + "\n")

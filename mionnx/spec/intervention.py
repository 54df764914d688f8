"""`Intervention`: one modification of the activation at a hook point."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature, unwrap
from types import SimpleNamespace
from typing import Any, ParamSpec, get_args, get_type_hints

from mionnx.errors import InterventionError
from mionnx.machine.brief import Brief, spelled
from mionnx.machine.typed import typed
from mionnx.spec.kinds import (
    KINDS,
    add,
    add_when,
    clamp,
    knockout,
    low_rank,
    project_out,
    replace,
    scale,
    splice,
    window,
    zero,
)
from mionnx.spec.kinds.kind import Array, Change, Kind, ValueShape
from mionnx.spec.limits import LATER, LIMITS, checked

Arguments = ParamSpec("Arguments")


def with_limits(function: Callable[..., Any]) -> Signature:
    """The signature of a function of limits that gives an intervention, with each limit by its name."""
    plain = unwrap(function)
    declared = signature(plain)
    *own, limits = declared.parameters.values()
    if limits.kind is limits.VAR_KEYWORD:  # help() shows each limit by its name, as callers write it
        # This annotation alone: others of a kind may name what type checkers alone import.
        alone = SimpleNamespace(__annotations__={"limits": limits.annotation})
        (names,) = get_args(get_type_hints(alone, plain.__globals__)["limits"])  # type: ignore[attr-defined]
        own += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hint.__forward_arg__)
            for name, hint in names.__annotations__.items()
        ]
    return declared.replace(parameters=own, return_annotation="Intervention")


def constructor(make: Callable[Arguments, Change]) -> "Callable[Arguments, Intervention]":
    """A constructor of `Intervention`, with the signature and docstring of a kind's `make`."""
    shown = with_limits(make)

    @wraps(make)
    def construct(*args: Arguments.args, **options: Arguments.kwargs) -> "Intervention":
        try:
            shown.bind(*args, **options)
        except TypeError as error:  # an argument that the kind does not have
            raise TypeError(f"Intervention.{construct.__name__}() {error}") from None
        return Intervention(**vars(make(*args, **options)))

    construct.__name__ = make.__qualname__.partition(".")[0]  # the kind's class
    vars(construct)["__signature__"] = shown
    return construct


def find_kind(name: str) -> Kind:
    """The kind of a name; an unknown one is refused."""
    if name not in KINDS:
        raise InterventionError(f"no intervention kind {name!r}; the kinds are {', '.join(KINDS)}")
    return KINDS[name]


@typed(InterventionError)
@dataclass(frozen=True, eq=False, repr=False)
class Intervention(Brief, Change):
    """One modification of the value at a hook point.

    Made by `Replace`, `Add`, `Knockout`, `Window`, `Scale`, `Zero`, `ProjectOut`, `Splice`, `Clamp` and any other kind
    in `mionnx.spec.kinds`, each with five optional limits:

    * `positions`: token positions, counted from 0 in each row's own text (padding not counted), negative ones from the
      end of its prompt, which is all of it outside a generation; one, a list, or one list a batch row; or a phase,
      "prompt" or "generated". At scores and patterns they select queries.
    * `heads`: heads, counted from 0 (key/value heads at `hook_k`, `hook_rot_k` and `hook_v`).
    * `rows`: batch rows, counted from 0.
    * `experts`: experts of a mixture, counted from 0. At router logits they select columns; at what chosen experts
      give, those places of a token at which one of them was chosen.
    * `neurons`: neurons of an MLP or an expert, counted from 0: entries of the last axis of `mlp.hook_gate`, `hook_up`
      and `hook_act`, and of `hook_expert_gate`, `hook_expert_up` and `hook_expert_act`.

    Along a limited axis a value (a tensor, vector, factor or bound) has one entry for all that is chosen; or one for
    each, in the order given (`positions=[2, 0, 1]`: entry 0 is for position 2); or one for each index of the whole
    axis, of which the chosen ones are taken. A size that fits both is in the order given, so that a spec means the
    same in a text of any length. Where rows choose unequal numbers of positions, and in the phase "generated", a value
    cannot have an entry for each.

    What lies outside the limits keeps its value. A limit that selects nothing, or something that does not exist, is an
    `InterventionError` when the spec is used.

    Attributes:
        kind: name of a kind: "replace", "add", "knockout", "scale", "zero", "project_out", "splice", ...
        value: the tensor, vector, mask, factor or directions; None for "zero", "splice" and kinds of several values.
        positions, heads, rows, experts, neurons: the limits, None where there is none.
        fragment, reads: a splice's fragment, and the hook point that it reads besides.
        several: the values of a kind that has several, in its order.
    """

    def __post_init__(self) -> None:
        rules = find_kind(self.kind)
        if len(rules.values) != len(self.values):
            needed = " and ".join("a value" if name == "value" else name for name in rules.values)
            raise InterventionError(f"{self.kind} {f'needs {needed}' if needed else 'takes no value'}")
        for name, limit in checked({name: getattr(self, name) for name in LIMITS}).items():
            object.__setattr__(self, name, limit)
        if self.neurons is not None and rules.shape is ValueShape.DIRECTIONS:
            raise InterventionError(f"{self.kind} works on directions along all neurons: it has no neurons= to choose")
        if rules.has_fragment != (self.fragment is not None):
            raise InterventionError("a splice, and nothing else, has a fragment: Intervention.Splice makes one")

    Replace = staticmethod(constructor(replace.Replace.make))
    Add = staticmethod(constructor(add.Add.make))
    Knockout = staticmethod(constructor(knockout.Knockout.make))
    Scale = staticmethod(constructor(scale.Scale.make))
    Zero = staticmethod(constructor(zero.Zero.make))
    ProjectOut = staticmethod(constructor(project_out.ProjectOut.make))
    Splice = staticmethod(constructor(splice.Splice.make))
    Clamp = staticmethod(constructor(clamp.Clamp.make))
    Window = staticmethod(constructor(window.Window.make))
    AddWhen = staticmethod(constructor(add_when.AddWhen.make))
    LowRank = staticmethod(constructor(low_rank.LowRank.make))

    @property
    def rules(self) -> Kind:
        """The kind itself, with its nodes and rules."""
        return KINDS[self.kind]

    @property
    def limited(self) -> bool:
        """Whether any of its limits is given."""
        return any(getattr(self, limit) is not None for limit in LIMITS)

    @property
    # A mask has the keys of the text so far, of which every step has one more.
    def varies_by_step(self) -> bool:
        """Whether the inputs of values and positions change from step to step of a generation."""
        return self.positions is not None or self.rules.shape is ValueShape.ATTENTION_MASK

    def __repr__(self) -> str:
        return f"Intervention.{self.rules.title}({', '.join(self._facts())})"

    def _facts(self) -> Iterator[str]:
        names = self.rules.values
        shown: dict[str, Any] = dict(zip(names, self.values, strict=True))
        shown |= {name: getattr(self, name) for name in ("fragment", "reads", *LIMITS)}
        for name, value in shown.items():
            if value is not None:
                yield spelled(value) if names == (name,) or name == "fragment" else f"{name}={spelled(value)}"

    def to_entry(self, hook: str) -> dict[str, Any]:
        """The entry in a spec file, at a name or glob; values are stored beside it."""
        return {
            "hook": hook,
            "kind": self.kind,
            "positions": self.positions,
            "heads": self.heads,
            "rows": self.rows,
            **({} if self.reads is None else {"reads": self.reads}),
            **{limit: getattr(self, limit) for limit in LATER if getattr(self, limit) is not None},
        }

    @staticmethod
    def from_entry(entry: dict[str, Any], tensors: Mapping[str, Array]) -> "Intervention":
        """The intervention of an entry in a spec file; `tensors` are named as the kind's values."""
        limits = {limit: entry[limit] for limit in LIMITS if limit in entry or limit not in LATER}
        return Intervention(**vars(find_kind(entry["kind"]).restored(tensors, entry.get("reads"), **limits)))


for _kind in KINDS.values():  # those of the class body are known to type checkers by their exact signatures
    if _kind.title not in vars(Intervention):
        setattr(Intervention, _kind.title, staticmethod(constructor(_kind.make)))

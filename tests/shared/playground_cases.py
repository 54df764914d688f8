"""Lists of entries of the small Llama's playground: valid ones, ones that are refused, random ones."""

from random import Random
from typing import Any

Entry = dict[str, Any]
PROMPT, SECOND = "The capital of France is", "The capital of Germany is"
TOKENS, HEADS = 5, 8
POST, MID, Z = "blocks.2.hook_resid_post", "blocks.1.hook_resid_mid", "blocks.1.attn.hook_z"
SCORES, OUT, MLP, ACT = (
    "blocks.2.attn.hook_scores",
    "blocks.1.hook_attn_out",
    "blocks.1.hook_mlp_out",
    "blocks.0.mlp.hook_act",
)
CLAMPED = "blocks.3.hook_resid_pre"


def entry(hook: str, kind: str, value: Any = None, **more: Any) -> Entry:
    return {"hook": hook, "kind": kind, **({} if value is None else {"value": value}), **more}


def patch(positions: Any = None, text: str = SECOND) -> Entry:
    return {"from": "prompt", "text": text, **({} if positions is None else {"positions": positions})}


def edges(*pairs: list[int]) -> Entry:
    return {"edges": [*pairs]}


def of_file(number: int, *names: str) -> Entry:
    tensors = [f"interventions.{number}.{name}" for name in names or ["value"]]
    return {"from": "spec", "tensors": tensors} if names else {"from": "spec", "tensor": tensors[0]}


TWO = [[1.0], [3.0]]
CONTRAST = {"from": "contrast", "more": [SECOND], "less": [PROMPT], "position": 3}
# What is chosen twice is chosen once; numbers and their order; limits; globs.
EQUAL: dict[str, list[Entry]] = {
    "one position by two names, scaled": [entry(POST, "scale", 3, positions=[4, -1])],
    "one position by two names, added": [entry(POST, "add", 2, positions=[1, -4])],
    "one position by two names, zeroed": [entry(POST, "zero", positions=[0, 0, -5])],
    "one position by two names, replaced by one value": [entry(POST, "replace", 0.5, positions=[3, -2])],
    "one head twice": [entry(Z, "scale", 3, heads=[1, 1])],
    "one head twice, twice": [entry(Z, "add", 3, heads=[1, 1]), entry(Z, "scale", 0.5, heads=[1, 1], positions=[4, 4])],
    "one neuron twice": [entry(ACT, "scale", 9, neurons=[7, 7])],
    "one head of an edge twice": [entry(SCORES, "knockout", edges([4, 3], [4, 3]), heads=[1, 1])],
    "positions in another order": [entry(POST, "add", TWO, positions=[3, 1])],
    "a value for the whole axis": [entry(POST, "add", [[1.0], [2.0], [3.0], [4.0], [5.0]], positions=[3, 1])],
    "a value for each of all, in another order": [
        entry(POST, "add", [[1.0], [2.0], [3.0], [4.0], [5.0]], positions=[4, 3, 2, 1, 0])
    ],
    "the prompt by its name": [entry(POST, "add", [[1.0], [2.0], [3.0], [4.0], [5.0]], positions="prompt")],
    "heads in another order": [entry(Z, "scale", TWO, heads=[5, 2])],
    "neurons in another order": [entry(ACT, "scale", [0.5, 4.0], neurons=[9, 2], positions=[2])],
    "a scale of 1, the zero of a dose": [entry(POST, "scale", 1)],
    "nothing added, the zero of a dose": [entry(POST, "add", 0)],
    "no strength": [entry(POST, "add", CONTRAST, strength=0)],
    "a strength": [entry(POST, "add", CONTRAST, strength=-1.5, positions=[-2])],
    "as large as float32 holds": [entry(POST, "scale", 1e35), entry(POST, "scale", 2e-35)],
    "small numbers": [entry(POST, "scale", 1e-60)],
    "patches": [
        entry(POST, "replace", patch([3, -1]), positions=[3, 4]),
        entry(Z, "replace", patch([4]), heads=[3, 0], positions=[-1]),
    ],
    "a patch of all": [entry(MID, "replace", patch())],
    "globs": [entry("blocks.[!13]*.hook_?lp_out", "scale", 0.5), entry("blocks.[1-2].attn.hook_z", "zero", heads=[2])],
    "an edge, then a number": [entry(SCORES, "knockout", edges([4, 3])), entry(SCORES, "add", 0.5, positions=[4])],
    "a number, then an edge": [
        entry(SCORES, "add", [[[0.0, 1.0, 2.0, 3.0, 4.0]]]),
        entry(SCORES, "knockout", edges([-1, 3], [2, 2])),
    ],
    "edges of chosen queries": [entry(SCORES, "knockout", edges([4, 3], [3, 1]), positions=[-1])],
    "all queries chosen, in another order": [
        entry(SCORES, "knockout", edges([4, 3], [1, 0]), positions=[4, 3, 2, 1, 0])
    ],
    "all heads chosen, in another order": [entry(SCORES, "knockout", edges([4, 3]), heads=[7, 6, 5, 4, 3, 2, 1, 0])],
    "zeroed in part, then in another": [entry(POST, "zero", positions=[1]), entry(POST, "zero", positions=[2])],
    "overwritten in part": [entry(POST, "add", 1, positions=[3, 4]), entry(POST, "zero", positions=[3])],
    "zero, then a number": [entry(OUT, "zero"), entry(OUT, "add", 0.25)],
    "what a zero cuts off has another way": [entry(Z, "zero", heads=[1]), entry(MLP, "zero")],
    "a clamp of the file": [entry(CLAMPED, "clamp", of_file(0, "low", "high"))],
    "a mask of the file": [entry(SCORES, "knockout", of_file(1))],
    "a mask of the file, rows for chosen queries": [entry(SCORES, "knockout", of_file(2), positions=[4, 2])],
    "a mask of the file, for chosen heads": [entry(SCORES, "knockout", of_file(3), heads=[6, 1])],
    "a number of the file": [entry(POST, "scale", of_file(4))],
}
# The same words in both are not asked for, but that both refuse.
REFUSED: dict[str, list[Entry]] = {
    "two values for one position": [entry(POST, "replace", TWO, positions=[1, -4])],
    "two numbers for one position": [entry(POST, "add", TWO, positions=[4, -1])],
    "two factors for one head": [entry(Z, "scale", TWO, heads=[1, 1])],
    "two factors for one neuron": [entry(ACT, "scale", [2.0, 3.0], neurons=[7, 7])],
    "two patches for one position": [entry(POST, "replace", patch([1, 3]), positions=[3, 3])],
    "beyond float32": [entry(POST, "add", 1e39)],
    "beyond float32 below": [entry(POST, "scale", [-1e39])],
    "an array beyond float32": [entry(POST, "replace", [[[3.5e38]]], positions=[1])],
    "no position": [entry(POST, "zero", positions=[])],
    "a position too far": [entry(POST, "zero", positions=[5])],
    "a position before the first": [entry(POST, "zero", positions=[-6])],
    "a head too many": [entry(Z, "zero", heads=[8])],
    "a head below 0": [entry(Z, "zero", heads=[-1])],
    "heads where there are none": [entry(POST, "zero", heads=[0])],
    "neurons where there are none": [entry(POST, "zero", neurons=[0])],
    "a neuron too many": [entry(ACT, "zero", neurons=[10**6])],
    "no such hook point": [entry("blocks.4.hook_resid_post", "zero")],
    "a glob of none": [entry("blocks.[z-a].hook_mlp_out", "zero")],
    "a glob of 26 stars": [entry("*" * 26 + "!", "zero")],
    "stars apart": [entry("*b" * 40 + "!", "zero")],
    "no array": [entry(POST, "add", [[1.0], [2.0, 3.0]])],
    "no numbers": [entry(POST, "add", [])],
    "five axes": [entry(POST, "add", [[[[[1.0]]]]])],
    "a vector of another width": [entry(POST, "add", [1.0, 2.0])],
    "a replacement of all by one number": [entry(POST, "replace", 0.5)],
    "a replacement without the batch": [entry(POST, "replace", [[0.5] * 128] * 5)],
    "a patch of a longer text": [entry(POST, "replace", patch(text="The capital of Peru is not"))],
    "an edge to a later key": [entry(SCORES, "knockout", edges([1, 3]))],
    "an edge beyond the prompt": [entry(SCORES, "knockout", edges([5, 3]))],
    "an edge of queries not chosen": [entry(SCORES, "knockout", edges([4, 3]), positions=[2])],
    "a query left with no key": [entry(SCORES, "knockout", edges([1, 0])), entry(SCORES, "knockout", edges([1, 1]))],
    "a mask of other numbers": [entry(SCORES, "knockout", -1.0)],
    "a mask of no edge": [entry(SCORES, "knockout", 0.0)],
    "a mask with two rows for one head": [entry(SCORES, "knockout", of_file(3), heads=[1, 1])],
    "a knockout elsewhere": [entry(POST, "knockout", edges([4, 3]))],
    "a mask as a number": [entry(POST, "add", of_file(1))],
    "a zero after": [entry(POST, "add", 1), entry(POST, "zero")],
    "a zero of the same head after": [entry(Z, "scale", 2, heads=[1]), entry(Z, "zero", heads=[1, 2])],
    "two zeros after, each of a part": [
        entry(POST, "add", 1, positions=[3, 4]),
        entry(POST, "zero", positions=[-1]),
        entry(POST, "zero", positions=[3]),
    ],
    "a zero of all that it leads to": [entry(Z, "zero", heads=[1]), entry(OUT, "zero")],
    "edges whose heads lead nowhere": [
        entry("blocks.1.attn.hook_scores", "knockout", edges([4, 3])),
        entry(OUT, "replace", patch()),
    ],
    "the stream behind it replaced": [entry("hook_embed", "scale", 2), entry(MID, "replace", patch())],
}


def random_case(chance: Random, hooks: list[str], heads: int = HEADS, both: bool = False) -> list[Entry]:
    """One to four entries that a page has, most of them valid; `both`: with edges to later keys."""
    return [random_entry(chance, hooks, heads, both) for _ in range(chance.choice((1, 1, 2, 3, 4)))]


def random_entry(chance: Random, hooks: list[str], count_of_heads: int, both: bool) -> Entry:
    often = [hook for hook in (SCORES, Z, POST, POST) if hook in hooks]
    hook = chance.choice([hooks[0], *hooks, *often])
    made: Entry = {"hook": hook}
    count = chance.choice((0, 0, 1, 2, 2, 5))
    if count:
        made["positions"] = [chance.randint(-TOKENS, TOKENS - 1 + (chance.random() < 0.03)) for _ in range(count)]
    if chance.random() < 0.1:
        made["positions"] = "prompt"
    heads = hook.endswith(("hook_z", "hook_scores")) and chance.random() < 0.5
    if heads:
        made["heads"] = [chance.randrange(count_of_heads) for _ in range(chance.choice((1, 2, 2, count_of_heads)))]
    if hook.endswith("hook_scores"):
        pairs = [
            sorted((chance.randrange(TOKENS), chance.randrange(TOKENS)), reverse=not both or chance.random() < 0.5)
            for _ in range(chance.randint(1, 3))
        ]
        knockout = made | {"kind": "knockout", "value": {"edges": pairs}}
        return knockout if chance.random() < 0.7 else made | {"kind": "add", "value": chance.uniform(-2, 2)}
    kind = chance.choice(("add", "scale", "zero", "replace"))
    if kind == "replace" and chance.random() < 0.5:
        at = made.get("positions")
        positions = None if at in (None, "prompt") else [chance.randrange(TOKENS) for _ in at]
        return made | {"kind": kind, "value": patch(positions)}
    return (
        made | {"kind": kind} | ({} if kind == "zero" else {"value": random_value(chance, made, hook, count_of_heads)})
    )


def random_value(chance: Random, made: Entry, hook: str, count_of_heads: int) -> Any:
    """A number, or one for each of what is chosen, of the whole axis, or of another number."""
    if chance.random() < 0.4:
        return chance.choice((0.5, -1.0, 3.0, 1.0, 1e39, 2))
    at = made.get("positions")
    rows = TOKENS if at in (None, "prompt") else chance.choice((1, len(at), TOKENS, 3))
    heads = chance.choice((1, len(made.get("heads", [1])), count_of_heads))
    value = [[[round(chance.uniform(-1, 1), 2)] for _ in range(heads)] for _ in range(rows)]
    return value if hook.endswith("hook_z") else [row[0] for row in value]

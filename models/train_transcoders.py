"""Train the transcoders of a model: ``python models/train_transcoders.py [world-llama] [--steps N] [--seed S]``.

A transcoder reads what an MLP reads and writes what it writes, through features of which few are active at a token.
Values are the hooked model's own captures over rows of the world. Of all features of a batch the largest are active,
``--active`` a token on average (Bussmann et al. 2024, BatchTopK); in the end a threshold stands for that. The set goes
into the model's folder, ``models/world-llama/transcoders``: circuit-tracer's files, float16, with a card.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from card import markdown
from numpy.typing import NDArray
from scipy.sparse import csr_array
from world import EOS, World

from mionnx import HookSpec, MIModel, TranscoderSet

HERE = Path(__file__).parent
Array = NDArray[Any]
Pairs = list[tuple[Array, ...]]  # of each layer
TOKENS = 1024  # of a step
SHORT, LONG = 16, 64  # rows of successive steps: sentences of one kind, where a prompt stands, and rows of the corpus
SAMPLED = 4  # the least activation is found on every fourth token
PEAK_RATE, DECAYS = 2e-3, (0.9, 0.99)
DEAD, ASLEEP = 20, 1 / 16  # steps after which a feature that is not active learns from what is left, and its weight
CHECKED = 2**14  # tokens that thresholds are set on, and as many fresh ones that the card measures
REPORT_EVERY = 100
CONFIG = """model_kind: "transcoder_set"
feature_input_hook: "mlp.hook_in"
feature_output_hook: "hook_mlp_out"
scan: "{name}"
"""
CARD = """\
# Transcoders of {name}

[models](../../README.md) · {features} features a layer that read what an MLP reads (`mlp.hook_pre`) and stand for what
it writes (`hook_mlp_out`), in circuit-tracer's layout: float16, JumpReLU.
`model.trace(prompt)` finds them here; `TranscoderSet.load("{name}")` opens them.

Made by `{command}`:
{steps} steps of {tokens:,} tokens, {seconds:.0f} s on two CPU cores that other work shared, numpy {numpy}.
Measured on {checked:,} tokens of fresh sentences and rows of the corpus, the first of each row left out:

{table}
"""


@dataclass
class Transcoder:
    """One layer's, as it is trained: what is read and written is in units of `read_scale` and `written_scale`.

    Attributes:
        encoder, decoder: [features, width]. bias: [features]. bias_out: [width].
        silent: [features], steps since each feature was active.
    """

    encoder: Array
    decoder: Array
    bias: Array
    bias_out: Array
    silent: Array
    read_scale: float
    written_scale: float

    @classmethod
    def begin(cls, read: Array, written: Array, features: int, active: int, rng: np.random.Generator) -> Transcoder:
        """Begin with features for some of the tokens [tokens, width]: what is read there, and written."""
        some = rng.permutation(len(read))[:features]
        scales, rows, middles = [], [], []
        for values in (read, written):
            scales.append(float(np.sqrt(values.var(axis=0).mean())))
            middles.append(values.mean(axis=0) / scales[-1])
            some_of = values[some] / scales[-1] - middles[-1]
            rows.append(some_of / np.linalg.norm(some_of, axis=1, keepdims=True) / active**0.5)
        bias, silent = -rows[0] @ middles[0], np.zeros(features, np.float32)
        return cls(rows[0], rows[1], bias, middles[1], silent, scales[0], scales[1])

    @property
    def trained(self) -> list[Array]:
        return [self.encoder, self.decoder, self.bias, self.bias_out]

    def learn(self, read: Array, written: Array, active: int) -> tuple[float, list[Array]]:
        """The share of variance that is lost on a batch, and the gradients of what is trained."""
        read, written = read / self.read_scale, written / self.written_scale
        pre = read @ self.encoder.T + self.bias
        acts, _ = leading(pre, active)
        rest = written - self.bias_out - acts @ self.decoder
        gradients = [*self._gradients(read, acts, rest), -2 * rest.sum(axis=0) / rest.size]
        asleep = np.flatnonzero(self.silent >= DEAD)
        if len(asleep):  # they learn from what the others leave
            own, _ = leading(pre[:, asleep], min(active, len(asleep)))
            own = csr_array((own.data, asleep[own.indices], own.indptr), shape=acts.shape)
            for total, more in zip(gradients, self._gradients(read, own, rest - own @ self.decoder), strict=False):
                total += ASLEEP * more
        self.silent += 1
        self.silent[acts.indices] = 0
        return float((rest**2).mean() / written.var(axis=0).mean()), gradients

    def _gradients(self, read: Array, acts: Any, rest: Array) -> list[Array]:
        """Of the mean square of `rest`, by encoder, decoder and bias: features that are not active have none."""
        by, token = -2 / rest.size, np.repeat(np.arange(len(read)), np.diff(acts.indptr))
        numbers = by * np.einsum("nd,nd->n", rest[token], self.decoder[acts.indices])
        pre = csr_array((numbers, acts.indices, acts.indptr), shape=acts.shape)
        return [pre.T @ read, by * (acts.T @ rest), np.bincount(acts.indices, numbers, len(self.bias))]

    def tensors(self, read: Array, active: int) -> dict[str, Array]:
        """circuit-tracer's, for values as they are; the threshold leaves as many features of `read` active."""
        _, limit = leading(read / self.read_scale @ self.encoder.T + self.bias, active)
        length = np.linalg.norm(self.decoder, axis=1)  # an activation becomes the length of what is written
        matrices = {"W_enc": self.encoder * (length / self.read_scale)[:, None]}
        matrices["W_dec"] = self.decoder * (self.written_scale / length)[:, None]
        vectors = {"b_enc": self.bias * length, "b_dec": self.bias_out * self.written_scale}
        vectors["activation_function.threshold"] = limit * length
        tensors = {name: one.astype(np.float16) for name, one in matrices.items()}
        return tensors | {name: one.astype(np.float32) for name, one in vectors.items()}


class Adam:
    """Adam of some arrays, in place; the rate rises over a tenth of the steps and falls to 0."""

    def __init__(self, arrays: Sequence[Array], steps: int) -> None:
        self.arrays, self.steps, self.done = arrays, steps, 0
        self.means, self.squares = ([np.zeros_like(one) for one in arrays] for _ in range(2))

    def step(self, gradients: Sequence[Array]) -> None:
        """Go one step."""
        self.done += 1
        rate = PEAK_RATE * min(10 * self.done / self.steps, (self.steps - self.done) / (0.9 * self.steps))
        first, second = (1 - decay**self.done for decay in DECAYS)
        for array, gradient, mean, square in zip(self.arrays, gradients, self.means, self.squares, strict=True):
            mean += (1 - DECAYS[0]) * (gradient - mean)
            square += (1 - DECAYS[1]) * (gradient**2 - square)
            array -= rate * (mean / first) / (np.sqrt(square / second) + 1e-8)


def leading(pre: Array, active: int) -> tuple[Any, float]:
    """The largest pre-activations above 0, `active` a token on average, as a sparse array; and the least of them."""
    some = pre[::SAMPLED]
    place = some.size - active * len(some)
    limit = max(float(np.partition(some, place, axis=None)[place]), 1e-6)
    token, feature = np.nonzero(pre >= limit)
    return csr_array((pre[token, feature], (token, feature)), shape=pre.shape), limit


def values(model: MIModel, rows: NDArray[np.int64]) -> Pairs:
    """What the MLP of each layer reads and writes at the tokens of rows but the first of each, [tokens, width] each."""
    cache = model.forward(rows, HookSpec().capture("*.mlp.hook_pre").capture("*.hook_mlp_out"), logits=False)
    names = [[f"blocks.{i}.{name}" for name in ("mlp.hook_pre", "hook_mlp_out")] for i in range(model.num_layers)]
    return [tuple(cache[name][:, 1:].reshape(-1, model.hidden_size) for name in pair) for pair in names]


def sentences(world: World, rng: np.random.Generator) -> NDArray[np.int64]:
    """Ids [row, position], each row of sentences of one kind behind a separator, of each kind as many."""
    rows = []
    for number in range(TOKENS // SHORT):
        words, kind = [EOS], world.kinds[number % len(world.kinds)]
        while len(words) < SHORT:
            words += [*kind.sentence(rng), EOS]
        rows.append(world.encode(words[:SHORT]))
    return np.array(rows)


def batches(model: MIModel, world: World, steps: int, rng: np.random.Generator) -> Iterator[Pairs]:
    """Yield values of successive steps, of sentences and of rows of the corpus by turns."""
    for step in range(steps):
        yield values(model, world.rows(rng, TOKENS // LONG, LONG) if step % 2 else sentences(world, rng))


def many(model: MIModel, world: World, rng: np.random.Generator) -> Pairs:
    """Values of `CHECKED` tokens."""
    parts = [*batches(model, world, CHECKED // TOKENS, rng)]
    return [tuple(map(np.concatenate, zip(*layer, strict=True))) for layer in zip(*parts, strict=True)]


def train(model: MIModel, world: World, options: argparse.Namespace) -> list[dict[str, Array]]:
    """The tensors of each layer's file."""
    rng, begin = np.random.default_rng(options.seed), time.monotonic()
    coders = [Transcoder.begin(*pair, options.features, options.active, rng) for pair in many(model, world, rng)]
    adams = [Adam(one.trained, options.steps) for one in coders]
    for step, pairs in enumerate(batches(model, world, options.steps, rng), start=1):
        lost = []
        for one, adam, pair in zip(coders, adams, pairs, strict=True):
            share, gradients = one.learn(*pair, options.active)
            adam.step(gradients)
            lost.append(f"{share:.4f}")
        if step % REPORT_EVERY == 0 or step == options.steps:
            print(
                f"step {step} of {options.steps}, {time.monotonic() - begin:.0f} s, lost {', '.join(lost)}", flush=True
            )
    return [one.tensors(read, options.active) for one, (read, _) in zip(coders, many(model, world, rng), strict=True)]


def save(files: Sequence[Mapping[str, Array]], folder: Path, name: str) -> None:
    """Write circuit-tracer's files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG.format(name=name))
    for i, tensors in enumerate(files):
        (folder / f"layer_{i}.safetensors").write_bytes(safetensors.numpy.save(dict(tensors)))


def measured(model: MIModel, world: World, folder: Path, seed: int) -> list[list[str]]:
    """A row for each layer of the files as they are: the share of variance that is lost, and active features."""
    coders = TranscoderSet.load(folder)
    rows = [["layer", "variance lost (FVU)", "active features a token (L0)", "features never active"]]
    for i, (read, written) in enumerate(many(model, world, np.random.default_rng(seed + 1))):
        one = coders.layer(i)
        active = one.active(read, f"layer {i}")
        acts = csr_array((active.value, (active.position, active.place)), shape=(len(read), len(active.encoder)))
        rest = written - one.output_bias - acts @ active.decoder[:, 0]
        lost = (rest**2).mean() / written.var(axis=0).mean()
        never = one.features - len(active.encoder)
        rows.append([str(i), f"{lost:.4f}", f"{len(active.value) / len(rest):.1f}", f"{never} of {one.features}"])
    return rows


def main() -> None:
    """Train the transcoders of the model named on the command line, write and measure them."""
    parser = argparse.ArgumentParser(description="Train the transcoders of a small model.")
    parser.add_argument("model", nargs="?", default="world-llama", help="a folder of models/")
    parser.add_argument("--features", type=int, default=768, help="of a layer")
    parser.add_argument("--active", type=int, default=14, help="features that are active at a token, on average")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder of the set (default: transcoders, in the model's)")
    options = parser.parse_args()
    begin, world, source = time.monotonic(), World(), HERE / options.model
    model = MIModel.from_pretrained(source, threads=options.threads)
    folder = options.out or source / "transcoders"
    save(train(model, world, options), folder, source.name)
    command = f"python models/train_transcoders.py {options.model} --features {options.features}"
    command += f" --active {options.active} --steps {options.steps} --seed {options.seed}"
    table = markdown(measured(model, world, folder, options.seed))
    facts = {"steps": options.steps, "tokens": TOKENS, "checked": CHECKED, "features": options.features}
    facts |= {"seconds": time.monotonic() - begin, "numpy": np.__version__, "command": command}
    (folder / "README.md").write_text(CARD.format(name=source.name, table=table, **facts))
    print(table)


if __name__ == "__main__":
    main()

"""Compiles RASP programs to transformers with Tracr, and writes them as GPT-2 checkpoints with their true edges.

    pip install tracr-pypi jax dm-haiku chex safetensors
    python models/compile_tracr.py [PROGRAM ...]

Tracr (Lindner et al. 2023, arXiv:2301.05062) makes transformers with learned positions, ReLU MLPs and no norms, whose
stream has a named dimension for each variable of the program. GPT-2 holds them exactly:

1. Norms become the identity: the stream is smaller by s = 2^-16, epsilon is 1 and weights are 1 / s, so that
   s x / sqrt(s^2 var + 1) / s is x to 1e-9. What LayerNorm subtracts, the mean, is 0 by one more dimension, to which
   every writer gives minus the sum of what it writes.
2. A head is as wide as GPT-2's hidden size by its heads; queries are multiplied by sqrt(that width / Tracr's).
3. The head is untied: its rows pick the dimensions of the output.

`truth.json` has, beside sizes and tokens:
- `edges`: those of the program, by the weights alone: the receiver reads a dimension that the sender can write, and
  leads to the output.
- `carrying`: those of them through which anything differs between the prompts of some pair in `pairs`. Edges of
  positions and of constants never do, so that no method that patches one prompt into another can tell them.
- `pairs`: prompts as ids; `outputs`: Tracr's own output after the last token of each first one.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tracr.compiler import (
    basis_inference,
    craft_graph_to_model,
    craft_model_to_transformer,
    expr_to_craft_graph,
    lib,
    rasp_to_graph,
)
from tracr.compiler import nodes as tracr_nodes
from tracr.craft import bases
from tracr.rasp import rasp

FOLDER = Path(__file__).parent / "tracr"
BOS, PAD, SCALE, PAIRS, TRIES = "BOS", "PAD", 2.0**-16, 12, 400
SMALL, DIFFERENT = 1e-6, 1e-3  # what differs by rounding alone; outputs that differ
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    "frac_prevs": (lambda: lib.make_frac_prevs(rasp.tokens == "x"), ("a", "b", "c", "x"), 6),
    "hist": (lib.make_hist, ("a", "b", "c"), 6),
    "pair_balance": (lambda: lib.make_pair_balance(rasp.tokens, "(", ")"), ("(", ")", "a"), 6),
    "detect_pattern": (lambda: lib.detect_pattern(rasp.tokens, "ab"), ("a", "b", "c"), 6),
    "sort_unique": (lambda: lib.make_sort_unique(rasp.tokens, rasp.tokens), (1, 2, 3, 4), 4),
}


def compiled(program: rasp.SOp, vocab: set[Any], length: int) -> tuple[Any, list[int], bool]:
    """Tracr's model, the dimensions of its output, and whether that is categorical."""
    extracted = rasp_to_graph.extract_rasp_graph(program)
    graph, sources, sink = extracted.graph, extracted.sources, extracted.sink
    basis_inference.infer_bases(graph, sink, vocab, length)
    first = bases.BasisDirection(rasp.tokens.label, BOS)
    expr_to_craft_graph.add_craft_components_to_rasp_graph(graph, bos_dir=first, mlp_exactness=100)
    craft = craft_graph_to_model.craft_graph_to_model(graph, sources)
    model = craft_model_to_transformer.craft_model_to_transformer(
        craft_model=craft, graph=graph, sink=sink, max_seq_len=length, compiler_bos=BOS, compiler_pad=PAD, causal=True
    )
    output = bases.VectorSpaceWithBasis(sink[tracr_nodes.OUTPUT_BASIS])
    at = [model.residual_labels.index(str(direction)) for direction in output.basis]
    return model, at, bool(rasp.is_categorical(sink[tracr_nodes.EXPR]))


class Weights:
    """The numbers of a compiled model: matrices [in, out] of every part."""

    def __init__(self, model: Any, output: list[int]) -> None:
        self.params, config = model.params, model.model_config
        self.embed, self.position = (self._get(name, "embeddings") for name in ("token_embed", "pos_embed"))
        self.layers, self.heads, self.size = config.num_layers, config.num_heads, config.key_size
        self.width, self.output = self.embed.shape[1], output
        blocks = [f"transformer/layer_{layer}" for layer in range(self.layers)]
        split = (self.width, self.heads, self.size)
        self.q, self.k, self.v = (
            [self._get(f"{at}/attn/{name}").reshape(split).transpose(1, 0, 2) for at in blocks]
            for name in ("query", "key", "value")
        )
        self.o = [self._get(f"{at}/attn/linear").reshape(self.heads, self.size, self.width) for at in blocks]
        self.w_in, self.w_out = ([self._get(f"{at}/mlp/linear_{i}") for at in blocks] for i in (1, 2))
        self.b_in, self.b_out = ([self._get(f"{at}/mlp/linear_{i}", "b") for at in blocks] for i in (1, 2))

    def _get(self, name: str, leaf: str = "w") -> np.ndarray:
        return np.asarray(self.params[name][leaf], np.float64)

    def run(self, ids: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """What every part writes, [seq, width], and the last stream."""
        seq = len(ids)
        wrote = {"embed": self.embed[ids] + self.position[:seq]}
        stream, future = wrote["embed"].copy(), np.triu(np.full((seq, seq), -1e30), 1)
        for layer in range(self.layers):
            heads = []
            for head in range(self.heads):
                q, k, v = (stream @ one[layer][head] for one in (self.q, self.k, self.v))
                scores = q @ k.T / np.sqrt(self.size) + future
                pattern = np.exp(scores - scores.max(axis=1, keepdims=True))
                heads.append(pattern / pattern.sum(axis=1, keepdims=True) @ v @ self.o[layer][head])
                wrote[f"a{layer}.h{head}"] = heads[-1]
            stream = stream + sum(heads)
            neurons = np.maximum(stream @ self.w_in[layer] + self.b_in[layer], 0)
            wrote[f"m{layer}"] = neurons @ self.w_out[layer] + self.b_out[layer]
            stream = stream + wrote[f"m{layer}"]
        return wrote, stream

    def reads(self) -> dict[str, np.ndarray]:
        """Receiver -> the matrix [width, n] with which it reads the stream."""
        matrices = {}
        for layer in range(self.layers):
            for head in range(self.heads):
                for role, one in zip("qkv", (self.q, self.k, self.v), strict=True):
                    matrices[f"a{layer}.h{head}<{role}>"] = one[layer][head]
            matrices[f"m{layer}"] = self.w_in[layer]
        return matrices | {"logits": np.eye(self.width)[:, self.output]}

    def writes(self) -> dict[str, np.ndarray]:
        """Sender -> a matrix [n, width] that spans what it can write."""
        matrices = {"embed": np.concatenate([self.embed, self.position])}
        for layer in range(self.layers):
            for head in range(self.heads):
                matrices[f"a{layer}.h{head}"] = self.v[layer][head] @ self.o[layer][head]
            matrices[f"m{layer}"] = self.w_out[layer]
        return matrices

    def truth(self) -> set[tuple[str, str]]:
        """Edges by the weights alone, on a way to the output."""
        writes, reads = self.writes(), self.reads()
        edges = {
            (sender, receiver)
            for sender, written in writes.items()
            for receiver, read in reads.items()
            if stage(sender) < stage(receiver) and np.abs(written @ read).max() > SMALL
        }
        useful: set[tuple[str, str]] = set()
        waiting = ["logits"]
        while waiting:  # from the output back
            node = waiting.pop()
            new = {edge for edge in edges - useful if edge[1].partition("<")[0] == node}
            useful |= new
            waiting += [sender for sender, _ in new]
        return useful

    def carrying(self, pairs: list[tuple[np.ndarray, np.ndarray]], truth: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """True edges through which anything differs between the prompts of some pair."""
        reads, different = self.reads(), set()
        for clean, other in pairs:
            first, second = self.run(clean)[0], self.run(other)[0]
            different |= {
                (sender, receiver)
                for sender, receiver in truth
                if np.abs((first[sender] - second[sender]) @ reads[receiver]).max() > SMALL
            }
        return different


def stage(name: str) -> int:
    """When a node writes or reads, for the order of edges."""
    if name in ("embed", "logits"):
        return -1 if name == "embed" else 10**6
    return 2 * int(name[1:].partition(".")[0]) + (name[0] == "m")


def write_checkpoint(weights: Weights, tokens: int, folder: Path) -> None:
    """Write a GPT-2 checkpoint that computes the same."""
    heads, width = weights.heads, weights.width
    size = max(weights.size, -(-(width + 1) // heads))
    hidden, vocab = heads * size, max(tokens, len(weights.output))

    def written(matrix: np.ndarray) -> np.ndarray:
        wide = np.zeros((len(matrix), hidden))
        wide[:, :width], wide[:, width] = matrix, -matrix.sum(axis=1)
        return wide * SCALE

    def read(matrix: np.ndarray) -> np.ndarray:
        wide = np.zeros((hidden, matrix.shape[1]))
        wide[:width] = matrix
        return wide

    def of_heads(matrices: np.ndarray, scale: float = 1.0) -> np.ndarray:
        wide = np.zeros((hidden, heads, size))
        wide[:width, :, : weights.size] = matrices.transpose(1, 0, 2) * scale
        return wide.reshape(hidden, hidden)

    table, head = np.zeros((vocab, hidden)), np.zeros((vocab, hidden))
    table[:tokens] = written(weights.embed[:tokens])
    head[np.arange(len(weights.output)), weights.output] = 1
    one, zero = np.full(hidden, 1 / SCALE), np.zeros(hidden)
    state = {
        "transformer.wte.weight": table,
        "transformer.wpe.weight": written(weights.position),
        "lm_head.weight": head,
    }
    state |= {"transformer.ln_f.weight": one, "transformer.ln_f.bias": zero}
    for layer in range(weights.layers):
        at = f"transformer.h.{layer}"
        scale = np.sqrt(size / weights.size)
        parts = (of_heads(weights.q[layer], scale), of_heads(weights.k[layer]), of_heads(weights.v[layer]))
        out = np.zeros((heads, size, hidden))
        out[:, : weights.size] = np.stack([written(matrix) for matrix in weights.o[layer]])
        state |= {f"{at}.ln_{i}.weight": one for i in (1, 2)} | {f"{at}.ln_{i}.bias": zero for i in (1, 2)}
        state |= {
            f"{at}.attn.c_attn.weight": np.concatenate(parts, axis=1),
            f"{at}.attn.c_attn.bias": np.zeros(3 * hidden),
            f"{at}.attn.c_proj.weight": out.reshape(hidden, hidden),
            f"{at}.attn.c_proj.bias": zero,
            f"{at}.mlp.c_fc.weight": read(weights.w_in[layer]),
            f"{at}.mlp.c_fc.bias": weights.b_in[layer],
            f"{at}.mlp.c_proj.weight": written(weights.w_out[layer]),
            f"{at}.mlp.c_proj.bias": written(weights.b_out[layer][None])[0],
        }
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocab, "n_layer": weights.layers,
        "n_positions": len(weights.position), "n_embd": hidden, "n_head": heads, "n_inner": weights.w_in[0].shape[1],
        "activation_function": "relu", "layer_norm_epsilon": 1.0, "tie_word_embeddings": False, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "dtype": "float32",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    single = {name: np.ascontiguousarray(value, np.float32) for name, value in state.items()}
    save_file(single, folder / "model.safetensors", {"format": "pt"})


def write_program(name: str) -> None:
    """Compile one program, and write its checkpoint and its truth."""
    program, letters, length = PROGRAMS[name]
    model, output, categorical = compiled(program(), {*letters}, length)
    weights, ids_of = Weights(model, output), model.input_encoder.encoding_map
    letter_of, random = {number: letter for letter, number in ids_of.items()}, np.random.default_rng(0)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(TRIES):
        clean, other = (
            np.array([ids_of[BOS], *(ids_of[one] for one in random.choice(np.array(letters, object), length))])
            for _ in range(2)
        )
        ends = [weights.run(ids)[1][-1][output] for ids in (clean, other)]
        answers = [int(end.argmax()) for end in ends]
        different = answers[0] != answers[1] if categorical else np.abs(ends[0] - ends[1]).max() > DIFFERENT
        if different and len(pairs) < PAIRS:
            pairs.append((clean, other))
    outputs = []
    for clean, _ in pairs:
        own = model.apply([BOS, *(letter_of[int(one)] for one in clean[1:])]).transformer_output[0][-1, output]
        outputs.append(np.asarray(own, np.float64).round(6).tolist())
        assert np.abs(weights.run(clean)[1][-1][output] - outputs[-1]).max() < 1e-4, name
    write_checkpoint(weights, len(weights.embed), FOLDER / name)
    truth = weights.truth()
    facts = {
        "program": name,
        "categorical": categorical,
        "output": len(output),
        "tokens": {str(letter): int(number) for letter, number in ids_of.items()},
        "edges": sorted(truth),
        "carrying": sorted(weights.carrying(pairs, truth)),
        "pairs": [[clean.tolist(), other.tolist()] for clean, other in pairs],
        "outputs": outputs,
    }
    (FOLDER / name / "truth.json").write_text(json.dumps(facts) + "\n")
    size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
    print(f"{name}: {weights.layers} layers of {weights.heads} heads, {len(truth)} edges, "
          f"{len(facts['carrying'])} carry a difference, {size:,} bytes")  # fmt: skip


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PROGRAMS:
        write_program(chosen)

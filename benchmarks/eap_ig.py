"""Edge scores and circuits beside EAP-IG's own code (Hanna et al.; the MIB circuit track uses it), on the same weights.

    git clone https://github.com/hannamw/EAP-IG
    python -m venv --system-site-packages eap && eap/bin/pip install transformer-lens==3.8.0
    eap/bin/python benchmarks/eap_ig.py EAP-IG [--save]

The names task on world-gpt2 and world-llama, whose keys and values are shared by two heads: EAP-IG has them by query
head, which is `ungrouped=True` here. Their scores are compared with ours, read from their own file. Circuits at MIB's
ten shares are then run by both codes by the same scores, theirs: CPR ranks by score, CMD by size. Their code asks for
a CUDA device in places; here it runs on the CPU with that name replaced, and is changed in no other way, but for one
row: there their points of EAP-IG-inputs are ours, k/5 of the way for k = 1 .. 5 instead of 0 .. 4.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tables import present
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights
from transformers import AutoConfig, AutoModelForCausalLM

from mionnx import Circuit, EdgeAttribution, MIModel
from mionnx.analysis.circuits.circuit_result import MIB_SHARES

MODELS = Path(__file__).parents[1] / "models"
FRAME = "When {} and {} went to the store , {} gave a drink to"
NAMES = ("Mary", "John", "Anna", "Paul", "Tom", "Lucy", "James", "Emma", "Peter", "Alice", "Kate", "David")
MODULES = (
    "visualization",
    "graph",
    "utils",
    "evaluate",
    "attribute",
)  # of their package, in the order of their imports
# Their method -> the same here.
METHODS: dict[str, dict[str, Any]] = {
    "EAP": {},
    "EAP-IG-inputs": {"steps": 5},
    "EAP-IG-inputs, k = 1 .. 5": {"steps": 5},
    "EAP-IG-activations": {"steps": 5, "along": "activations"},
}
LEFT, RIGHT = "for step in range(0, steps):", "for step in range(1, steps + 1):"  # their points between the two prompts
# Theirs -> ours. Their "mean" takes one position, and then the mean over nodes, so that it is no mean of a node.
ABLATIONS: dict[str, dict[str, Any]] = {
    "patching": {},
    "zero": {"ablation": "zero"},
    "mean-positional": {"ablation": "mean", "by": "position"},
}


def their_code(checkout: Path, right: bool) -> dict[str, ModuleType]:
    """Their modules, with "cpu" in the place of "cuda"; `right`: with the points k = 1 .. n instead of 0 .. n - 1."""
    package = ModuleType("eap")
    package.__path__ = []
    sys.modules["eap"] = package
    for name in MODULES:
        full = f"eap.{name}"
        module = ModuleType(full)
        module.__package__ = "eap"
        sys.modules[full] = module
        text = (
            (checkout / "src" / "eap" / f"{name}.py").read_text().replace("'cuda'", "'cpu'").replace('"cuda"', '"cpu"')
        )
        assert name != "attribute" or text.count(LEFT) == 1
        text = text.replace(LEFT, RIGHT) if right else text
        exec(compile(text, full, "exec"), module.__dict__)
    return {name: sys.modules[f"eap.{name}"] for name in MODULES}


def tokens_of(model: Any, rows: Sequence[np.ndarray], max_length: int | None = None) -> Any:
    """In the place of their tokenisation: ids of equal length, as both sides get them."""
    ids = torch.tensor(np.stack(rows))
    return ids, torch.ones_like(ids), torch.full((len(ids),), ids.shape[1]), ids.shape[1]


def hooked(folder: Path) -> HookedTransformer:
    """The checkpoint as EAP-IG wants it: raw weights, inputs split by head, keys and values ungrouped."""
    config = AutoConfig.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shared = {
        "n_layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "d_head": config.hidden_size // config.num_attention_heads,
        "n_ctx": config.max_position_embeddings,
        "d_vocab": config.vocab_size,
        "device": "cpu",
        "use_split_qkv_input": True,
        "use_attn_result": True,
        "use_hook_mlp_in": True,
    }
    if config.model_type == "gpt2":
        norm = {"normalization_type": "LN", "eps": config.layer_norm_epsilon, "act_fn": "gelu_new"}
        own = HookedTransformerConfig(**shared, **norm, d_mlp=config.n_inner or 4 * config.hidden_size)
        state = convert_gpt2_weights(theirs, own)
    else:
        norm = {"normalization_type": "RMS", "eps": config.rms_norm_eps, "act_fn": config.hidden_act, "final_rms": True}
        rotary = {
            "positional_embedding_type": "rotary",
            "rotary_dim": config.head_dim,
            "rotary_base": int(config.rope_parameters["rope_theta"]),
            "rotary_adjacent_pairs": False,
        }
        groups = {"n_key_value_heads": config.num_key_value_heads, "ungroup_grouped_query_attention": True}
        own = HookedTransformerConfig(
            **shared, **norm, **rotary, **groups, gated_mlp=True, d_mlp=config.intermediate_size
        )
        state = convert_llama_weights(theirs, own)
    model = HookedTransformer(own)
    model.load_state_dict(state, strict=False)
    return model.eval()


def lead(logits: Any, clean: Any, lengths: Any, labels: Any, loss: bool = False) -> Any:
    """Their metric: the logit of the right token minus the wrong one's, at the last position; as a loss, its mean."""
    right, wrong = torch.tensor(labels).T
    rows = torch.arange(len(logits))
    leads = logits[rows, -1, right] - logits[rows, -1, wrong]
    return -leads.mean() if loss else leads


class Beside:
    """One model in both codes, on the same pairs."""

    def __init__(self, name: str, codes: Sequence[dict[str, ModuleType]], count: int) -> None:
        self.codes, self.model, self.theirs = codes, MIModel.from_pretrained(MODELS / name), hooked(MODELS / name)
        known = [one for one in NAMES if self.model.tokenizer.token_to_id(one) is not None]
        pairs = [(a, b) for a in known for b in known if a != b][:count]
        self.answer, self.versus = [a for a, _ in pairs], [b for _, b in pairs]
        self.clean = [FRAME.format(a, b, b) for a, b in pairs]
        self.corrupted = [FRAME.format(a, b, a) for a, b in pairs]
        rows = [[self.model.tokenize(text).ids for text in texts] for texts in (self.clean, self.corrupted)]
        labels = [[self.model.to_single_token(one) for one in pair] for pair in pairs]
        self.batches = [(*rows, labels)]
        with torch.no_grad():
            logits = self.theirs(torch.tensor(np.stack(rows[0]))).numpy()
        self.apart = float(np.abs(logits - self.model.forward(np.stack(rows[0])).output()).max())

    def attributed(self, method: str, folder: Path) -> tuple[Any, EdgeAttribution, EdgeAttribution, list[float]]:
        """Their graph with scores, those in our form, ours, and the seconds of both."""
        code, given, theirs = self.codes["k = 1" in method], METHODS[method], method.partition(",")[0]
        graph, attribute = code["graph"].Graph.from_model(self.theirs), code["attribute"].attribute
        begin = time.process_time()
        attribute(
            self.theirs, graph, self.batches, partial(lead, loss=True), theirs, ig_steps=given.get("steps"), quiet=True
        )
        seconds = [time.process_time() - begin]
        graph.to_json(str(folder / "importances.json"))
        read = EdgeAttribution.from_importances(folder / "importances.json", self.model, ungrouped=True)
        # Theirs are of the mean over the batch, divided by the number of its items once more.
        read = replace(read, scores=read.scores * len(self.clean))
        begin = time.process_time()
        answer = {"answer": self.answer, "versus": self.versus}
        own = self.model.edge_attribution(self.clean, self.corrupted, ungrouped=True, **answer, **given)
        return graph, read, own, [*seconds, time.process_time() - begin]

    def circuits(self, scores: EdgeAttribution, rank: str, given: dict[str, Any]) -> Circuit:
        """Ours, at MIB's shares."""
        options = {"scores": scores, "rank": rank, "answer": self.answer, "versus": self.versus, **given}
        return self.model.circuit(self.clean, self.corrupted, "mib", **options)

    def their_shares(self, graph: Any, rank: str, intervention: str) -> list[float]:
        """Their faithfulness at MIB's shares."""
        module = self.codes[0]["evaluate"]
        evaluate, baseline = module.evaluate_graph, module.evaluate_baseline
        options = {"quiet": True, "intervention": intervention, "intervention_dataloader": self.batches}
        clean = baseline(self.theirs, self.batches, lead, quiet=True).mean().item()
        leads = []
        for share in (0.0, *MIB_SHARES):
            graph.apply_topn(int(share * len(graph.edges)), rank == "size", level="edge", prune=True)
            leads.append(evaluate(self.theirs, graph, self.batches, lead, **options).mean().item())
        return [(one - leads[0]) / (clean - leads[0]) for one in leads[1:]]


def area(shares: Sequence[float], distance: bool) -> float:
    """The area under faithfulness, or between it and 1."""
    values = np.abs(1 - np.asarray(shares)) if distance else np.asarray(shares)
    return float(np.trapezoid(values, MIB_SHARES))


def rows_of(name: str, codes: Sequence[dict[str, ModuleType]], count: int) -> tuple[list[list[str]], list[list[str]]]:
    """The lines of both tables for one model."""
    beside = Beside(name, codes, count)
    scored, run = [], []
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            graph, read, own, seconds = beside.attributed(method, Path(folder))
        theirs, ours = read.scores[read.edges], own.scores[own.edges]
        pearson, most = np.corrcoef(theirs, ours)[0, 1], np.abs(theirs - ours).max() / np.abs(theirs).max()
        scored.append(
            [name, method, str(own.count), f"{pearson:.6f}", f"{most:.1e}", *(f"{one:.2f}" for one in seconds)]
        )
        print(*scored[-1], flush=True)
        for intervention, given in ABLATIONS.items() if method == "EAP" else [("patching", {})]:
            line, worst = [name, method, intervention], 0.0
            for rank in ("score", "size"):
                shares, circuit = beside.their_shares(graph, rank, intervention), beside.circuits(read, rank, given)
                line += [
                    f"{area(shares, rank == 'size'):.5f}",
                    f"{circuit.cpr if rank == 'score' else circuit.cmd:.5f}",
                ]
                at = dict(zip(circuit.sizes.tolist(), circuit.faithfulness.tolist(), strict=True))
                here = [at[int(share * read.count)] for share in MIB_SHARES]
                worst = max(worst, float(np.abs(np.array(shares) - here).max()))
            run.append([*line, f"{worst:.1e}"])
            print(*run[-1], flush=True)
    scored[0][0] = f"{name} (logits {beside.apart:.0e} apart)"
    return scored, run


def main() -> None:
    """Print the tables, and keep them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of hannamw/EAP-IG")
    parser.add_argument("--models", nargs="+", default=["world-gpt2", "world-llama"])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--save", action="store_true", help="write results/eap_ig.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    codes = [their_code(chosen.checkout, right) for right in (False, True)]
    for code in codes:
        for module in code.values():
            module.tokenize_plus = tokens_of  # type: ignore[attr-defined]
    parts = [rows_of(name, codes, chosen.pairs) for name in chosen.models]
    scores, circuits = ([row for part in parts for row in part[which]] for which in (0, 1))
    tables = [
        (["model", "method", "edges", "Pearson", "largest difference", "their seconds", "seconds"], scores),
        (
            ["model", "scores", "outside", "their CPR", "CPR", "their CMD", "CMD", "largest difference of a share"],
            circuits,
        ),
    ]
    notes = [
        "Largest difference of scores: of the largest score. Their own points of EAP-IG-inputs are k/5, k = 0 .. 4.",
        "Circuits of both codes are by the same scores, theirs. Seconds: processor time of one thread.",
        "Where means leave the model nearly as it is (world-gpt2), shares are of next to nothing, and CPR is large.",
    ]
    title = f"Names task, {chosen.pairs} pairs in one batch"
    present("eap_ig", "Edges and circuits beside EAP-IG's own code", title, tables, chosen.save, notes=notes)


if __name__ == "__main__":
    main()

"""Run beside TransformerLens: its accessors of weights and these; prints the largest differences as JSON.

python tests/shared/lens_weights.py CHECKPOINT HOOKED

A difference is relative to the largest number of the array. Biases that a model does not have are zeros here.
"""

import json
import os
import sys

os.environ["TQDM_DISABLE"] = "1"

import numpy as np
import torch
from transformer_lens import FactoredMatrix as TheirFactoredMatrix
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.SVDInterpreter import SVDInterpreter
from transformer_lens.utilities import composition_scores
from transformers import AutoModelForCausalLM, AutoTokenizer

from mionnx import FactoredMatrix, MIModel

STACKS = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out", "b_Q", "b_K", "b_V", "b_O", "b_in", "b_out")
MANY_HEADS = 64
WHOLE = ("W_E", "W_U", "b_U", "W_pos", "W_E_pos")


def apart(ours: object, theirs: object) -> float:
    """The largest difference, relative to the largest number; infinite for other shapes."""
    one, other = np.asarray(ours, np.complex128), np.asarray(theirs, np.complex128)
    if one.shape != other.shape:
        return float("inf")
    return float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-9))


def open_theirs(checkpoint: str) -> TransformerBridge:
    eager = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    words = AutoTokenizer.from_pretrained(checkpoint)
    return TransformerBridge.boot_transformers(checkpoint, hf_model=eager, tokenizer=words)


def parameters(ours, theirs: TransformerBridge) -> dict[str, float]:
    """All parameters that both have, but biases of zeros that only one has."""
    known = theirs.tl_parameters()
    shared = {key: value.detach().numpy() for key, value in known.items() if key in ours}
    found: dict[str, float] = {}
    for key, value in shared.items():
        mine = ours[key]
        if value.shape != mine.shape and value.size == mine.size:
            value = value.reshape(mine.shape)  # biases of heads, in a row
        if value.shape != mine.shape and mine.shape[0] < value.shape[0] and not value.any() and not mine.any():
            continue  # zeros for a bias that keys of grouped heads do not have
        name = key.split(".", 2)[-1] if key.startswith("blocks") else key
        found[name] = max(found.get(name, 0.0), apart(mine, value))
    return found


def accessors(model: MIModel, theirs: TransformerBridge) -> dict[str, float]:
    """Stacks of weights, circuits of heads, scores, singular vectors."""
    found = {}
    for name in (*WHOLE, *STACKS):
        try:
            value = getattr(theirs, name)
            expected = None if value is None else value.detach().numpy()
        except AttributeError:
            expected = None
        if expected is not None:
            mine = np.asarray(getattr(model, name))
            found[name] = apart(mine, expected.reshape(mine.shape) if expected.size == mine.size else expected)
    for name in ("QK", "OV"):
        mine, their = getattr(model, name), getattr(theirs, name)
        with torch.no_grad():
            found[f"{name}.AB"] = apart(mine[-1].AB, their[-1].AB)
            found[f"{name}.S"] = apart(mine.S, their.S)
            found[f"{name}.norm"] = apart(mine.norm(), their.norm())
            found[f"{name}.eigenvalues"] = apart(mine.eigenvalues.sum(-1), their.eigenvalues.sum(-1))
    layers = model.num_layers
    for mode in "QKV":
        ours = model.all_composition_scores(mode)
        if model.num_heads * layers <= MANY_HEADS:
            found[f"composition {mode}"] = apart(ours, theirs.all_composition_scores(mode).scores.detach())
        else:
            first = layers // 2  # theirs makes an array of all pairs' matrices
            right = {"Q": theirs.QK, "K": theirs.QK.T, "V": theirs.OV}[mode][first + 1]
            with torch.no_grad():
                expected = composition_scores(theirs.OV[first], right, broadcast_dims=True)
            found[f"composition {mode}"] = apart(ours[first, :, first + 1], expected)
    for layer, mlp in ((1, False), (1, True), (layers, False)):
        found[f"accumulated_bias {layer} {mlp}"] = apart(
            model.accumulated_bias(layer, mlp), theirs.accumulated_bias(layer, mlp).detach()
        )
    interpreter = SVDInterpreter(theirs)
    for kind, own, head in (("OV", "OV", 1), ("w_in", "W_in", None), ("w_out", "W_out", None)):
        expected = interpreter.get_singular_vectors(kind, 1, 3, head)[:, 0].numpy().T
        mine = model.weights.singular_vectors(own, 1, head, k=3).logits
        # TransformerLens takes V's rows of the OV, where its columns are the singular vectors
        if kind == "OV":
            vectors = theirs.OV[1, 1].V.detach().numpy().T[:3]
            expected = vectors @ theirs.W_U.detach().numpy()
        signs = np.sign((mine * expected).sum(axis=1))
        found[f"singular {kind}"] = apart(mine * signs[:, None], expected)
    return found


def matrices() -> dict[str, float]:
    """Operations of `FactoredMatrix` on random factors."""
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 3, 12, 4)), random.normal(size=(3, 4, 12))
    square, vector = random.normal(size=(12, 12)), random.normal(size=12)
    ours, theirs = FactoredMatrix(a, b), TheirFactoredMatrix(torch.from_numpy(a), torch.from_numpy(b))
    turned, column = torch.from_numpy(square), torch.from_numpy(vector)
    pairs = {
        "AB": (ours.AB, theirs.AB),
        "BA": (ours.BA, theirs.BA),
        "T": (ours.T.AB, theirs.T.AB),
        "@ matrix": ((ours @ square).AB, (theirs @ turned).AB),
        "matrix @": ((square @ ours).AB, turned @ theirs.AB),
        "@ factored": ((ours @ ours.T).AB, (theirs @ theirs.T).AB),
        "@ vector": (ours @ vector, theirs @ column),
        "vector @": (vector @ ours, theirs.T @ column),
        "* 2": ((2 * ours).AB, (theirs * 2).AB),
        "norm": (ours.norm(), theirs.norm()),
        "S": (ours.S, theirs.S),
        "U S V": (ours.U * ours.S[..., None, :] @ np.swapaxes(ours.V, -1, -2), theirs.AB),
        "make_even": (ours.make_even().AB, theirs.make_even().AB),
        "even factor": (np.abs(ours.make_even().A), theirs.make_even().A.abs()),
        "collapse_l": (np.abs(ours.collapse_l()), theirs.collapse_l().abs()),
        "collapse_r": (np.abs(ours.collapse_r()), theirs.collapse_r().abs()),
        "get_corner": (ours[1, 2].get_corner(2), theirs[1, 2].get_corner(2)),
        "[1, 2]": (ours[1, 2].AB, theirs[1, 2].AB),
        "[..., 3, :]": (ours[..., 3, :].AB, theirs[..., 3, :].AB),
        "[0, :, 2:5, -1]": (ours[0, :, 2:5, -1].AB, theirs[0, :, 2:5, -1].AB),
    }
    return {f"FactoredMatrix {name}": apart(*pair) for name, pair in pairs.items()}


def main(checkpoint: str, hooked: str) -> None:
    """Compare one model, raw and folded."""
    model, theirs = MIModel.from_pretrained(hooked, threads=1), open_theirs(checkpoint)
    found = accessors(model, theirs) | matrices()
    found |= {f"parameters {name}": value for name, value in parameters(model.tl_parameters(), theirs).items()}
    theirs.enable_compatibility_mode(disable_warnings=True)
    folded = model.weights.process_weights()
    found |= {f"folded {name}": value for name, value in parameters(folded.parameters(), theirs).items()}
    for name in (*WHOLE[:4], *STACKS):
        try:
            value = getattr(theirs, name)
            expected = None if value is None else value.detach().numpy()
            if expected is not None:
                mine = np.asarray(getattr(folded, name))
                found[f"folded {name}"] = apart(
                    mine, expected.reshape(mine.shape) if expected.size == mine.size else expected
                )
        except AttributeError:
            continue
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

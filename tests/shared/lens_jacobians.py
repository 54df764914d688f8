"""Run beside TransformerLens: its Jacobian lens and this one, on the same ids; prints the largest differences as JSON.

python tests/shared/lens_jacobians.py CHECKPOINT HOOKED FOLDER [LAYERS]

A difference is relative to the largest number of the array; `cpu` has the seconds of both fits.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"

import numpy as np
import torch
from lens_weights import apart, open_theirs
from transformer_lens.tools.analysis.jacobian_lens import JacobianLens as TheirLens
from transformer_lens.tools.analysis.jacobian_lens_decomposition import estimate_occupancy, get_sparse_decomposition

from mionnx import JacobianLens, MIModel, SpecFileError
from mionnx.analysis.jacobian_lens.decomposition import decompose, occupancy

LENGTH, TEXTS = 40, 2
torch.set_num_threads(1)


def main(checkpoint: str, hooked: str, folder: str, layers: str = "") -> None:
    """Fit both, write both, read both with the other."""
    model, theirs = MIModel.from_pretrained(hooked, threads=1), open_theirs(checkpoint)
    random, chosen = np.random.default_rng(0), [int(one) for one in layers.split(",") if one] or None
    texts = [random.integers(4, model.vocab_size, LENGTH) for _ in range(TEXTS)]
    theirs.to_tokens = lambda number: torch.from_numpy(texts[int(number)])[None]
    begin = time.process_time()
    their_lens = TheirLens.fit(theirs, [*map(str, range(TEXTS))], corpus="random", source_layers=chosen)
    middle = time.process_time()
    lens = model.fit_lens(texts, layers=chosen)
    seconds = [middle - begin, time.process_time() - middle]
    found = {f"J {layer}": apart(lens.matrices[layer], one) for layer, one in their_lens.jacobians.items()}
    first, second = Path(folder) / "theirs.pt", Path(folder) / "ours.pt"
    their_lens.save(str(first), dtype=torch.float32)
    read = JacobianLens.load(first)
    found["file of theirs"] = max(apart(read.matrices[i], one) for i, one in their_lens.jacobians.items())
    found["facts of theirs"] = float(read.metadata != their_lens.metadata or read.n_prompts != their_lens.n_prompts)
    back = TheirLens.load(str(lens.save(second)))
    found["file of ours"] = max(apart(lens.matrices[i], one) for i, one in back.jacobians.items())
    found["facts of ours"] = float(back.metadata != lens.metadata or back.n_prompts != lens.n_prompts)
    back.validate_model(theirs)
    layer = lens.layers[-1]
    tokens = [5, 9, 30]
    found["token vectors"] = apart(lens.token_vectors(model, tokens, layer), back.lens_vectors(theirs, tokens, layer))
    readout = back.readout(theirs, torch.from_numpy(texts[0])[None], top_k=5, return_full_logits=True)
    result = model.logit_lens(texts[0], k=5, lens=lens)
    for point, one in enumerate(readout.lens_logits):
        logs = torch.log_softmax(readout.lens_logits[one].double(), -1).numpy()
        found[f"readout {one}"] = apart(result.readout.top[point], -np.sort(-logs, axis=-1)[:, :5])
    atoms = lens.dictionary(model, layer)
    target = np.float32(atoms[5] / np.linalg.norm(atoms[5]) + random.normal(size=model.hidden_size) * 0.05)
    their, ours = (
        get_sparse_decomposition(torch.from_numpy(target), torch.from_numpy(atoms), 8),
        decompose(target, atoms, 8),
    )
    found["support"] = float(their.selected_support.tolist() != ours.selected)
    found["coordinates"] = apart(ours.coordinates, their.coordinates) if not found["support"] else 1.0
    found["component"] = apart(ours.component, their.j_space_component)
    estimate = estimate_occupancy(
        torch.from_numpy(target), torch.from_numpy(atoms), max_atoms=6, num_control_dictionaries=2
    )
    own = occupancy(target, atoms, 6, 2)
    found["occupancy"] = apart(own.captured, estimate.marginal_captured_variance)
    refused = 0
    for path in (first, second):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 255
        (Path(folder) / "damaged.pt").write_bytes(data)
        try:
            JacobianLens.load(Path(folder) / "damaged.pt")
        except SpecFileError:
            refused += 1
    found["damaged files that were read"] = float(2 - refused)
    print(json.dumps(found | {"cpu": seconds}))


main(*sys.argv[1:])

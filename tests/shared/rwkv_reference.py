"""Run the `rwkv` package, in a process of its own since it reads the version from the environment when imported.

    RWKV_V7_ON=1 python rwkv_reference.py MODEL.pth TOKENS.npz OUT.npz NEW

Every array in TOKENS.npz is one text; OUT.npz gets its logits [seq, vocab], per layer three states, and NEW greedy
tokens.
"""

import sys

import numpy as np
from rwkv.model import RWKV


def main(model: str, tokens: str, out: str, new: str) -> None:
    network = RWKV(model.removesuffix(".pth"), "cpu fp32")
    found = {}
    for name, ids in np.load(tokens).items():
        logits, state = network.forward(ids.tolist(), None, full_output=True)
        found[f"{name}.logits"] = logits.numpy().reshape(len(ids), -1)
        found |= {f"{name}.state.{i}": part.numpy().copy() for i, part in enumerate(state)}
        last, greedy = logits.reshape(len(ids), -1)[-1], []
        for _ in range(int(new)):
            greedy.append(int(last.argmax()))
            last, state = network.forward(greedy[-1:], state)
        found[f"{name}.greedy"] = np.array(greedy)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

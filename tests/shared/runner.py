"""What somebody has who was handed a compiled graph: onnxruntime and numpy, and nothing else.

    python -I runner.py MODEL.onnx FEEDS.npz OUT.npz NEW [FUSION ...]

Runs the feeds, then NEW greedy tokens more with the cache that comes out; OUT.npz gets every output of every step.
The named fusions are disabled in the session.
"""

import sys

import numpy as np
import onnxruntime


def main(model: str, feeds: str, out: str, new: str = "0", *disabled: str) -> None:
    session = onnxruntime.InferenceSession(model, disabled_optimizers=list(disabled))
    names, given, found = [entry.name for entry in session.get_outputs()], dict(np.load(feeds)), {}
    read = {entry.name for entry in (*session.get_inputs(), *session.get_overridable_initializers())}
    for step in range(int(new) + 1):
        result = dict(zip(names, session.run(names, {k: v for k, v in given.items() if k in read}), strict=True))
        found |= {f"{step}/{name}": value for name, value in result.items()}
        given = following(given, result)
    assert not {"mionnx", "torch", "transformers", "onnx"} & {*sys.modules}
    np.savez(out, **found)


def following(given: dict[str, np.ndarray], result: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The next step's feeds: the top token of each row, and what the step left."""
    after = {name: value for name, value in given.items() if not name.startswith(("past_", "input_ids"))}
    after["input_ids"] = result["logits"][:, -1].argmax(-1)[:, None]
    if "attention_mask" in given:
        rows = len(given["attention_mask"])
        after["attention_mask"] = np.concatenate([given["attention_mask"], np.ones((rows, 1), np.int64)], axis=1)
        after["position_ids"] = given["position_ids"][:, -1:] + 1
    if "mionnx.token_positions" in given:
        after["mionnx.token_positions"] = given["mionnx.token_positions"][:, -1:] + 1
    for name, value in result.items():
        if name.startswith("present."):
            after[name.replace("present.", "past_key_values.")] = value
        if name.startswith("present_state."):
            after[name.replace("present_state.", "past_state.")] = value
    return after


if __name__ == "__main__":
    main(*sys.argv[1:])

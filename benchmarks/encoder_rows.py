"""The rows of encoders in the table of families: each with its own head beside transformers in eager mode."""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from encoders import (
    PADDINGS,
    encoder_batch,
    graph_values,
    make_encoder,
    plain_outputs,
    real_difference,
    run_encoder,
    usual_head,
)

from exporters.transformers import export
from exporters.transformers.families import layout_in
from mionnx import HookSpec, Intervention, MIModel

ENCODER_COLUMNS = (
    "encoder",
    "hook points",
    *(f"captures, {padding}" for padding in PADDINGS),
    *("untouched transformers", "an edit at each", "export, s"),
)
AS_ENCODER = " (encoder)"  # behind the names of encoders: some are in the causal-LM mapping too


def measure_encoder(name: str, folder: Path) -> list[str]:
    """The row of an encoder: its largest differences."""
    family = name.removesuffix(AS_ENCODER)
    reference = make_encoder(family, folder / "checkpoint", usual_head(family))
    plain = type(reference).from_pretrained(folder / "checkpoint", attn_implementation="eager").eval()
    began = time.process_time()
    export(folder / "checkpoint", folder / "hooked")
    seconds = time.process_time() - began
    model = MIModel.from_pretrained(folder / "hooked", threads=1)
    captures, untouched, edits = dict.fromkeys(PADDINGS, 0.0), 0.0, 0.0
    for padding in PADDINGS:
        inputs = encoder_batch(padding)
        mask, values = inputs["attention_mask"], graph_values(model, inputs)
        expected = run_encoder(reference, inputs).values
        if {*expected} != {*model.hooked.metadata.hooks}:
            raise ValueError(f"hook points differ: {sorted({*expected} ^ {*model.hooked.metadata.hooks})[:4]}")
        captures[padding] = max(real_difference(one, values[one], expected[one], mask) for one in expected)
        own = plain_outputs(plain, inputs, layout_in(reference).offset or 0)
        pairs = [("hook_final_norm", values[model.hooked.metadata.output], own[0])]
        layers = range(model.num_layers)
        for short, theirs in (("hook_resid_pre", own.hidden_states), ("attn.hook_pattern", own.attentions)):
            pairs += [(one, values[one], theirs[i]) for i in layers for one in (f"blocks.{i}.{short}",)]
        untouched = max(untouched, *(real_difference(one, found, it.numpy(), mask) for one, found, it in pairs))
    real = mask.astype(bool)
    inputs["token_type_ids"] = np.zeros_like(mask)
    whole_numbers = {one for one, value in values.items() if value.dtype.kind not in "f"}  # of chosen experts
    for one in [*{*model.hooked.metadata.hooks} - whole_numbers]:
        expected_logits = run_encoder(reference, inputs, (one, 0.5)).logits[real]
        spec = HookSpec().intervene(one, Intervention.Scale(0.5))
        found = model.forward(inputs["input_ids"], spec, attention_mask=mask).output()[real]
        scale = max(1.0, float(np.abs(expected_logits).max()))
        edits = max(edits, float(np.abs(found - expected_logits).max()) / scale)
    shown = [f"{value:.1e}" for value in (*captures.values(), untouched, edits)]
    return [name, str(len(model.hook_points())), *shown, f"{seconds:.0f}"]

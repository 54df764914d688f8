"""onnxruntime-genai alone: greedy tokens of rows of ids, padded on the right, and what it reads off each step.

Arguments: folder, file of JSON with "ids" (rows), "pad", "new", "knobs" (name -> strength), "monitors" (names), and
perhaps "least" (tokens before which no text ends). Prints JSON: "tokens" (rows), "monitors" (name -> the last token's
values, a list for each step), "seconds" of each step.
"""

import json
import sys
import time

import numpy as np
import onnxruntime_genai as og

folder, file = sys.argv[1:]
with open(file) as stream:
    asked = json.load(stream)
rows = asked["ids"]
longest = max(map(len, rows))
padded = [row + [asked["pad"]] * (longest - len(row)) for row in rows]
config = og.Config(folder)
config.clear_providers()
config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}))
model = og.Model(config)
params = og.GeneratorParams(model)
lengths = {"max_length": longest + asked["new"] + 1, "min_length": longest + asked.get("least", 0)}
params.set_search_options(do_sample=False, batch_size=len(rows), **lengths)
generator = og.Generator(model, params)
# genai reads the arrays at every step, and does not keep them alive
knobs = {name: np.array(strength, np.float32) for name, strength in asked["knobs"].items()}
for name, strength in knobs.items():
    generator.set_model_input(name, strength)
generator.append_tokens(np.array(padded, np.int32))
tokens, monitors, seconds = [[] for _ in rows], {name: [] for name in asked["monitors"]}, []
for _ in range(asked["new"]):
    begin = time.process_time()
    generator.generate_next_token()
    for row, token in zip(tokens, generator.get_next_tokens(), strict=True):
        row.append(int(token))
    seconds.append(time.process_time() - begin)
    for name, values in monitors.items():
        values.append(generator.get_output(name)[0, -1].tolist())
    if generator.is_done():
        break
print(json.dumps({"tokens": tokens, "monitors": monitors, "seconds": seconds}))

"""optimum-onnx alone: greedy tokens of rows of ids, padded on the left. Arguments and result: see `genai.py`.

Files of the folder may be named as "files": the rows of each, one file after the other, and so the seconds.
"""

import json
import sys
import time
from itertools import pairwise

import torch
from onnxruntime import SessionOptions
from optimum.onnxruntime import ORTModelForCausalLM


class Clock:
    """A streamer of `generate` that reads the time at the prompt and at every token."""

    def __init__(self):
        self.read = []

    def put(self, _tokens):
        self.read.append(time.process_time())

    def end(self):
        pass


folder, file = sys.argv[1:]
with open(file) as stream:
    asked = json.load(stream)
rows = asked["ids"]
longest = max(map(len, rows))
ids = torch.tensor([[asked["pad"]] * (longest - len(row)) + row for row in rows])
mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
tokens, seconds = [], []
options = SessionOptions()
options.intra_op_num_threads = 1
for name in asked.get("files", ["model.onnx"]):
    model = ORTModelForCausalLM.from_pretrained(folder, file_name=name, session_options=options)
    lengths = {"max_new_tokens": asked["new"], "min_new_tokens": asked.get("least")}
    settings = {**lengths, "do_sample": False, "streamer": (clock := Clock())}
    made = model.generate(input_ids=ids, attention_mask=mask, **settings)
    # A text may end before it has as many tokens as were asked for.
    seconds += [end - begin for begin, end in pairwise(clock.read)]
    tokens += made[:, longest:].tolist()
print(json.dumps({"tokens": tokens, "monitors": {}, "seconds": seconds}))

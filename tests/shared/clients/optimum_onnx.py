"""optimum-onnx alone: greedy tokens of rows of ids, padded on the left. Arguments and result: see `genai.py`.

Files of the folder may be named as "files": the rows of each, one file after the other.
"""

import json
import sys
import time

import torch
from optimum.onnxruntime import ORTModelForCausalLM

folder, file = sys.argv[1:]
with open(file) as stream:
    asked = json.load(stream)
rows = asked["ids"]
longest = max(map(len, rows))
ids = torch.tensor([[asked["pad"]] * (longest - len(row)) + row for row in rows])
mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
tokens, seconds = [], []
for name in asked.get("files", ["model.onnx"]):
    model = ORTModelForCausalLM.from_pretrained(folder, file_name=name)
    begin = time.process_time()
    made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=asked["new"], do_sample=False)
    seconds += [(time.process_time() - begin) / asked["new"]]
    tokens += made[:, longest:].tolist()
print(json.dumps({"tokens": tokens, "monitors": {}, "seconds": seconds}))

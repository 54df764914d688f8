"""sentence-transformers, fastembed or optimum-onnx alone: what each makes of texts. Arguments: the client, the folder,
and a JSON file with "texts", each a text or a pair. The result, as JSON: a row of numbers for each text.
"""

import json
import sys

client, folder, file = sys.argv[1:]
with open(file) as stream:
    texts = json.load(stream)["texts"]
pairs = isinstance(texts[0], list)
if client == "sentence-transformers":
    from sentence_transformers import CrossEncoder, SentenceTransformer

    kind = CrossEncoder if pairs else SentenceTransformer
    model = kind(folder, backend="onnx", model_kwargs={"provider": "CPUExecutionProvider"})
    # A pair's logits, which other clients give too.
    rows = model.predict(texts, apply_softmax=False) if pairs else model.encode(texts)
elif client.startswith("fastembed"):
    import numpy as np
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    with open(f"{folder}/config.json") as stream:
        width = json.load(stream)["hidden_size"]
    own = client == "fastembed pooling"  # else the graph's own
    how = (
        {"pooling": PoolingType.MEAN} if own else {"pooling": PoolingType.DISABLED, "output_name": "sentence_embedding"}
    )
    source = ModelSource(hf="mionnx/changed")
    TextEmbedding.add_custom_model("changed", normalization=own, sources=source, dim=width, **how)
    model = TextEmbedding("changed", specific_model_path=folder)
    rows = np.array([*model.embed(texts)])
else:
    import torch
    from optimum.onnxruntime import ORTModelForFeatureExtraction, ORTModelForSequenceClassification
    from transformers import AutoTokenizer

    kind = ORTModelForSequenceClassification if pairs else ORTModelForFeatureExtraction
    model, tokenizer = kind.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    output = model(**inputs)
    if pairs:
        rows = output.logits
    else:
        real = inputs["attention_mask"][:, :, None]
        rows = torch.nn.functional.normalize((output.last_hidden_state * real).sum(1) / real.sum(1))
print(json.dumps(rows.tolist()))

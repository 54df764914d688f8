"""The layout "optimum": what classes of optimum-onnx 0.1.0 load, `ORTModelForCausalLM` and those of encoders."""

from pathlib import Path

import onnx

from mionnx.compile.layouts.encoders import (
    HEAD_CLASSES,
    HIDDEN_STATE,
    as_transformers,
    check_encoder,
    output_of,
    write_tokenizer,
)
from mionnx.compile.layouts.layout import CARD_PROMPT, NEW_TOKENS, ClientLayout, Content


class OptimumLayout(ClientLayout):
    """For optimum-onnx."""

    name = "optimum"
    client = "optimum-onnx"
    turns_knobs = False  # `generate` refuses what it does not know
    takes_encoders = True

    def check(self, content: Content) -> None:
        if content.encodes:
            check_encoder(self, content)
        else:
            self.need_past(content)
            self.need_config(content)

    def adapt(self, content: Content) -> onnx.ModelProto:
        return as_transformers(content) if content.encodes else content.proto

    def write(self, content: Content, at: Path) -> None:
        if content.encodes:
            write_tokenizer(content, at)

    def loop(self, content: Content) -> str:
        head, output = content.model.metadata.head, output_of(content.model.metadata)
        kind = HEAD_CLASSES.get(head, "FeatureExtraction") if content.encodes else "CausalLM"
        if content.encodes:
            run = f"""output = model(**inputs).{HIDDEN_STATE if head == "embedding" else output}
print(tuple(output.shape), output.ravel()[:8].tolist())"""
        else:
            run = f"""tokens = model.generate(**inputs, max_new_tokens={NEW_TOKENS}, do_sample=False)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""
        return f"""from optimum.onnxruntime import ORTModelFor{kind}
from transformers import AutoTokenizer

model, tokenizer = ORTModelFor{kind}.from_pretrained("."), AutoTokenizer.from_pretrained(".")
inputs = tokenizer("{CARD_PROMPT}", return_tensors="pt")
{run}"""

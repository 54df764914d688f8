"""The layout "optimum": what `ORTModelForCausalLM.from_pretrained` of optimum-onnx 0.1.0 loads."""

from mionnx.compile.layouts.layout import CARD_PROMPT, NEW_TOKENS, ClientLayout, Content


class OptimumLayout(ClientLayout):
    """For optimum-onnx."""

    name = "optimum"
    client = "optimum-onnx"
    turns_knobs = False  # `generate` refuses what it does not know

    def check(self, content: Content) -> None:
        self.need_keys_and_values(content)
        self.need_config(content)

    def loop(self, content: Content) -> str:
        return f"""from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer

model, tokenizer = ORTModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
inputs = tokenizer("{CARD_PROMPT}", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens={NEW_TOKENS}, do_sample=False)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""

"""The layout "transformers.js": what transformers.js 4 loads, in Node and in browsers.

`onnx/model{suffix}.onnx`, where the suffix tells the dtype, its weights beside it as `model{suffix}.onnx_data`,
`..._data_1`, and in `config.json` an entry `transformers.js_config` with the dtype and their number. The client feeds
no input that it does not know: `compiled.mjs` feeds the knobs, and shows monitors.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import onnx

from mionnx.compile.interface import renamed_ports
from mionnx.compile.knobs import sentence
from mionnx.compile.layouts.encoders import HEAD_CLASSES, as_transformers, check_encoder, output_of, write_tokenizer
from mionnx.compile.layouts.layout import CARD_PROMPT, NEW_TOKENS, ClientLayout, Content, write_json
from mionnx.graph.io_names import STATE

WRAPPER = "compiled.mjs"
SUFFIXES = {"fp32": "", "fp16": "_fp16", "q8": "_quantized", "q4": "_q4", "q4f16": "_q4f16"}
JS_GENERIC = "llama"  # the type of any decoder with keys and values
# Types of decoders that transformers.js 4.3 knows (src/models/registry.js) and runs as it runs the generic one, except
# gemma3_text and gemma3, whose positions it counts from 1.
JS_TYPES = frozenset(
    re.findall(
        r"[\w-]+",
        """
afmoe apertus arcee bloom codegen cohere cohere2 ernie4_5 exaone gemma gemma2 glm gpt2 gpt_neo gpt_neox
gpt_oss gptj granite helium hunyuan_v1_dense llama llama4_text ministral ministral3 mistral mobilellm mpt
nanochat olmo olmo2 olmo3 openelm opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2
vaultgemma
""",
    )
)
# The type of any decoder with states, which it feeds to all inputs of these names that the graph has: without an entry
# `layer_types` every layer may have each of them.
JS_HYBRID = "granitemoehybrid"
JS_STATES = {STATE.parts[0]: "conv", STATE.parts[1]: "ssm"}  # part of a layer -> its word in "past_conv.0"
JS_OF_COLUMNS = ("lfm2", "lfm2_moe")  # types of convolutions and attention that it knows
JS_LAYER_TYPES = ("layer_types", "layers_block_type")
JS_ENCODER = "bert"  # the type of any encoder: the client feeds what the graph names
# Types of encoders that it knows with every head.
JS_ENCODERS = frozenset(
    ("bert", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "mpnet", "neobert", "roberta")
) | {"roformer", "xlm", "xlm-roberta"}
# Its tokenizers that give token types.
JS_TOKENIZERS = frozenset(
    f"{name}Tokenizer"
    for name in ("Albert", "Bert", "ConvBert", "Deberta", "DebertaV2", "Electra", "Herbert", "MobileBert", "RoFormer")
) | {"SqueezeBertTokenizer", "XLMTokenizer"}
MOST_FILES = 100


class TransformersJsLayout(ClientLayout):
    """For transformers.js."""

    name = "transformers.js"
    client = "transformers.js"
    required_knobs = True
    takes_encoders = True
    language = "js"

    def check(self, content: Content) -> None:
        if content.encodes:
            check_encoder(self, content)
        else:
            self.need_past(content, STATE.parts)
            self.need_config(content)
            if content.model.metadata.state_alone:
                raise self.refuse(
                    "transformers.js counts the tokens of a past by its keys, and no layer of this "
                    f"{content.model.metadata.family} model has any: use layout='plain' or 'genai'"
                )
        if content.activations == "bfloat16":
            raise self.refuse("JavaScript has no bfloat16: open the model with dtype='float32' or 'float16'")

    def adapt(self, content: Content) -> onnx.ModelProto:
        if content.encodes:
            return as_transformers(content)
        names = dict[str, str]()
        for port in content.model.metadata.ports:
            if port.part in JS_STATES:
                names[port.past] = f"past_{JS_STATES[port.part]}.{port.layer}"
                names[port.present] = f"present_{JS_STATES[port.part]}.{port.layer}"
        return renamed_ports(content.proto, names) if names else content.proto

    def dtype(self, content: Content) -> str:
        """Its name for the dtype of the weights."""
        if content.bits:
            half = content.activations == "float16"
            # Most of it: where 8 bits stand in single matrices, a file of 4 bits is still called so.
            return ("q4f16" if half else "q4") if min(content.bits) <= 4 else "q8"
        return "fp16" if content.activations == "float16" else "fp32"

    def graph(self, content: Content) -> str:
        return f"onnx/model{SUFFIXES[self.dtype(content)]}.onnx"

    def data(self, files: Sequence[str], content: Content) -> dict[str, str]:
        if len(files) > MOST_FILES:
            raise self.refuse(
                f"transformers.js reads at most {MOST_FILES} files of weights, and there are {len(files)}"
            )
        name = f"{Path(self.graph(content)).name}_data"
        return {file: name + (f"_{number}" if number else "") for number, file in enumerate(files)}

    def write(self, content: Content, at: Path) -> None:
        files = 0 if content.embedded else sum(1 for _ in (at / "onnx").glob("*_data*"))
        metadata = content.model.metadata
        config = dict(content.config)
        if content.encodes:
            write_tokenizer(content, at, JS_TOKENIZERS)
            if config.get("model_type") not in JS_ENCODERS:
                config |= {"mionnx.model_type": config.get("model_type"), "model_type": JS_ENCODER}
        elif metadata.carries_state and metadata.family not in JS_OF_COLUMNS:
            config = {key: value for key, value in config.items() if key not in JS_LAYER_TYPES}
            config |= {"mionnx.model_type": config.get("model_type"), "model_type": JS_HYBRID}
            config["num_hidden_layers"] = metadata.sizes.num_layers
        elif metadata.carries_state:
            config["layer_types"] = ["conv" if layer.recurrence else "full_attention" for layer in metadata.layers]
        elif metadata.family not in JS_TYPES or config.get("model_type") not in JS_TYPES:
            heads, width, _ = metadata.heads(0)
            # The graph says the rest: a client that does not know the family runs it as one that it knows.
            config |= {
                "mionnx.model_type": config.get("model_type"),
                "model_type": JS_GENERIC,
                "num_hidden_layers": metadata.sizes.num_layers,
                "num_attention_heads": metadata.sizes.num_heads,
                "num_key_value_heads": heads,
                "head_dim": width,
                "hidden_size": metadata.sizes.hidden_size,
            }
        settings = {"dtype": self.dtype(content), "use_external_data_format": files}
        config["transformers.js_config"] = {**config.get("transformers.js_config", {}), **settings}
        write_json(at / "config.json", config)
        (at / WRAPPER).write_text(_wrapper(content))

    def loop(self, content: Content) -> str:
        knobs = {name: facts["default"] for name, facts in content.facts["knobs"].items()}
        monitors = [*content.facts.get("monitors", {})]
        metadata = content.model.metadata
        kind = HEAD_CLASSES.get(metadata.head) if content.encodes else "CausalLM"
        kind = f"AutoModelFor{kind}" if kind else "AutoModel"
        shown = ", ".join(f'out["{name}"].tolist()[0].at(-1)' for name in monitors)
        read = f", (out) => console.log({shown})" if monitors else ""
        if content.encodes:
            run = f"""const output = (await model(inputs)).{output_of(metadata)};
console.log(output.dims, [...output.data.slice(0, 8)]);"""
        else:
            how = f"max_new_tokens: {NEW_TOKENS}, do_sample: false"
            run = f"""const tokens = await model.generate({{ ...inputs, {how} }});
console.log(tokenizer.decode(tokens.tolist()[0], {{ skip_special_tokens: true }}));"""
        return f"""import {{ {kind}, AutoTokenizer, env }} from "@huggingface/transformers";
import {{ compiled }} from "./{WRAPPER}";

Object.assign(env, {{ allowLocalModels: true, allowRemoteModels: false, localModelPath: "" }});
const folder = import.meta.dirname ?? "."; // in a browser, its address from the page's
const tokenizer = await AutoTokenizer.from_pretrained(folder);
const model = compiled(await {kind}.from_pretrained(folder), {json.dumps(knobs)}{read});
const inputs = tokenizer("{CARD_PROMPT}");
{run}"""


def _wrapper(content: Content) -> str:
    """A module that feeds the knobs of a model, and shows the outputs of each call."""
    facts = content.facts["knobs"]
    about = "".join(f"// {sentence(name, one)}\n" for name, one in facts.items())
    table = {name: [one["default"], one["low"], one["high"]] for name, one in facts.items()}
    return f"""// A compiled model with its knobs turned: compiled(model, {{ name: strength }}, (outputs) => ...).
{about}const KNOBS = {json.dumps(table)}; // name -> default, lowest, highest
export function compiled(model, knobs = {{}}, read = null) {{
  for (const name in knobs) if (!(name in KNOBS)) throw new RangeError(`no knob ${{name}}; ${{Object.keys(KNOBS)}}`);
  const strengths = {{}};
  for (const [name, [normal, low, high]] of Object.entries(KNOBS)) {{
    const value = knobs[name] ?? normal;
    const fits = Number.isFinite(value) && value >= (low ?? value) && value <= (high ?? value);
    if (!fits) throw new RangeError(`${{name}} is ${{value}}, and ranges from ${{low ?? "any"}} to ${{high ?? "any"}}`);
    strengths[name] = value;
  }}
  model.forward = async (inputs) => {{
    const Tensor = inputs.input_ids.constructor;
    const feeds = {{}};
    for (const name in strengths) feeds[name] = new Tensor("float32", [strengths[name]], []);
    const outputs = await Object.getPrototypeOf(model).forward.call(model, {{ ...inputs, ...feeds }});
    read?.(outputs);
    return outputs;
  }};
  return model;
}}
"""

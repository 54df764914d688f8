"""The layout "genai": a folder of onnxruntime-genai 0.18, in Python, C#, Java, on phones and in Foundry Local.

`genai_config.json` names the inputs and outputs of the graph; the client makes the past, the mask and the positions
itself. It pads rows of a batch on the right.
"""

import re
from pathlib import Path
from typing import Any

from mionnx.compile.layouts.layout import CARD_PROMPT, NEW_TOKENS, ClientLayout, Content, write_json
from mionnx.graph.folder_file import inside, read_json
from mionnx.graph.io_names import STATE
from mionnx.graph.metadata import Metadata
from mionnx.inputs.tokens import TOKENIZER_FILE

GENAI_CONFIG = "genai_config.json"
GENERIC_TYPE = "decoder"  # the type of any model with keys and values
# Types that genai 0.18 names and runs as it runs the generic one (src/models/model_type.h); not gpt2, whose past is one
# tensor of keys and values there, and not phi3, which it computes anew where a text grows beyond 4,096 tokens.
GENAI_TYPES = frozenset(
    re.findall(
        r"\w+",
        """
ernie4_5 gemma gemma2 gemma3_text gemma4_text granite internlm2 llama mistral nemotron olmo phi qwen2 qwen3
smollm3
""",
    )
)
COLUMNS_TYPE = "lfm2"  # the type of models that carry columns of convolutions, and no other state
GENAI_PARTS = {STATE.parts[1]: "recurrent"}  # part of a layer -> its word in genai_config.json, where that is another
GENAI_TOKENIZERS = ("BPE", "Unigram")  # kinds that genai reads from tokenizer.json
LONGEST_TEXT = 4096  # tokens of a text, where no config says


class GenaiLayout(ClientLayout):
    """For onnxruntime-genai."""

    name = "genai"
    client = "onnxruntime-genai"
    required_knobs = True

    def check(self, content: Content) -> None:
        self.need_past(content, STATE.parts)
        metadata = content.model.metadata
        if any(layer.has_state for layer in metadata.layers) and STATE.parts[0] not in {p.part for p in metadata.ports}:
            raise self.refuse(
                f"onnxruntime-genai carries no state without columns of a convolution, of which this {metadata.family} "
                "model has none: use layout='plain' or 'transformers.js'"
            )
        names = {port.name for port in content.interface.outputs}
        if "logits" not in names:
            raise self.refuse("onnxruntime-genai chooses tokens by the output logits, which this graph does not have")
        if not self._end(content):
            raise self.refuse(
                f"onnxruntime-genai stops at an eos_token_id, and neither generation_config.json nor config.json of "
                f"{content.model.folder} names one"
            )

    def write(self, content: Content, at: Path) -> None:
        write_json(at / GENAI_CONFIG, self.config(content))

    def config(self, content: Content) -> dict[str, Any]:
        """The content of `genai_config.json`."""
        metadata, sizes = content.model.metadata, content.model.metadata.sizes
        names = {port.name for port in content.interface.inputs}
        inputs = {name: name for name in ("input_ids", "attention_mask", "position_ids") if name in names}
        end = self._end(content)
        pad, begin = content.value("pad_token_id"), content.value("bos_token_id")
        length = content.model.context_length or LONGEST_TEXT
        attending = [layer for layer, one in enumerate(metadata.layers) if one.attention]
        heads, width, _ = metadata.heads(attending[0] if attending else 0)
        return {
            "model": {
                "type": self._type(metadata),
                "bos_token_id": end[0] if begin is None else begin,
                "eos_token_id": end[0] if len(end) == 1 else end,
                "pad_token_id": end[0] if pad is None else pad,
                "context_length": length,
                "vocab_size": sizes.vocab_size,
                "decoder": {
                    "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                    "filename": self.graph(content),
                    "head_size": width,
                    "hidden_size": sizes.hidden_size,
                    "num_attention_heads": sizes.num_heads,
                    "num_hidden_layers": sizes.num_layers,
                    "num_key_value_heads": heads,
                    "inputs": inputs | _templates(metadata, "past"),
                    "outputs": {"logits": "logits"} | _templates(metadata, "present"),
                }
                | _columns(metadata),
            },
            "search": self._search(content, length),
        }

    def _search(self, content: Content, length: int) -> dict[str, Any]:
        """Search defaults; of sampling those of the checkpoint's generation config."""
        own = {key: content.generation.get(key) for key in ("temperature", "top_k", "top_p", "repetition_penalty")}
        defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
        return {
            "do_sample": bool(content.generation.get("do_sample", False)),
            **{key: own[key] if own[key] is not None else value for key, value in defaults.items()},
            "min_length": 0,
            "max_length": length,
            "num_beams": 1,
            "early_stopping": True,
            # A graph of standard operators makes its keys and values anew in each call.
            "past_present_share_buffer": False,
        }

    @staticmethod
    def _type(metadata: Metadata) -> str:
        if metadata.carries_state:
            return COLUMNS_TYPE if _columns(metadata) else GENERIC_TYPE
        return metadata.family if metadata.family in GENAI_TYPES else GENERIC_TYPE

    @staticmethod
    def _end(content: Content) -> list[int]:
        return content.model.end_tokens()

    def loop(self, content: Content) -> str:
        knobs, monitors = content.facts["knobs"], content.facts.get("monitors", {})
        own = _tokenizer_kind(content) in GENAI_TOKENIZERS
        shown = "".join(f', generator.get_output("{name}")[0, -1]' for name in monitors)
        encoded = f'tokenizer.encode("{CARD_PROMPT}")' + ".ids" * (not own)
        # genai does not keep these arrays alive.
        defaults = ", ".join(f'"{name}": np.array({one["default"]:g}, np.float32)' for name, one in knobs.items())
        turned = [
            f"knobs = {{{defaults}}}  # held: genai reads them at every step",
            "for name, strength in knobs.items():",
            "    generator.set_model_input(name, strength)",
        ] * bool(knobs)
        decoded = "generator.get_next_tokens()" if own else "[int(generator.get_next_tokens()[0])]"
        lines = [
            *["import numpy as np"] * bool(knobs),
            "import onnxruntime_genai as og",
            *["from tokenizers import Tokenizer"] * (not own),
            "",
            'model = og.Model(".")',
            # Words of a list are none of the kinds of tokenizers that genai has.
            "tokenizer = og.Tokenizer(model)" if own else 'tokenizer = Tokenizer.from_file("tokenizer.json")',
            "params = og.GeneratorParams(model)",
            "params.set_search_options(max_length=64, do_sample=False)",
            "generator = og.Generator(model, params)",
            *turned,
            f"generator.append_tokens({encoded})",
            f"for _ in range({NEW_TOKENS}):",
            "    generator.generate_next_token()",
            f"    print(tokenizer.decode({decoded}){shown})",
            "    if generator.is_done():",
            "        break",
        ]
        return "\n".join(lines)


def _tokenizer_kind(content: Content) -> str:
    """The kind of the model's tokenizer: "BPE", "Unigram", "WordLevel"; none without `tokenizer.json`."""
    if not (content.model.folder / TOKENIZER_FILE).is_file():
        return ""
    model = read_json(inside(content.model.folder, TOKENIZER_FILE)).get("model")
    return str(model.get("type")) if isinstance(model, dict) else ""


def _templates(metadata: Metadata, when: str) -> dict[str, str]:
    """Names of what layers carry in or out: layers without a part are not asked for it."""
    names = {}
    for port in metadata.ports:
        name = port.past if when == "past" else port.present
        names[f"{when}_{GENAI_PARTS.get(port.part, port.part)}_names"] = name.replace(f".{port.layer}.", ".%d.")
    return names


def _columns(metadata: Metadata) -> dict[str, Any]:
    """What genai asks of a model whose states are columns of convolutions alone."""
    kernels = [one.recurrence.kernel for one in metadata.layers if one.recurrence]
    if not kernels or any(one.has_state for one in metadata.layers):
        return {}
    kinds = ["conv" if one.recurrence else "full_attention" for one in metadata.layers]
    return {"layer_types": kinds, "conv_cache_size": kernels[0] - 1}

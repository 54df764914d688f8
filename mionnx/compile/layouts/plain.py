"""The layout "plain": `model.onnx` with its weights and its tokenizer beside it."""

from collections.abc import Sequence
from typing import Any

from mionnx.compile.layouts.layout import CARD_PROMPT, NEW_TOKENS, ClientLayout, Content
from mionnx.graph.io_names import PASTS, PRESENTS

NUMPY = {"FLOAT": "float32", "FLOAT16": "float16"}


class PlainLayout(ClientLayout):
    """For ONNX Runtime in any language."""

    name = "plain"
    client = "ONNX Runtime"
    takes_encoders = True

    def loop(self, content: Content) -> str:
        write = encode_once if content.encodes else decode_loop
        return write(content, self.graph(content))


def encode_once(content: Content, graph: str) -> str:
    """One pass over a text in Python with onnxruntime, tokenizers and numpy alone."""
    feeds = {
        "input_ids": "np.array([text.ids])",
        "attention_mask": "np.array([text.attention_mask])",
        "token_type_ids": "np.array([text.type_ids])",
        "position_ids": "np.arange(len(text.ids))[None]",
    }
    needed = {port.name for port in content.interface.inputs}
    fed = [f'"{name}": {value}' for name, value in feeds.items() if name in needed]
    fed += [f'"{name}": np.array({_default(content, name)}, np.float32)' for name in content.knobs]
    return "\n".join(
        [
            "import numpy as np",
            "import onnxruntime",
            "from tokenizers import Tokenizer",
            "",
            f'session = onnxruntime.InferenceSession("{graph}")',
            'tokenizer = Tokenizer.from_file("tokenizer.json")',
            f'text = tokenizer.encode("{CARD_PROMPT}")',
            f"feeds = {{{', '.join(fed)}}}",
            f'(output,) = session.run(["{content.model.metadata.output}"], feeds)',
            "print(output.shape, output.ravel()[:8])",
        ]
    )


def decode_loop(content: Content, graph: str, tokenizer: str = "tokenizer.json") -> str:
    """A greedy loop in Python with onnxruntime, tokenizers and numpy alone."""
    ports = content.interface.inputs
    past = [port for port in ports if port.name.startswith(PASTS)]
    names = zip(PASTS, PRESENTS, strict=True)
    carried = [pair for pair in names if any(port.name.startswith(pair[0]) for port in past)]
    feeds: dict[str, Any] = {
        "input_ids": "new",
        "attention_mask": "np.ones((1, length), np.int64)",
        "position_ids": "np.arange(length)[None, -new.shape[1] :]",
        "mionnx.token_positions": "np.arange(length)[None, -new.shape[1] :]",
    }
    needed = {port.name for port in ports}
    fed = [f'"{name}": {value}' for name, value in feeds.items() if name in needed]
    knobs = ", ".join(f'"{name}": np.array({_default(content, name)}, np.float32)' for name in content.knobs)
    shown = "".join(f', out["{name}"][0, -1]' for name in content.facts.get("monitors", {}))
    lines = ["import numpy as np", "import onnxruntime", "from tokenizers import Tokenizer", ""]
    lines += ["options = onnxruntime.SessionOptions()", "options.log_severity_level = 3"] * _warns(content)
    arguments = f'"{graph}"' + ", options" * _warns(content)
    lines += [
        f"session = onnxruntime.InferenceSession({arguments})",
        f'tokenizer = Tokenizer.from_file("{tokenizer}")',
        f'new, length = np.array([tokenizer.encode("{CARD_PROMPT}").ids]), 0',
        'size = {"batch_size": 1, "past_sequence_length": 0}',
    ]
    if past:
        zeros = f"np.zeros([size.get(dim, dim) for dim in one.shape], {_dtype([port.dtype for port in past])})"
        loop = f"for one in session.get_inputs() if {_begins('one.name', [before for before, _ in carried])}"
        lines += [f"past = {{one.name: {zeros} {loop}}}"]
    renamed = "".join(f'.replace("{after}", "{before}")' for before, after in carried)
    run = "feeds | knobs | past" if knobs else "feeds | past"
    taken = _begins("name", [after for _, after in carried])
    lines += [f"knobs = {{{knobs}}}"] * bool(knobs)
    lines += [
        f"for _ in range({NEW_TOKENS}):",
        "    length += new.shape[1]",
        f"    feeds = {{{', '.join(fed)}}}",
        f"    out = dict(zip((one.name for one in session.get_outputs()), session.run(None, {run})))",
        '    new = out["logits"][:, -1:].argmax(-1)',
        f"    past = {{name{renamed}: value for name, value in out.items() if {taken}}}",
        f"    print(tokenizer.decode([int(new[0, 0])]){shown})",
    ]
    return "\n".join(lines)


def _begins(name: str, prefixes: Sequence[str]) -> str:
    """The code of whether a name begins with one of several."""
    listed = ", ".join(f'"{prefix}"' for prefix in prefixes)
    return f"{name}.startswith({listed if len(prefixes) == 1 else f'({listed})'})"


def _dtype(dtypes: Sequence[str]) -> str:
    """The code of the dtype of an input, `one`, of those that a graph has."""
    first, *others = dict.fromkeys(NUMPY.get(dtype, "float32") for dtype in dtypes)
    if not others:
        return f"np.{first}"
    return 'np.float16 if "float16" in one.type else np.float32'


def _default(content: Content, name: str) -> str:
    return f"{content.facts['knobs'][name]['default']:g}"


def _warns(content: Content) -> bool:
    """Whether ONNX Runtime warns of inputs with a default."""
    return bool(content.interface.optional)

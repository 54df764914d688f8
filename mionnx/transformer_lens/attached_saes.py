"""`OnnxSAEBridge`: SAELens' sparse autoencoders attached to a bridge, `add_sae`, `run_with_saes` and their like.

An autoencoder runs in torch, as SAELens wrote it, on the value where the graph is cut; gradients go back through it.
SAELens 6 names TransformerLens before 4 as what it needs, and imports from places that 4 has moved. Its names are put
there when this module is imported, which has to come before `import sae_lens`:

    pip install --no-deps sae-lens
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import transformer_lens
from transformer_lens import HookedRootModule, utilities
from transformer_lens.model_bridge import TransformerBridge

from mionnx.errors import RuntimeMissingError
from mionnx.transformer_lens.bridge import OnnxBridge


def _put_moved_names() -> None:
    """What SAELens imports, where it looks for it: TransformerLens 4 has one model class, `TransformerBridge`."""
    moved: dict[str, dict[str, Any]] = {
        "HookedTransformer": {
            "HookedTransformer": TransformerBridge,
            "HookedRootModule": HookedRootModule,
            "Loss": Any,
            "Output": Any,
        },
        "components": {},
        "components.mlps": {},
        "components.mlps.can_be_used_as_mlp": {"CanBeUsedAsMLP": Any},
    }
    for name, members in moved.items():
        module = ModuleType(f"transformer_lens.{name}", "Names of TransformerLens before 4.")
        module.__dict__.update(members, __path__=[])
        sys.modules.setdefault(module.__name__, module)
    sys.modules.setdefault("transformer_lens.utils", utilities)
    transformer_lens.__dict__.setdefault("HookedTransformer", TransformerBridge)


_put_moved_names()
try:
    from sae_lens.analysis.sae_transformer_bridge import SAETransformerBridge
except ModuleNotFoundError as missing:
    raise RuntimeMissingError(
        f"autoencoders of SAELens need it, and {missing.name} is not installed: pip install --no-deps sae-lens"
    ) from missing


class OnnxSAEBridge(SAETransformerBridge, OnnxBridge):
    """A bridge on the engine to which SAELens' autoencoders and transcoders are attached."""


def with_saes(lens: OnnxBridge) -> OnnxSAEBridge:
    """Make a bridge one that takes autoencoders, as SAELens does with TransformerLens' own.

    Example:
        lens = with_saes(bridge(MIModel.from_pretrained("models/world-gpt2")))
        lens.run_with_saes("The capital of France is", saes=[sae])
    """
    lens.__class__ = OnnxSAEBridge
    lens.__dict__.update(_acts_to_saes={}, _transcoder_output_hooks={})
    assert isinstance(lens, OnnxSAEBridge)
    return lens

"""mionnx: interpretability on ONNX graphs.

A Hugging Face language model becomes an ONNX graph whose activations carry their hook names; a `HookSpec` says what to
capture and where to intervene; the graph is rewritten and runs in ONNX Runtime.
"""

from mionnx.ablation import AblationResult, StateAblationResult, TokenChange
from mionnx.cache import HookCache
from mionnx.errors import (
    ExportError,
    HookError,
    InputError,
    InterventionError,
    MIError,
    ModelError,
    RuntimeMissingError,
    SpecFileError,
    TokenizerError,
)
from mionnx.estimate import Estimate
from mionnx.functions import Hook, ModelSizes
from mionnx.generation import Generation
from mionnx.heads import HeadScores
from mionnx.hookpoint import HookPoint
from mionnx.intervention import Intervention
from mionnx.knockout import KnockoutSpec, create_knockout_mask
from mionnx.kvcache import KVCache
from mionnx.logits import Logits
from mionnx.model import MIModel
from mionnx.rewrite import Report
from mionnx.rwkv_state import RWKVState
from mionnx.sampling import sample_token
from mionnx.session import Options
from mionnx.spec import HookSpec
from mionnx.state_spec import StateKnockoutSpec, StateSteeringSpec
from mionnx.streamer import TextStreamer
from mionnx.tokens import Tokens
from mionnx.variants import Compiled

__all__ = [
    "AblationResult",
    "Compiled",
    "Estimate",
    "ExportError",
    "Generation",
    "HeadScores",
    "Hook",
    "HookCache",
    "HookError",
    "HookPoint",
    "HookSpec",
    "InputError",
    "Intervention",
    "InterventionError",
    "KVCache",
    "KnockoutSpec",
    "Logits",
    "MIError",
    "MIModel",
    "ModelError",
    "ModelSizes",
    "Options",
    "RWKVState",
    "Report",
    "RuntimeMissingError",
    "SpecFileError",
    "StateAblationResult",
    "StateKnockoutSpec",
    "StateSteeringSpec",
    "TextStreamer",
    "TokenChange",
    "TokenizerError",
    "Tokens",
    "create_knockout_mask",
    "sample_token",
]

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
from mionnx.features import SAE, FeatureActivations
from mionnx.fragment import Fragment
from mionnx.functions import Hook, ModelSizes
from mionnx.generation import Generation
from mionnx.heads import HeadScores
from mionnx.hookpoint import HookPoint
from mionnx.intervention import Intervention
from mionnx.knockout import KnockoutSpec, create_knockout_mask
from mionnx.kvcache import KVCache
from mionnx.logits import Logits
from mionnx.model import MIModel
from mionnx.reading import AttentionPatterns, Attribution, LensResult
from mionnx.rewrite import Report
from mionnx.rwkv_state import RWKVState
from mionnx.sampling import sample_token
from mionnx.session import Options
from mionnx.spec import HookSpec
from mionnx.state_spec import StateKnockoutSpec, StateSteeringSpec
from mionnx.steering import Direction, Directions, DoseResponse, SteeringCalibration
from mionnx.streamer import TextStreamer
from mionnx.tokens import Tokens
from mionnx.variants import Compiled
from mionnx.verify import Bisection, Verification

__all__ = [
    "SAE",
    "AblationResult",
    "AttentionPatterns",
    "Attribution",
    "Bisection",
    "Compiled",
    "Direction",
    "Directions",
    "DoseResponse",
    "Estimate",
    "ExportError",
    "FeatureActivations",
    "Fragment",
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
    "LensResult",
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
    "SteeringCalibration",
    "TextStreamer",
    "TokenChange",
    "TokenizerError",
    "Tokens",
    "Verification",
    "create_knockout_mask",
    "sample_token",
]

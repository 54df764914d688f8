"""The public names of `mionnx`, which imports this file when the first of them is asked for."""

from mionnx.analysis.ablation import AblationResult, StateAblationResult, TokenChange
from mionnx.analysis.attention.attention_patterns import AttentionPatterns
from mionnx.analysis.attention.head_scores import HeadScores
from mionnx.analysis.attribution.attribution import Attribution, Attributions
from mionnx.analysis.attribution.logit_diff import LogitDiffs
from mionnx.analysis.circuits.circuit_result import Circuit
from mionnx.analysis.circuits.edge_scores import EdgeAttribution
from mionnx.analysis.features.active_features import FeatureActivations
from mionnx.analysis.features.dashboards import FeatureDashboards
from mionnx.analysis.features.sae import SAE
from mionnx.analysis.features.transcoder_set import TranscoderSet
from mionnx.analysis.gradients.saliency import Saliency
from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.jacobian_lens.jacobian_lens import JacobianLens
from mionnx.analysis.jacobian_lens.lens_texts import ShortTextWarning
from mionnx.analysis.lens.lens_result import LensResult
from mionnx.analysis.lens.patchscope import Patchscope
from mionnx.analysis.numerics.diagnosis import Diagnosis
from mionnx.analysis.numerics.forecast_result import Forecast
from mionnx.analysis.numerics.range_report import RangeReport
from mionnx.analysis.probes.probe import probe
from mionnx.analysis.probes.probe_result import ProbeResult
from mionnx.analysis.probes.sparse_probe import SparseProbes, sparse_probe
from mionnx.analysis.python_hooks.transformer_lens import ModelSizes
from mionnx.analysis.similarity.token_pairs import TokenPairs
from mionnx.analysis.statistics.statistics import Statistics, statistics_of
from mionnx.analysis.steering.calibration import SteeringCalibration
from mionnx.analysis.steering.directions import Direction, Directions
from mionnx.analysis.steering.dose_response import DoseResponse
from mionnx.analysis.steering.interchange import SubspaceEffect
from mionnx.analysis.sweep.comparison import Comparison
from mionnx.analysis.sweep.corruption import Noise
from mionnx.analysis.tracing.attention_score import AttentionScore
from mionnx.analysis.tracing.attribution_graph import AttributionGraph
from mionnx.analysis.weights.factored_matrix import FactoredMatrix
from mionnx.bind.estimate import Estimate
from mionnx.bind.logit_selection import Logits
from mionnx.compile.knobs import Knob
from mionnx.compile.monitors import Monitor
from mionnx.engine.options import Options
from mionnx.engine.placement import FallbackWarning
from mionnx.errors import (
    ExportError,
    GradientError,
    HookError,
    InputError,
    InterventionError,
    MIError,
    ModelError,
    RuntimeMissingError,
    SpecFileError,
    TokenizerError,
    UnknownImportError,
    UnknownKeywordError,
    UnknownNameError,
)
from mionnx.graph.fragment import Fragment
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.chat_tokens import ChatTokens
from mionnx.inputs.kv_cache import KVCache
from mionnx.inputs.layer_cache import LayerCache
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.tokens import Tokens, UnknownWordWarning
from mionnx.model import MIModel
from mionnx.quantise.choice import FewBlocksWarning
from mionnx.rewrite import Report
from mionnx.run.generation import Generation
from mionnx.run.hook_cache import HookCache
from mionnx.run.hook_functions import Hook
from mionnx.run.open_graphs import LayerLoopWarning
from mionnx.run.open_graphs import OpenGraph as Compiled
from mionnx.run.open_model import DynamicRoundingWarning
from mionnx.run.predictions import Predictions
from mionnx.run.sampling import sample_token
from mionnx.run.spans import Spans
from mionnx.run.streamer import TextStreamer
from mionnx.run.tokenizing import OtherSpellingWarning
from mionnx.spec.attention_knockout import KnockoutSpec, create_knockout_mask
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec
from mionnx.spec.subspace import Subspace
from mionnx.verify import Bisection, MatrixLosses, ModelLosses, Verification

__all__ = [
    "SAE",
    "AblationResult",
    "Activations",
    "AttentionPatterns",
    "AttentionScore",
    "Attribution",
    "AttributionGraph",
    "Attributions",
    "Bisection",
    "ChatTokens",
    "Circuit",
    "Comparison",
    "Compiled",
    "Diagnosis",
    "Direction",
    "Directions",
    "DoseResponse",
    "DynamicRoundingWarning",
    "EdgeAttribution",
    "Estimate",
    "ExportError",
    "FactoredMatrix",
    "FallbackWarning",
    "FeatureActivations",
    "FeatureDashboards",
    "FewBlocksWarning",
    "Forecast",
    "Fragment",
    "Generation",
    "GradientError",
    "HeadScores",
    "Hook",
    "HookCache",
    "HookError",
    "HookPoint",
    "HookSpec",
    "InputError",
    "Intervention",
    "InterventionError",
    "JacobianLens",
    "KVCache",
    "Knob",
    "KnockoutSpec",
    "LayerCache",
    "LayerLoopWarning",
    "LensResult",
    "LogitDiffs",
    "Logits",
    "MIError",
    "MIModel",
    "MatrixLosses",
    "ModelError",
    "ModelLosses",
    "ModelSizes",
    "Monitor",
    "Noise",
    "Options",
    "OtherSpellingWarning",
    "Patchscope",
    "Predictions",
    "ProbeResult",
    "RWKVState",
    "RangeReport",
    "Report",
    "RuntimeMissingError",
    "Saliency",
    "ShortTextWarning",
    "Spans",
    "SparseProbes",
    "SpecFileError",
    "StateAblationResult",
    "StateKnockoutSpec",
    "StateSteeringSpec",
    "Statistics",
    "SteeringCalibration",
    "Subspace",
    "SubspaceEffect",
    "TextStreamer",
    "TokenChange",
    "TokenPairs",
    "TokenizerError",
    "Tokens",
    "TranscoderSet",
    "UnknownImportError",
    "UnknownKeywordError",
    "UnknownNameError",
    "UnknownWordWarning",
    "Verification",
    "create_knockout_mask",
    "probe",
    "sample_token",
    "sparse_probe",
    "statistics_of",
]

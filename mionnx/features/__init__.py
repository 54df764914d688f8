"""Features: sparse autoencoders and transcoders as parts of the graph."""

from mionnx.features.activations import FeatureActivations
from mionnx.features.sae import SAE
from mionnx.features.verbs import Features

__all__ = ["SAE", "FeatureActivations", "Features"]

"""Steering: directions from contrasting prompts, how strong they must be, and what they do."""

from mionnx.steering.calibration import SteeringCalibration
from mionnx.steering.directions import Direction, Directions
from mionnx.steering.dose import DoseResponse
from mionnx.steering.verbs import Steering

__all__ = ["Direction", "Directions", "DoseResponse", "Steering", "SteeringCalibration"]

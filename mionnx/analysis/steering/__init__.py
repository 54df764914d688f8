"""Steering directions from contrasting prompts, their dose response and calibration."""

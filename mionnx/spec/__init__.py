"""Specs: captures, interventions and their kinds, and the spec file."""

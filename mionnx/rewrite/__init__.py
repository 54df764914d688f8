"""Rewrites: a graph and a plan in, another graph and a report out. One rewrite a file."""

from mionnx.graph.report import Report
from mionnx.rewrite.apply_plan import rewrite
from mionnx.rewrite.plan import CaptureNode, Edit, Plan

__all__ = ["CaptureNode", "Edit", "Plan", "Report", "rewrite"]

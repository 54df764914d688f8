"""Rewrites: a graph and a plan in, another graph and a report out. One rewrite a file."""

from mionnx.rewrite.plan import Edit, Plan, Report, Want
from mionnx.rewrite.run import rewrite

__all__ = ["Edit", "Plan", "Report", "Want", "rewrite"]

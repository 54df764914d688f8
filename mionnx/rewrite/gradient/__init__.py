"""Gradients by graph rewriting: nodes that go from a metric back to hook points, in standard operators."""

from mionnx.rewrite.gradient.differentiate import differentiate as differentiate

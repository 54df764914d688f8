"""Gradients of a metric at hook points, and attributions made of them."""

"""Models whose weights are blocks of 4 or 8 bits, made from models of floats."""

from mionnx.quantise.quantise import quantise
from mionnx.quantise.settings import BLOCK_DTYPES, Quantisation

__all__ = ["BLOCK_DTYPES", "Quantisation", "quantise"]

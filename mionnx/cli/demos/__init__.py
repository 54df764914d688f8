"""Worked examples of `mionnx demo`; each prints results that it computes, none is written down beforehand."""

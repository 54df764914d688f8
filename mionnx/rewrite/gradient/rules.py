"""The table of rules: operator -> the cotangents of its inputs from those of its outputs."""

from collections.abc import Mapping

from mionnx.rewrite.gradient.backward import Rule, SubgraphRule
from mionnx.rewrite.gradient.blocks import BLOCKS
from mionnx.rewrite.gradient.branches import if_rule
from mionnx.rewrite.gradient.elementwise import ELEMENTWISE
from mionnx.rewrite.gradient.loops import scan_rule
from mionnx.rewrite.gradient.products import PRODUCTS
from mionnx.rewrite.gradient.propagation import FROZEN_NORMS, FROZEN_PATTERNS, SHARES
from mionnx.rewrite.gradient.reductions import REDUCTIONS
from mionnx.rewrite.gradient.shaping import SHAPING

RULES: Mapping[str, Rule] = {**ELEMENTWISE, **BLOCKS, **PRODUCTS, **REDUCTIONS, **SHAPING}
SUBGRAPH_RULES: Mapping[str, SubgraphRule] = {"If": if_rule, "Scan": scan_rule}
# Name of a set of rules -> the rules.
SETS: Mapping[str, Mapping[str, Rule]] = {
    "gradient": RULES,
    "frozen_norm": {**RULES, **FROZEN_NORMS},
    "relp": {**RULES, **FROZEN_NORMS, **SHARES},
    "relp_frozen_pattern": {**RULES, **FROZEN_NORMS, **SHARES, **FROZEN_PATTERNS},
    "frozen_norm_pattern": {**RULES, **FROZEN_NORMS, **FROZEN_PATTERNS},
}

"""Range and rounding of a model's numbers: what a narrower dtype cannot hold, what that costs, and a cure."""

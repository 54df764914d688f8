"""Direct logit attribution, and the decomposition of the residual stream."""

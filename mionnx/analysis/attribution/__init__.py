"""Direct logit attribution, and the residual stream as a sum of its parts."""

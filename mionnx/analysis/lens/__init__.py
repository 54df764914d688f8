"""The logit lens, and tokens as vectors: reading the residual stream with the model's own head."""

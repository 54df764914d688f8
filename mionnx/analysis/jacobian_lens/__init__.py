"""Linear maps from a layer's residual stream to the last one's: Jacobian, relevance, tuned and ridge lenses."""

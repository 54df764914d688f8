"""Statistics of hook points over a dataset: count, mean, variance and covariance, in one pass."""

"""A spec bound to a model: the structure of its graph, and the inputs of each token batch."""

"""Python functions as hooks: the graph is cut at the hooked values."""

"""Running a model: forward passes, generation, the open graphs, and the search for a model's folder."""

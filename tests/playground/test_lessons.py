"""The prepared examples: what their texts claim, as the page runs them and as Python does."""

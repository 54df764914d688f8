"""Linear probes on harvested activations, with scores on texts that they were not fitted on."""

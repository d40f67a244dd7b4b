"""How a model is trained: from which weights, by which optimizer, for what."""

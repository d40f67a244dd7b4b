"""The steps that a builder computes on towers: Keras's, or the model's own."""

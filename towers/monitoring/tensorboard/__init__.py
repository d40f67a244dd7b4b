"""Shows a run in TensorBoard."""

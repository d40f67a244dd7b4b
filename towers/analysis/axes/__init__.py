"""Rules for operations on tensors that have an axis of the examples."""

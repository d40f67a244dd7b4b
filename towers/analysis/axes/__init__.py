"""What operations make of tensors that have an axis of the examples."""

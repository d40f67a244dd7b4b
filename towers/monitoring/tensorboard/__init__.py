"""Shows a run in TensorBoard."""

AFTER_TRAINING = ".after_training"
"""How the name of an event file ends that is written once training is over."""

"""Makes a SavedModel of a trained model, which takes files as they are."""

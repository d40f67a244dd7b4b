"""Starts programs, reads their flags and prints messages, all without TensorFlow."""

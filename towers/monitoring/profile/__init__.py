"""Traces of TensorFlow's profiler."""

"""Keras layers and variables that towers handle differently from Keras."""

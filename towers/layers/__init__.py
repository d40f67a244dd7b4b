"""Keras layers that towers compute in another way than Keras."""

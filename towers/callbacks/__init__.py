"""Keras callbacks, for any Keras model, that watch, write and save a run."""

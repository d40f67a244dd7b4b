"""Keras callbacks, for any Keras model, that watch, write and save a run."""

from towers.callbacks.checkpoint import Checkpoint

__all__ = ["Checkpoint"]

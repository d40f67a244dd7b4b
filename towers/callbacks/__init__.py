"""Keras callbacks that watch, write and save a run."""

from towers.callbacks.checkpoint import Checkpoint
from towers.callbacks.stall import Stall

__all__ = ["Checkpoint", "Stall"]

"""Hides what TensorFlow logs as it loads kept results of XLA, which is no error."""

from towers.program.startup import quiet_loading

__all__ = ["quiet_loading"]

"""Hides what TensorFlow logs as it loads kept results of XLA, which is no error.

It stands apart from the core, as `startup` imports much, and few runs need this.
"""

from towers.program.startup import quiet_loading

__all__ = ["quiet_loading"]

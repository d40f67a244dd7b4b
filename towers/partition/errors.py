"""Errors of functions that towers cannot partition, which name the user's line."""

import os
import sys

import tensorflow as tf

from towers.tower.errors import ModelError

# Whose lines tell a user nothing.
_LIBRARIES = "keras", "tensorflow", "towers"


class PartitionError(ModelError):
    """A function of a batch does something that several towers cannot do together."""


def where(op: tf.Operation) -> str:
    """Returns the line of the user's that made an operation, as a phrase, or ""."""
    known = [
        os.path.dirname(sys.modules[name].__file__) + os.sep
        for name in _LIBRARIES
        if name in sys.modules
    ]
    for frame in reversed(op.traceback or ()):
        file, line = frame[0], frame[1]
        if not any(os.path.abspath(file).startswith(folder) for folder in known):
            return f" at {file}:{line}"
    return ""

"""Input: from a data set's name to batches of uint8 images and int64 labels.

A *source* knows where the records are and how to decode one; the *pipeline* orders the
``tf.data`` stages around it; the *checks* find bad records, and the *quarantine* passes
them over. The caller decides how batches reach the towers: nothing here knows of models
or devices.
"""

from towers.program import lazy

# TensorFlow takes seconds to import, and programs have things to do before it: the
# names in __init__.pyi are imported when they are first used.
__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

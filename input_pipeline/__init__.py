"""Input: from a data set's name to batches of uint8 images and int64 labels.

A *source* knows where the records are and how one record is decoded; the
*pipeline* orders the ``tf.data`` stages around it; the *checks* say which record is
bad, the *quarantine* which are passed over. How batches reach the towers is left to the
caller: nothing here knows of models or devices.
"""

from towers.program import lazy

# TensorFlow takes seconds to import, and programs have things to do before it: what
# __init__.pyi lists is imported when it is asked for.
__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

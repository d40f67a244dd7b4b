"""Input: from a data set's name to batches of float32 images and int64 labels.

A *source* knows where the records are and how one record is decoded; the
*pipeline* orders the ``tf.data`` stages around it; the *checks* say which record is
bad. How batches reach the towers is left to the caller: nothing here knows of models
or devices.
"""

from input_pipeline.checks import find_bad_record, scan_labels
from input_pipeline.pipeline import make_dataset
from input_pipeline.sources import Source, open_source
from input_pipeline.sources.arrays import ArraySource

__all__ = [
    "ArraySource",
    "Source",
    "find_bad_record",
    "make_dataset",
    "open_source",
    "scan_labels",
]

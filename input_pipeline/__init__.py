"""Input: from a data set's name to batches of uint8 images and int64 labels.

A *source* knows where the records are and how one record is decoded; the
*pipeline* orders the ``tf.data`` stages around it; the *checks* say which record is
bad, the *quarantine* which are passed over. How batches reach the towers is left to the
caller: nothing here knows of models or devices.
"""

from input_pipeline import quarantine
from input_pipeline.augment import normalize
from input_pipeline.cache import CACHES, cached, free_memory
from input_pipeline.checks import blame_records, find_bad_record, scan_labels
from input_pipeline.mix import Mix
from input_pipeline.pipeline import Pipeline, make_dataset
from input_pipeline.recipes import RECIPES
from input_pipeline.report import ADVICE
from input_pipeline.sources import Source, open_source
from input_pipeline.sources.arrays import ArraySource
from input_pipeline.sources.base import BadRecordError

__all__ = [
    "ADVICE",
    "CACHES",
    "RECIPES",
    "ArraySource",
    "BadRecordError",
    "Mix",
    "Pipeline",
    "Source",
    "blame_records",
    "cached",
    "find_bad_record",
    "free_memory",
    "make_dataset",
    "normalize",
    "open_source",
    "quarantine",
    "scan_labels",
]

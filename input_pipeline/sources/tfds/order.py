"""The order in which TFDS reads records, for places of records instead of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from towers.input_pipeline.sources.examples.record_index import RecordIndex
from towers.input_pipeline.sources.files.file_source import shuffle_all


def named_places(
    instructions: Sequence[Any],
    index: RecordIndex,
    config: tfds.ReadConfig,
    shuffle_seed: tf.Tensor | None,
) -> tf.data.Dataset:
    """The names that TFDS gives to records, and their places.

    Args:
        instructions: TFDS's, of files in one folder.
        index: of these files.
        config: how TFDS interleaves files.
        shuffle_seed: of their order; None for their fixed order.
    """
    files = tf.data.Dataset.from_tensor_slices(
        {
            "file": np.arange(len(instructions)),
            "name": [part.basename() for part in instructions],
            "skip": np.array([part.skip for part in instructions], np.int64),
            "take": np.array([part.take for part in instructions], np.int64),
        }
    )

    def read(part):
        places = index.of_file(part["file"]).skip(part["skip"]).take(part["take"])

        def named(number, place):
            parts = [part["name"], tf.strings.as_string(number)]
            return tf.strings.join(parts, separator="__"), place

        return places.enumerate(part["skip"]).map(named)

    return shuffle_all(files, len(instructions), shuffle_seed).interleave(
        read,
        cycle_length=config.interleave_cycle_length,
        block_length=config.interleave_block_length,
        num_parallel_calls=config.num_parallel_calls_for_interleave_files,
        deterministic=True,
    )

"""Follows TFDS's order of records, for their names and places."""

from collections.abc import Callable, Sequence
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
    """Returns the names that TFDS gives to records, and their places.

    Args:
        instructions: TFDS's instructions, for files in one folder.
        index: the index of these files.
        config: TFDS's configuration of interleaving.
        shuffle_seed: the seed of the files' order; None for their fixed order.
    """

    def places(part):
        return index.of_file(part["file"]).skip(part["skip"]).take(part["take"])

    return _named(instructions, places, config, shuffle_seed)


def names(instructions: Sequence[Any], config: tfds.ReadConfig) -> tf.data.Dataset:
    """Returns the names in their fixed order, in tuples; see ``named_places``."""

    def nothing(part):
        return tf.data.Dataset.range(part["take"])

    return _named(instructions, nothing, config, None)


def _named(
    instructions: Sequence[Any],
    records_of: Callable[[dict[str, tf.Tensor]], tf.data.Dataset],
    config: tfds.ReadConfig,
    shuffle_seed: tf.Tensor | None,
) -> tf.data.Dataset:
    files = tf.data.Dataset.from_tensor_slices(
        {
            "file": np.arange(len(instructions)),
            "name": [part.basename() for part in instructions],
            "skip": np.array([part.skip for part in instructions], np.int64),
            "take": np.array([part.take for part in instructions], np.int64),
        }
    )

    def read(part):
        def named(number, record):
            parts = [part["name"], tf.strings.as_string(number)]
            return tf.strings.join(parts, separator="__"), record

        return records_of(part).enumerate(part["skip"]).map(named)

    return shuffle_all(files, len(instructions), shuffle_seed).interleave(
        read,
        cycle_length=config.interleave_cycle_length,
        block_length=config.interleave_block_length,
        num_parallel_calls=config.num_parallel_calls_for_interleave_files,
        deterministic=True,
    )

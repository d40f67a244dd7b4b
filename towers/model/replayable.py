"""Batches that are read more than once."""

import itertools
from collections.abc import Iterator

import tensorflow as tf

from towers.loop import ahead, loop
from towers.program.python_calls import until_exit


class ReplayableBatches:
    """The batches of one call of training, which is handed an iterator, read once.

    They are taken out of it. What reads them instead loses nothing of the data.

    Attributes:
        first: The first of them.
    """

    def __init__(self, iterator: Iterator, steps: int):
        """Takes `steps` batches from an iterator, or fewer at the end of the data.

        Raises:
            StopIteration: If there is none left.
        """
        waiting = ahead.taken(iterator, steps)
        more = itertools.islice(iterator, steps - len(waiting))
        self._batches = [*waiting, *more]
        if not self._batches:
            raise StopIteration
        self._spec = getattr(iterator, "element_spec", None)
        self.first = loop.without_optionals(self._batches[0])

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, repeat: bool = False) -> Iterator:
        """Returns an iterator over them, of the kind that they came from.

        With `repeat`, it begins again after the last, for ever.
        """
        if self._spec is not None:
            data = tf.data.Dataset.range(len(self)).map(self._batch)
            # From memory, a batch costs next to nothing.
            return iter(data.cache().repeat() if repeat else data)
        return itertools.cycle(self._batches) if repeat else iter(self._batches)

    @tf.autograph.experimental.do_not_convert
    def _batch(self, index):
        """A batch as an element of a data set, of the type that it came from.

        Not by `Dataset.from_generator`; `input_pipeline/pipeline/epochs.py` says why.
        """

        @until_exit
        def components(index):
            return loop.flat(self._batches[int(index)])

        specs = tf.nest.flatten(self._spec, expand_composites=True)
        dtypes = [spec.dtype for spec in specs]
        tensors = tf.py_function(components, [index], dtypes)
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(self._spec, tensors, expand_composites=True)

"""The first call of training: it tries ways to update, and falls back from XLA.

Both need the batches of that call more than once, while Keras hands out an iterator
that is read once. So they are taken out of it, and what follows reads them as often as
it likes: nothing of the data is lost.
"""

import gc
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import auto, loop, variables
from towers.builders.base import Builder

# What tells most of what TensorFlow says where XLA cannot compile; and where a tower
# reads a variable on another device, as it is handed the values of the model's only.
_XLA_WORDS = "XLA", "compil", "jit"
_ELSEWHERE = "Trying to access resource"


class Batches:
    """The batches of one call, to be read again and again.

    Attributes:
        first: The first of them.
    """

    def __init__(self, iterator: Iterator, steps: int):
        """Takes batches from an iterator.

        Args:
            iterator: What Keras calls a train function with.
            steps: How many to take; at the end of the data there may be fewer.

        Raises:
            StopIteration: If there is none left.
        """
        self._batches = list(itertools.islice(iterator, steps))
        if not self._batches:
            raise StopIteration
        self._spec = getattr(iterator, "element_spec", None)
        self.first = loop.without_optionals(self._batches[0])

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, repeat: bool = False) -> Iterator:
        """Returns an iterator over them, of the kind that they came from.

        Args:
            repeat: Whether to begin again after the last, for ever.
        """
        if self._spec is not None:
            data = tf.data.Dataset.range(len(self)).map(self._batch)
            # From memory, a batch costs next to nothing.
            return iter(data.cache().repeat() if repeat else data)
        return itertools.cycle(self._batches) if repeat else iter(self._batches)

    def _batch(self, index):
        """A batch as an element of a data set, of the type that it came from.

        Not by `Dataset.from_generator`; ARCHITECTURE.md says why.
        """

        def components(index):
            return loop.flat(self._batches[int(index)])

        specs = tf.nest.flatten(self._spec, expand_composites=True)
        dtypes = [spec.dtype for spec in specs]
        tensors = tf.py_function(components, [index], dtypes)
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(self._spec, tensors, expand_composites=True)


def train_or_fall_back(
    builder: Builder, train: Callable[[], Callable[[Iterator], Any]], batches: Batches
) -> tuple[Callable[[Iterator], Any], Any]:
    """Makes the first call of a train function; without XLA if it fails with it.

    Args:
        builder: The builder, whose variables exist.
        train: Makes the builder's train function.
        batches: The batches of the call.

    Returns:
        The function to go on with, and the logs.

    Raises:
        tf.errors.OpError: What is raised without XLA, too.
    """
    if not builder.compiles_update:
        function = train()
        return function, function(batches.read())
    start, failed, what = variables.values(builder.model), None, None
    while True:
        try:
            function = train()
            logs = function(batches.read())
            break
        except tf.errors.OutOfRangeError:
            raise  # the end of the data
        except tf.errors.OpError as error:
            # Not all of them name XLA: libdevice is missing, or memory runs out.
            if not builder.compiles_update:
                raise
            failed = failed or error
        # The update alone may do.
        less = None if builder.xla else False
        what = what or ("model" if builder.xla else "the update of model")
        variables.assign(builder.model, start)
        builder.forget()
        builder.xla = less
    builder.compiled = builder.xla
    if failed is not None:
        name = f"{what} '{builder.model.name}'"
        say(f"XLA cannot compile {name}, which goes on without: {_why(failed)}")
    return function, logs


def try_ways(
    ways: Sequence[auto.Choice],
    make: Callable[[auto.Choice], Callable[[Iterator], Any]],
    batches: Batches,
    builder: Builder,
    start_s: float,
) -> list[auto.Trial]:
    """Tries ways to update the variables, on the first batches; changes no variable.

    Args:
        ways: The candidates.
        make: Makes a candidate's train function.
        batches: The batches of the first call.
        builder: That has made the first call, so that all variables exist.
        start_s: Seconds that the first candidate's first call took.

    Returns:
        What became of each; see `auto.choose`.
    """

    def train(way):
        function, data = make(way), batches.read(repeat=True)
        return lambda: function(data)

    others = variables.beside(builder.model, builder.graph)
    with variables.unchanged(builder.model, others):
        trials = auto.choose(ways, train, len(batches), start_s)
    gc.collect()  # graphs, and copies of variables, that nobody needs any more
    return trials


def say(text: str) -> None:
    """Prints, unless Keras is asked to be silent."""
    keras.src.utils.io_utils.print_msg(text)


def _why(error):
    """The line of an error of XLA that tells most."""
    if found := re.search(rf"{_ELSEWHERE} (\S+)", str(error)):
        return f"a tower reads '{found[1]}', which is not a variable of the model"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    telling = [line for line in lines if any(word in line for word in _XLA_WORDS)]
    noise = r"^\(\d+\) \w+:\s*|graph __inference\S+ "
    return re.sub(noise, "", (telling or lines)[0])[:200]

"""The first call of training: it tries ways to update, and falls back from what fails.

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

from towers.builders.base import Builder
from towers.layers import variables
from towers.loop import loop
from towers.model import auto
from towers.program.voice import say

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
    builder: Builder,
    train: Callable[[], Callable[[Iterator], Any]],
    batches: Batches,
    simpler: Callable[[str], Builder] | None = None,
) -> tuple[Callable[[Iterator], Any], Any]:
    """Makes the first call of a train function; by less if it fails.

    Args:
        builder: The builder, whose variables exist.
        train: Makes the train function of the builder in use.
        batches: The batches of the call.
        simpler: Takes what is wrong, says so, and puts a simpler builder in use; `None`
            if there is none.

    Returns:
        The function to go on with, and the logs.

    Raises:
        tf.errors.OpError: What is raised without XLA, and by the simpler builder, too.
    """
    if not (builder.compiles_update or simpler):
        function = train()
        return function, function(batches.read())
    model, said = builder.model, None
    start = variables.values(model)
    while True:
        try:
            function = train()
            logs = function(batches.read())
            break
        except tf.errors.OutOfRangeError:
            raise  # the end of the data
        except tf.errors.OpError as error:
            # Not all of XLA's name it: libdevice is missing, or memory runs out.
            if not (builder.compiles_update or simpler):
                raise
            why = _why(error)
        variables.assign(model, start)
        if builder.compiles_update:
            what = "model" if builder.xla else "the update of model"
            what = f"XLA cannot compile {what} '{model.name}'"
            said = said or f"{what}, which goes on without: {why}"
            # The update alone may do.
            less = None if builder.xla else False
            builder.reset_traces()
            builder.xla = less
        else:
            # It was not XLA.
            builder, simpler, said = simpler(why), None, None
    builder.compiled = builder.xla
    if said is not None:
        say(said)
    return function, logs


def try_ways(
    ways: Sequence[auto.Choice],
    make: Callable[[auto.Choice], Callable[[Iterator], Any]],
    drop: Callable[[auto.Choice], None],
    batches: Batches,
    model: keras.Model,
    others: Sequence[tf.Variable],
    start_s: float,
    calls: int,
) -> list[auto.Trial]:
    """Tries ways to update the variables, on the first batches; changes no variable.

    Args:
        ways: The candidates, of which the first has made the first call: all variables
            exist.
        make: Makes a candidate's train function.
        drop: Gives up all that a candidate is made of.
        batches: The batches of the first call.
        model: The model.
        others: What a step changes beside the model's variables.
        start_s: Seconds that the first candidate's first call took.
        calls: Calls that are left in the run.

    Returns:
        What became of each; see `auto.choose`.
    """

    def train(way):
        function, data = make(way), batches.read(repeat=True)
        return lambda: function(data)

    def drop_at_once(way):
        drop(way)
        gc.collect()  # graphs, and copies of variables

    with variables.unchanged(model, others):
        return auto.choose(ways, train, len(batches), start_s, calls, drop_at_once)


def _why(error):
    """The line of an error of TensorFlow's that tells most."""
    if found := re.search(rf"{_ELSEWHERE} (\S+)", str(error)):
        return f"a tower reads '{found[1]}', which is not a variable of the model"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    telling = [line for line in lines if any(word in line for word in _XLA_WORDS)]
    noise = r"^\(\d+\) \w+:\s*|graph __inference\S+ "
    return re.sub(noise, "", (telling or lines)[0])[:200]

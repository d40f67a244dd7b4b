"""The first call of training tries ways to update, and falls back if one fails.

Both read the batches of that call more than once, from `ReplayableBatches`.
"""

import contextlib
import gc
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers.builders.builder import Builder
from towers.layers import variables
from towers.loop import loop
from towers.model import auto
from towers.model.auto import Choice
from towers.model.program import Program
from towers.program import words
from towers.program.python_calls import until_exit
from towers.program.voice import say

# Words of informative lines in TensorFlow's errors of XLA; and the error of a tower
# that reads a variable on another device, as towers get the model's values only.
_XLA_WORDS = "XLA", "compil", "jit"
_ELSEWHERE = "Trying to access resource"

# The function that Keras calls with an iterator over batches; returns logs.
TrainFunction = Callable[[Iterator], Any]


class ReplayableBatches:
    """The batches of one call of training, which can be read several times.

    They are taken from the iterator of the call, so no data are lost.

    Attributes:
        first: The first batch.
    """

    def __init__(self, iterator: Iterator, steps: int):
        """Takes `steps` batches from an iterator, or fewer at the end of the data.

        Raises:
            StopIteration: There are no batches left.
        """
        waiting = loop.taken(iterator, steps)
        more = itertools.islice(iterator, steps - len(waiting))
        self._batches = [*waiting, *more]
        if not self._batches:
            raise StopIteration
        self._spec = getattr(iterator, "element_spec", None)
        self.first = loop.without_optionals(self._batches[0])

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, repeat: bool = False) -> Iterator:
        """Returns an iterator over the batches, of the type that they came from.

        With `repeat`, the iterator starts again after the last batch, endlessly.
        """
        if self._spec is not None:
            data = tf.data.Dataset.range(len(self)).map(self._batch)
            # Batches from memory cost next to nothing.
            return iter(data.cache().repeat() if repeat else data)
        return itertools.cycle(self._batches) if repeat else iter(self._batches)

    @tf.autograph.experimental.do_not_convert
    def _batch(self, index):
        """Returns a batch as an element of a data set, of its original type.

        Not by `Dataset.from_generator`; see `input_pipeline/pipeline/pipeline.py`.
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


class FirstCall:
    """A call of training that chooses how the variables are updated.

    It installs the first way, or the one that was chosen before, and makes the call. If
    the call fails, it falls back to a simpler way. Then it measures the other ways, and
    restores the variables.
    """

    def __init__(
        self,
        program: Program,
        iterator: Iterator,
        train_function: Callable[[Builder], TrainFunction],
        calls_left: Callable[[], int],
    ):
        """Takes the batches of the call.

        Args:
            program: Holds the current builder, which this call chooses.
            iterator: The argument of the train function.
            train_function: Makes the function of a builder.
            calls_left: Returns the number of calls left; 0 if not known.
        """
        self._program = program
        self._batches = ReplayableBatches(iterator, program.model.steps_per_execution)
        self._make_function = train_function
        self._calls_left = calls_left
        self._function: TrainFunction | None = None

    def run(self) -> tuple[TrainFunction, Any]:
        """Makes the call.

        Returns:
            The function to continue with, and the logs.

        Raises:
            tf.errors.OpError: The call fails without XLA and with the simplest way.
        """
        program = self._program
        ways = auto.of_all_hosts(program.ways(), program.builder.plan.hosts)
        made_for, recalled = self._start(ways)
        compiles, begun_s = program.builder.compiles_update, self._clock()
        logs = self._train_or_fall_back()
        start_s = self._clock() - begun_s
        if compiles and not program.builder.compiles_update:
            # If XLA cannot compile one way, it cannot compile the others.
            program.xla, ways = False, [way for way in ways if not way.xla]
        program.chosen = True
        used = program.choice._replace(xla=program.builder.xla)
        if len(ways) > 1 and not recalled and used in ways:
            failed = not used.adds_like(ways[0])
            others = [way for way in ways if way != used]
            others = [w for w in others if not (failed and w.adds_like(ways[0]))]
            try:
                trials = self._try([used, *others], start_s)
            except BaseException:
                # Ctrl-C, say. Nothing is chosen, so the next `fit` measures anew.
                program.install(ways[0], self._batches.first)
                program.chosen = False
                raise
            if program.builder.plan.hosts.index == 0:
                auto.remember(program.config.choice_file, made_for, trials)
        function, self._function = self._function, None
        return function, logs

    def _clock(self):
        """Returns seconds of the first host's clock, so that all hosts choose alike."""
        return self._program.builder.plan.hosts.broadcast_value(time.perf_counter())

    def _start(self, ways: Sequence[Choice]) -> tuple[Any, bool]:
        """Installs the first way, or the one chosen before under the same conditions.

        Returns:
            The conditions of the choice, as JSON; and whether it was made before.
        """
        program = self._program
        if ways and not program.choice.adds_like(ways[0]):
            program.install(ways[0], self._batches.first)
        else:
            program.create_first(self._batches.first)
        if not ways:
            return None, False
        made_for = self._describe(ways)
        recalled = auto.recall(program.config.choice_file, made_for, ways)
        recalled = program.builder.plan.hosts.broadcast_value(recalled)
        if recalled is not None:
            recalled = Choice(*recalled)
            program.install(recalled, self._batches.first)
            say(f"Updating variables by {recalled}, as chosen before.")
        return made_for, recalled is not None

    def _describe(self, ways):
        model, builder = self._program.model, self._program.builder
        batch = tf.nest.flatten(self._batches.first)
        return {
            "tensorflow": tf.__version__,
            "parameters": model.count_params(),
            "optimizer": type(model.optimizer).__name__,
            "policy": str(model.dtype_policy.name),
            "steps_per_execution": model.steps_per_execution,
            "batch": [str(tensor.shape) for tensor in batch if tensor is not None],
            "devices": [*builder.plan.devices],
            "local_parameter_device": builder.plan.home,
            "split_ratios": [*builder.plan.split_ratios],
            "candidates": [str(way) for way in ways],
        }

    def _train_or_fall_back(self):
        """Makes the call; on failure, retries without XLA, then in the simplest way."""
        program, line_to_print = self._program, None
        first, simplest = program.choice, Choice()
        simpler = not (program.chosen or program.told) and (
            first.variable_update != simplest.variable_update
        )
        start = None
        if program.builder.compiles_update or simpler:
            start = variables.values(program.model)
        while True:
            try:
                logs = self._train()
                break
            except tf.errors.OutOfRangeError:
                raise  # The data have ended.
            except tf.errors.OpError as error:
                # Not all errors of XLA name it: a missing libdevice, no memory left.
                if not (program.builder.compiles_update or simpler):
                    raise
                why = _why(error)
            variables.assign(program.model, start)
            if program.builder.compiles_update:
                line = self._without_xla(why)
                line_to_print = line_to_print or line
            else:
                # XLA was not the cause.
                simpler, line_to_print = False, None
                say(f"The variables are updated by {simplest}, as {first} fails: {why}")
                program.install(simplest, self._batches.first)
        if start is not None:
            program.builder.context.facts.compiled = program.builder.xla
        if line_to_print is not None:
            say(line_to_print)
        return logs

    def _train(self):
        self._function = self._make_function(self._program.builder)
        return self._function(self._batches.read())

    def _without_xla(self, why):
        """Lets XLA compile less; returns a line to print if that helps."""
        builder = self._program.builder
        description = "model" if builder.xla else "the update of model"
        # Compiling the update alone may work.
        less = None if builder.xla else False
        builder.reset_traces()
        builder.xla = less
        description = f"XLA cannot compile {description} '{builder.model.name}'"
        return f"{description}, which goes on without: {why}"

    def _try(self, ways: Sequence[Choice], start_s: float) -> list[auto.CandidateTrial]:
        """Tries ways, the first of which is installed, and continues with the best."""
        program, model = self._program, self._program.model
        unsaved = program.builder.context.facts.unsaved
        others = [*variables.plain(model).values(), *unsaved]
        guard = program.builder.guard
        made = {ways[0]: (program.builder, self._function, program.state())}
        # Dropped at once if not in use, as each way may have its own copies.
        self._function = None

        def train(way):
            if way not in made:
                program.install(way, self._batches.first, on_trial=True)
                function = self._make_function(program.builder)
                made[way] = program.builder, function, program.state()
            function, data = made[way][1], self._batches.read(repeat=True)
            return lambda: function(data)

        def drop(way):
            made.pop(way, None)
            ((program.builder, *_),) = made.values()
            gc.collect()  # graphs, and copies of variables

        disarmed = contextlib.nullcontext() if guard is None else guard.disarmed()
        with disarmed, variables.unchanged(model, others):
            steps, calls = len(self._batches), self._calls_left()
            on_gpus = program.builder.plan.on_gpus
            limit = {} if on_gpus else {"most_s": auto.ON_CPUS_S}
            trials = auto.choose(
                ways, train, steps, start_s, calls, drop, clock=self._clock, **limit
            )
        for line in auto.lines(trials):
            say(line)
        ((program.choice, (program.builder, self._function, state)),) = made.items()
        # Of the ways that were not chosen, only their times are printed.
        program.builder.context.release()
        if program.differs(state):
            # The variables have moved since.
            program.install(program.choice, self._batches.first)
            self._function = self._make_function(program.builder)
        program.builder.mark_copies_stale()
        return trials


def _why(error):
    """Returns the most informative line of an error of TensorFlow."""
    if match := re.search(rf"{_ELSEWHERE} (\S+)", str(error)):
        return f"a tower reads '{match[1]}', which is not a variable of the model"
    return words.error_line(error, _XLA_WORDS)[:200]

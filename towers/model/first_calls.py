"""The first calls of training choose how the variables are updated.

The first call begins with the likeliest way at once. If that fails, a simpler way makes
the call again, with the same batches. Then the ways race on the run's next batches, and
the fastest one stays. The contest (`auto.py`) says which way makes the next call, and
this module makes the call.

No step is lost, and none is repeated: all ways compute the same up to rounding, so each
call trains the model. Only a candidate that fails in its first call gives the variables
back, and the best way so far trains on these batches. At most two ways are alive at a
time, the best and a candidate, as each may have copies of the variables.

A candidate is traced in the call of training that it makes. A thread could not trace it
meanwhile: a trace of a Keras model puts other values behind the model's variables for a
moment, and callbacks would see these. TensorFlow compiles what it runs only.
"""

import contextlib
import gc
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.builders.builder import Builder
from towers.hosts.group import SignalReceived
from towers.layers import variables
from towers.loop import loop
from towers.model import auto
from towers.model.auto import Choice, Contest
from towers.model.program import Program
from towers.plan import Plan
from towers.program import compilation_cache, words
from towers.program.features import feature
from towers.program.python_calls import until_exit
from towers.program.voice import say

# Words of informative lines in TensorFlow's errors of XLA; and the error of a tower
# that reads a variable on another device, as towers get the model's values only.
_XLA_WORDS = "XLA", "compil", "jit", "Serialized"
_ELSEWHERE = "Trying to access resource"
# Errors by which hosts end a call alike; they say nothing of the way that makes it.
_ENDS = SignalReceived, tf.errors.OutOfRangeError

# The function that Keras calls with an iterator over batches; returns logs.
TrainFunction = Callable[[Iterator], Any]
MakeFunction = Callable[[Builder], TrainFunction]


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

    def read(self) -> Iterator:
        """Returns an iterator over the batches, of the type that they came from."""
        if self._spec is not None:
            return iter(tf.data.Dataset.range(len(self)).map(self._batch))
        return iter(self._batches)

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
    """A call of training that begins to choose how the variables are updated.

    It installs the first way, or the one that was chosen before, and makes the call. If
    the call fails, it falls back to a simpler way.
    """

    def __init__(
        self,
        program: Program,
        iterator: Iterator,
        make_function: MakeFunction,
        calls_left: Callable[[], int],
    ):
        """Takes the batches of the call.

        Args:
            program: Holds the current builder, which this call chooses.
            iterator: The argument of the train function.
            make_function: Makes the train function of a builder.
            calls_left: Returns the number of calls left; 0 if not known.
        """
        self._program = program
        self._batches = ReplayableBatches(iterator, program.model.steps_per_execution)
        self._make_function = make_function
        self._calls_left = calls_left

    def run(self) -> tuple[TrainFunction, "Race | None", Any]:
        """Makes the call.

        Returns:
            The function to continue with; the race that makes the next calls instead,
            if other ways are to be tried; and the logs.

        Raises:
            tf.errors.OpError: The call fails without XLA and with the simplest way.
        """
        program = self._program
        clock = _clock_of(program.builder.plan)
        ways = auto.of_all_hosts(program.ways(), program.builder.plan.hosts)
        made_for, recalled = self._start(ways)
        compiles, begun_s = program.builder.compiles_update, clock()
        if compiles or any(way.xla for way in ways):
            compilation_cache.use()
        function, logs = self._train_or_fall_back()
        compilation_cache.keep()
        start_s = clock() - begun_s
        if compiles and not program.builder.compiles_update:
            # If XLA cannot compile one way, it cannot compile the others.
            program.xla, ways = False, [way for way in ways if not way.xla]
        program.chosen = True
        used = program.choice._replace(xla=program.builder.xla)
        if len(ways) < 2 or recalled or used not in ways:
            return function, None, logs
        failed = not used.adds_like(ways[0])
        others = [way for way in ways if way != used]
        others = [w for w in others if not (failed and w.adds_like(ways[0]))]
        # On CPUs, steps are slow.
        limit = {} if program.builder.plan.on_gpus else {"most_s": auto.ON_CPUS_S}
        contest = auto.Contest([used, *others], start_s, self._calls_left(), **limit)
        race = Race(
            program, contest, function, self._make_function, self._batches, made_for
        )
        return function, race, logs

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
        """Makes the call; on failure, retries without XLA, then in the simplest way.

        Returns:
            The train function, and the logs.
        """
        program, line_to_print = self._program, None
        first, simplest = program.choice, Choice()
        simpler = not (program.chosen or program.told) and (
            first.variable_update != simplest.variable_update
        )
        start = None
        if program.builder.compiles_update or simpler:
            start = variables.values(program.model)
        while True:
            function = self._make_function(program.builder)
            try:
                with _quiet_loading():
                    logs = function(self._batches.read())
                break
            except tf.errors.OutOfRangeError:
                raise  # The data have ended.
            except tf.errors.OpError as error:
                # Not all errors of XLA name it: a missing libdevice, no memory left.
                if not (program.builder.compiles_update or simpler):
                    raise
                why = _why(error)
                if program.builder.compiles_update:
                    compilation_cache.doubt(error)
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
        return function, logs

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


class Race:
    """Makes the calls of training while ways to update the variables are compared.

    Attributes:
        best: The best way so far.
        moves: Whether ways have the variables on different devices.
    """

    def __init__(
        self,
        program: Program,
        contest: Contest,
        function: TrainFunction,
        make_function: MakeFunction,
        batches: ReplayableBatches,
        made_for: Any,
    ):
        """Begins with the way that has made the first call.

        Args:
            program: Holds the current builder, which the race switches.
            contest: Says which way makes each call.
            function: The train function of the current builder.
            make_function: Makes the train function of a builder.
            batches: The batches of the first call.
            made_for: The conditions of the choice, to remember it with.
        """
        self._program, self._contest = program, contest
        self._make_function, self._made_for = make_function, made_for
        self._first_batch, self._steps = batches.first, len(batches)
        self._first_way, self._clock = contest.best, _clock_of(program.builder.plan)
        builder = program.builder
        self._ways = {contest.best: _Way(builder, function, program.state())}
        # The next call's time counts if the call before was made by the same way in the
        # same epoch. A second call that would not count does, as an epoch may have only
        # one call.
        self._warm, self._uncounted, self.moves = False, None, False

    @property
    def best(self) -> Choice:
        """The best way so far."""
        return self._contest.best

    @property
    def changed(self) -> bool:
        """Whether the best way is another one than the first."""
        return self.best != self._first_way

    @property
    def over(self) -> bool:
        """Whether no way is left to try."""
        return self._contest.turn is None

    def train(self, iterator: Iterator) -> Any:
        """Makes a call of training; returns its logs.

        Args:
            iterator: An iterator over batches, as Keras passes it.
        """
        way = self._contest.turn
        if way in self._ways:
            self._switch(way)
            begun_s, counts = self._clock(), self._warm or self._uncounted == way
            logs = self._ways[way].function(iterator)
            self._warm, self._uncounted = True, None if counts else way
            self._contest.took(self._clock() - begun_s if counts else None)
        else:
            logs = self._start(way, iterator)
        self._drop_losers()
        return logs

    def interrupt(self) -> None:
        """Leaves out the time of the next call, with which an epoch begins."""
        self._warm = False

    def pause(self) -> None:
        """Continues with the best way so far, until the next call of training."""
        self.interrupt()
        self._switch(self.best)

    def abandon(self) -> None:
        """Continues with the best way so far, which is to be traced again."""
        self._program.use(self.best, self._ways[self.best].builder)
        self._program.builder.context.release()

    def end(self) -> TrainFunction:
        """Ends the race with the best way so far, and returns its train function.

        Prints and stores the choice if all ways had their turn.
        """
        self._ways = {self.best: self._ways[self.best]}
        self._switch(self.best)
        # The ways that were not chosen print only their times.
        self._program.builder.context.release()
        if self.over:
            trials = self._contest.trials(self._steps)
            for line in auto.lines(trials):
                say(line)
            if self._program.builder.plan.hosts.index == 0:
                file = self._program.config.choice_file
                auto.remember(file, self._made_for, trials)
        return self._ways[self.best].function

    def _start(self, way, iterator):
        """Makes a candidate's first call; if it fails, the best way makes the call."""
        program = self._program
        batches = ReplayableBatches(iterator, program.model.steps_per_execution)
        begun_s, model = self._clock(), program.model
        unsaved = program.builder.context.facts.unsaved
        others = [*variables.plain(model).values(), *unsaved]
        before = variables.values(model), [other.numpy() for other in others]
        self._warm, self._uncounted = False, None
        try:
            self._install(way)
            with _quiet_loading():
                logs = self._ways[way].function(batches.read())
        except BaseException as error:
            self._ways.pop(way, None)
            if not isinstance(error, Exception) or isinstance(error, _ENDS):
                # The next call may try this way again.
                self._switch(self.best)
                raise
            # Any error: the run can continue without this way.
            message = str(error).strip() or type(error).__name__
            self._contest.failed(message.splitlines()[0][:60])
        else:
            if program.differs(self._ways[self.best].state):
                # Each switch traces a way again.
                self.moves, self._contest.rounds = True, 1
            program.builder.context.facts.compiled = program.builder.xla
            compilation_cache.keep()
            self._contest.took(self._clock() - begun_s)
            return logs
        variables.assign(model, before[0])
        for variable, value in zip(others, before[1], strict=True):
            variable.assign(value)
        self._switch(self.best)
        return self._ways[self.best].function(batches.read())

    def _switch(self, way):
        """Makes a way the current one; its copies follow the model's variables."""
        kept, program = self._ways[way], self._program
        if program.builder is not kept.builder:
            self._warm = False
            program.use(way, kept.builder)
        if program.differs(kept.state):
            self._install(way)

    def _install(self, way):
        program = self._program
        program.install(way, self._first_batch, on_trial=True)
        function = self._make_function(program.builder)
        self._ways[way] = _Way(program.builder, function, program.state())

    def _drop_losers(self):
        """Frees the ways that have lost, with their graphs and copies of variables."""
        alive = {self.best, self._contest.candidate}
        if self._ways.keys() <= alive:
            return
        self._ways = {way: kept for way, kept in self._ways.items() if way in alive}
        self._switch(self.best)
        gc.collect()


class _Way(NamedTuple):
    """A way that can make calls.

    Attributes:
        builder: Its builder.
        function: Its train function.
        state: The state of the program that it was made for.
    """

    builder: Builder
    function: TrainFunction
    state: list[Any]


def _clock_of(plan: Plan) -> Callable[[], float]:
    """Returns a clock in seconds, the same on all hosts, so that they choose alike."""

    def clock():
        if plan.on_gpus:
            # A call returns before its last kernels have run.
            tf.test.experimental.sync_devices()
        return plan.hosts.broadcast_value(time.perf_counter())

    return clock


def _why(error):
    """Returns the most informative line of an error of TensorFlow."""
    if match := re.search(rf"{_ELSEWHERE} (\S+)", str(error)):
        return f"a tower reads '{match[1]}', which is not a variable of the model"
    return words.error_line(error, _XLA_WORDS)[:200]


def _quiet_loading():
    """Hides what TensorFlow logs as it loads kept results of XLA, if there are any."""
    if compilation_cache.has_any():
        return feature("program.quiet_xla").quiet_loading()
    return contextlib.nullcontext()

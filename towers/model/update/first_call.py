"""The first call of training: it tries ways to update, and falls back from what fails.

Both need the batches of that call more than once; see `ReplayableBatches`.
"""

import contextlib
import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers.builders.builder import Builder
from towers.layers import variables
from towers.model.update import auto
from towers.model.update.auto import Choice
from towers.model.update.variable_update import ReplayableBatches, VariableUpdate
from towers.program import words
from towers.program.voice import say

# What tells most of what TensorFlow says where XLA cannot compile; and where a tower
# reads a variable on another device, as it is handed the values of the model's only.
_XLA_WORDS = "XLA", "compil", "jit"
_ELSEWHERE = "Trying to access resource"

# What Keras calls with an iterator over batches; it returns logs.
TrainFunction = Callable[[Iterator], Any]


class FirstCall:
    """A call of training that chooses how the variables are updated.

    It installs the first way, or the one that was chosen before. It makes the call, and
    falls back to a simpler way if that fails. Then it measures the other ways, and
    restores the variables.
    """

    def __init__(
        self,
        update: VariableUpdate,
        iterator: Iterator,
        train_function: Callable[[Builder], TrainFunction],
        calls_left: Callable[[], int],
    ):
        """Takes the batches of the call.

        Args:
            update: How variables are updated: this call decides.
            iterator: What the train function was called with.
            train_function: Makes the function of a builder.
            calls_left: Returns how many calls there will be; 0 if that is not known.
        """
        self._update = update
        self._batches = ReplayableBatches(iterator, update.model.steps_per_execution)
        self._make_function = train_function
        self._calls_left = calls_left
        self._function: TrainFunction | None = None

    def run(self) -> tuple[TrainFunction, Any]:
        """Makes the call.

        Returns:
            The function to go on with, and the logs.

        Raises:
            tf.errors.OpError: What is raised without XLA, and by the simplest way, too.
        """
        update = self._update
        ways = _of_all_hosts(update.ways(), update.builder.plan.hosts)
        made_for, recalled = self._start(ways)
        compiles, begun_s = update.builder.compiles_update, self._clock()
        logs = self._train_or_fall_back()
        start_s = self._clock() - begun_s
        if compiles and not update.builder.compiles_update:
            # What XLA cannot do for one way, it cannot for the others.
            update.xla, ways = False, [way for way in ways if not way.xla]
        update.chosen = True
        used = update.choice._replace(xla=update.builder.xla)
        if len(ways) > 1 and not recalled and used in ways:
            failed = not used.adds_like(ways[0])
            others = [way for way in ways if way != used]
            others = [w for w in others if not (failed and w.adds_like(ways[0]))]
            try:
                trials = self._try([used, *others], start_s)
            except BaseException:
                # Ctrl-C, say. Nothing is chosen, so the next `fit` measures anew.
                update.install(ways[0], self._batches)
                update.chosen = False
                raise
            if update.builder.plan.hosts.index == 0:
                auto.remember(update.config.choice_file, made_for, trials)
        function, self._function = self._function, None
        return function, logs

    def _clock(self):
        """Seconds, by the first host's clock: so all hosts choose alike."""
        return self._update.builder.plan.hosts.broadcast_value(time.perf_counter())

    def _start(self, ways: Sequence[Choice]) -> tuple[Any, bool]:
        """Puts the first way in use, or the one that was chosen before for the same.

        Returns:
            What a choice is made for, as JSON; and whether it was made before.
        """
        update = self._update
        if ways and not update.choice.adds_like(ways[0]):
            update.install(ways[0], self._batches)
        else:
            update.create_first(self._batches)
        if not ways:
            return None, False
        made_for = self._describe(ways)
        recalled = auto.recall(update.config.choice_file, made_for, ways)
        recalled = update.builder.plan.hosts.broadcast_value(recalled)
        if recalled is not None:
            recalled = Choice(*recalled)
            update.install(recalled, self._batches)
            say(f"Updating the variables by {recalled}, as chosen before.")
        return made_for, recalled is not None

    def _describe(self, ways):
        model, builder = self._update.model, self._update.builder
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
        """Makes the call; if it fails, without XLA, and then by the simplest way."""
        update, said = self._update, None
        first, simplest = update.choice, Choice()
        simpler = not (update.chosen or update.told) and (
            first.variable_update != simplest.variable_update
        )
        start = None
        if update.builder.compiles_update or simpler:
            start = variables.values(update.model)
        while True:
            try:
                logs = self._train()
                break
            except tf.errors.OutOfRangeError:
                raise  # the end of the data
            except tf.errors.OpError as error:
                # Not all of XLA's name it: libdevice is missing, or memory runs out.
                if not (update.builder.compiles_update or simpler):
                    raise
                why = _why(error)
            variables.assign(update.model, start)
            if update.builder.compiles_update:
                line = self._without_xla(why)
                said = said or line
            else:
                # It was not XLA.
                simpler, said = False, None
                say(f"The variables are updated by {simplest}, as {first} fails: {why}")
                update.install(simplest, self._batches)
        if start is not None:
            update.builder.context.facts.compiled = update.builder.xla
        if said is not None:
            say(said)
        return logs

    def _train(self):
        self._function = self._make_function(self._update.builder)
        return self._function(self._batches.read())

    def _without_xla(self, why):
        """Has XLA compile less; returns what to say if that helps."""
        builder = self._update.builder
        what = "model" if builder.xla else "the update of model"
        # The update alone may do.
        less = None if builder.xla else False
        builder.reset_traces()
        builder.xla = less
        what = f"XLA cannot compile {what} '{builder.model.name}'"
        return f"{what}, which goes on without: {why}"

    def _try(self, ways: Sequence[Choice], start_s: float) -> list[auto.CandidateTrial]:
        """Tries ways, the first of which is in use, and goes on with the best."""
        update, model = self._update, self._update.model
        unsaved = update.builder.context.facts.unsaved
        others = [*variables.plain(model).values(), *unsaved]
        guard = update.builder.guard
        made = {ways[0]: (update.builder, self._function, update.state())}
        # What is out of use goes at once, as each way may have copies of its own.
        self._function = None

        def train(way):
            if way not in made:
                update.install(way, self._batches)
                function = self._make_function(update.builder)
                made[way] = update.builder, function, update.state()
            function, data = made[way][1], self._batches.read(repeat=True)
            return lambda: function(data)

        def drop(way):
            made.pop(way, None)
            ((update.builder, *_),) = made.values()
            gc.collect()  # graphs, and copies of variables

        disarmed = contextlib.nullcontext() if guard is None else guard.disarmed()
        with disarmed, variables.unchanged(model, others):
            steps, calls = len(self._batches), self._calls_left()
            on_gpus = update.builder.plan.on_gpus
            limit = {} if on_gpus else {"most_s": auto.ON_CPUS_S}
            trials = auto.choose(
                ways, train, steps, start_s, calls, drop, clock=self._clock, **limit
            )
        say(auto.table(trials))
        ((update.choice, (update.builder, self._function, state)),) = made.items()
        if update.differs(state):
            # The variables have been moved since.
            update.install(update.choice, self._batches)
            self._function = self._make_function(update.builder)
        update.builder.mark_copies_stale()
        return trials


def _of_all_hosts(ways, hosts):
    """Those that each host has, of which towers and libraries may differ."""
    told = hosts.exchange([[*way] for way in ways])
    return [way for way in ways if all([*way] in each for each in told)]


def _why(error):
    """The line of an error of TensorFlow's that tells most."""
    if found := re.search(rf"{_ELSEWHERE} (\S+)", str(error)):
        return f"a tower reads '{found[1]}', which is not a variable of the model"
    return words.error_line(error, _XLA_WORDS)[:200]

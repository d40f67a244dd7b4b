"""A Keras model whose steps run on towers.

Keras runs the training loop. The model differs from the user's only in its three steps,
which a builder computes on towers; `fit` and its siblings, callbacks, metrics and
saving are Keras's own.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import wrapt

from towers.builders.builder import Builder
from towers.builders.guard import StoppedStep
from towers.devices.names import HOST, is_gpu
from towers.hosts import group
from towers.hosts.group import HostsDifferError
from towers.keras_adapter import runtime
from towers.keras_adapter.datasets import free_aside
from towers.model import fit_call
from towers.model.first_calls import FirstCall, Race
from towers.model.fit_call import FitCall, given
from towers.model.program import Program
from towers.program import python_calls
from towers.program.features import feature
from towers.tower.errors import (
    explained_look_ups,
    explained_shapes,
    explained_stages,
)

# Methods that take many batches, besides `fit`; see `FitCall` for that.
_OF_MANY_BATCHES = "evaluate", "predict"
# The functions of Keras's loop, by their attribute names.
_FUNCTIONS = "train_function", "test_function", "predict_function"


class TowerModel(wrapt.CallableObjectProxy):
    """A Keras model whose steps run on towers: a proxy of the user's own model.

    All attributes are those of the model. But the methods of Keras's loop run with this
    object as `self`, and so call the builder's steps instead of the model's.
    """

    # Attributes that the loop sets on `self`, separate from the model's own.
    train_function = None
    test_function = None
    predict_function = None

    def __init__(self, program: Program):
        """Makes a proxy of the model that `program` trains."""
        super().__init__(program.model)
        self._self_program = program
        self._self_call: FitCall | None = None
        self._self_race: Race | None = None
        self._reset_if_changed()

    @property
    def builder(self) -> Builder:
        """The current builder, which knows towers and home; "auto" may replace it."""
        return self._self_program.builder

    @property
    def is_choosing(self) -> bool:
        """Whether calls of training still choose how the variables are updated."""
        return self._self_race is not None or not self._self_program.chosen

    def resize(
        self,
        gpus: int | Sequence[int] | Sequence[str] | None = None,
        split_ratios: Sequence[int] | None = None,
    ) -> None:
        """Continues training on other towers, between two batches, as in a callback.

        Results stay those of one device, unless they depend on the number of towers
        anyway. Compile the model again after freezing layers. Variables leave a GPU
        that no tower uses any more. Graphs of towers that were used before are kept;
        others are traced in the next step.

        TensorFlow adds no device later, so `configure` has to set up all of them.

        Examples:
            >>> towers.configure(num_gpus=4)
            >>> parallel = towers.multi_gpu_model(model, gpus=2)
            >>> parallel.resize(gpus=4)

        Args:
            gpus: See `multi_gpu_model`: a number, indices or device strings. `None` for
                all.
            split_ratios: See `multi_gpu_model`. By default parts are equal.

        Raises:
            ValueError: A device does not exist, or several hosts train together.
        """
        program = self._self_program
        layout = program.layout_of(gpus, split_ratios)
        if self.builder.plan.hosts.count > 1:
            raise ValueError(
                f"Received resize() on one of {self.builder.plan.hosts.count} hosts; "
                "expected one host, so have the launcher start other hosts instead."
            )
        self._reset_if_changed()
        if layout == program.layout:
            return
        self._end_race()
        change = functools.partial(program.change_layout, layout)
        before = _swap_functions(self, change)
        for name in _FUNCTIONS:
            if before[name] is not None and getattr(self, name) is None:
                # A running loop calls this attribute without making the function.
                getattr(self, f"make_{name}")(force=True)

    @property
    def loss_placement(self) -> str | None:
        """The placement of the loss, "tower" or "gathered"; `None` before a step."""
        return self.builder.loss_placed

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model; see `keras.Model.compile`."""
        signature = inspect.signature(type(self.__wrapped__).compile)
        bound = signature.bind(self, *args, **kwargs)
        self.__wrapped__.compile(*args, **kwargs)
        wish = kwargs.get("jit_compile", bound.arguments.get("jit_compile", "auto"))
        self._self_program.set_xla(wish)
        self._reset_if_changed()

    @property
    def jit_compile(self) -> bool:
        """False: XLA compiles each tower, and cannot compile the step around towers."""
        return False

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self.__wrapped__.jit_compile = value
        self._self_program.set_xla(value)
        self._self_program.expect_change()

    def _reset_if_changed(self):
        self._pause_race()
        if self._self_program.reset_if_changed():
            _swap_functions(self, lambda before: {})
            if self._self_call is not None:
                self._self_call.skipped_for = None

    def make_train_function(self, force: bool = False) -> None:
        """Makes the function that `fit` calls with an iterator; see `keras.Model`."""
        self._reset_if_changed()
        call = self._self_call
        if call is not None and call.skips is not None:
            if self.train_function is not call.skips:
                call.skipped_for = self.train_function
            self.train_function = call.skips
        elif call is not None and call.skipped_for is not None:
            self.train_function, call.skipped_for = call.skipped_for, None
        elif force or self.train_function is None:
            self._end_race()
            if self._self_program.needs_first_call:
                self.train_function = self._first_call
            else:
                self.train_function = self._train_function(self.builder)

    def _first_call(self, iterator):
        program, call = self._self_program, self._self_call
        # The number of calls is unknown in a user's own loop.
        calls_left = (lambda: 0) if call is None else call.train_calls
        before = program.state()
        first = FirstCall(program, iterator, self._train_function, calls_left)
        self.train_function, self._self_race, logs = first.run()
        if program.differs(before):
            # Functions made before read the variables where they were.
            self.test_function = self.predict_function = None
        if self._self_race is not None:
            self.train_function = self._call_in_race
            self._end_race_if_over()
        return logs

    def _call_in_race(self, iterator):
        logs = self._self_race.train(iterator)
        self._end_race_if_over()
        return logs

    def _pause_race(self):
        """Continues with the best way so far until the next call, if ways race."""
        race = self._self_race
        if race is None:
            return
        if self._self_program.has_changed:
            # The next call of training begins another race.
            self._self_race = None
            race.abandon()
            return
        race.pause()
        if race.moves:
            self.test_function = self.predict_function = None

    def _end_race_if_over(self):
        if self._self_race.over:
            self._end_race()

    def _end_race(self):
        """Continues with the best way to update variables so far, if ways race."""
        race, self._self_race = self._self_race, None
        if race is not None:
            self.train_function = race.end()
            if race.changed or race.moves:
                # Evaluation follows the way: where its variables are, and XLA.
                self.test_function = self.predict_function = None

    def _train_function(self, builder):
        """Makes a builder's train function; it explains steps that the guard stops."""
        step_scope, guard = self._self_program.step_scope, builder.guard
        make = functools.partial(builder.train_function, step_scope)
        made = _OfLayout(make, builder)

        def train(iterator):
            with _explained(self, "train"), _stops(self):
                return made(iterator)

        if guard is None:
            return train

        def function(iterator):
            try:
                with guard.raises():
                    return train(iterator)
            except StoppedStep as error:
                stopped = error
            call, file = self._self_call, self._self_program.config.numerics_file
            options, place = (call.options, call.place) if call else ({}, "")
            with step_scope():
                raise feature("numerics.not_finite").explain(
                    builder, stopped, options, place, file
                )

        return function

    def _make_loop_function(self, kind, force=False):
        # Makes the function that `evaluate` calls with an iterator, or `predict` with
        # batches.
        self._reset_if_changed()
        name = f"{kind}_function"
        if not force and getattr(self, name) is not None:
            return

        def make():
            kept, model = getattr(self, name), self.__wrapped__
            # Keras reads the model's own; XLA cannot compile a step around towers.
            wish, model.jit_compile = model.jit_compile, False
            try:
                getattr(type(model), f"make_{name}")(self, force=True)
            finally:
                model.jit_compile = wish
            made = getattr(self, name)
            setattr(self, name, kept)
            return made

        made = _OfLayout(make, self.builder)

        def function(data):
            with _explained(self, kind), _stops(self), group.calling(kind):
                return made(data)

        setattr(self, name, function)

    make_test_function = functools.partialmethod(_make_loop_function, "test")
    make_predict_function = functools.partialmethod(_make_loop_function, "predict")

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model; see `keras.Model.fit`.

        With a `towers.callbacks.Checkpoint`, training resumes. A callback may run code
        around `fit`, even if an exception ends it; see `FitCall`.
        """
        self._reset_if_changed()
        call = FitCall(self, args, kwargs, self._self_program)
        agreement = self.builder.context.agreement
        before, self._self_call = self._self_call, call
        may_write = fit_call.may_change_variables(call.callbacks)
        try:
            with group.together():
                if agreement is not None:
                    call.follow_hosts(agreement)
                    # All hosts follow the first one if any of them may need it.
                    may_write = agreement.any(may_write)
                self.builder.context.callbacks_may_write = may_write
                # The builder is not bound here: "auto" may replace and free it.
                result = call.run(notes_place=self.builder.guard is not None)
                if (parts := self.builder.pieces.store.hosts_parts) is not None:
                    parts.keep()
                return result
        finally:
            self._self_call = before
            if call.skips is not None:
                self.train_function = call.skipped_for
            self._pause_race()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model; see `keras.Model.evaluate`."""
        if self._self_call is not None and self._self_call.skips is not None:
            return {}  # The epoch is skipped.
        if self._self_call is not None:
            self._self_call.begin_validation()
        self._reset_if_changed()
        with _together(self, "evaluate", args, kwargs) as (args, kwargs):
            return type(self.__wrapped__).evaluate(self, *args, **kwargs)

    def reset_metrics(self) -> None:
        """Resets metrics as an epoch begins; see `keras.Model`."""
        # Scalars that callbacks have created, such as Keras's own TensorBoard.
        runtime.forget_scalars()
        if self._self_race is not None:
            self._self_race.interrupt()
        self.builder.mark_copies_stale()
        self.__wrapped__.reset_metrics()

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on one global batch, on towers."""
        with self._self_program.step_scope():
            # A user's own loop may have changed variables.
            self.builder.broadcast_variables()
            if (parts := self.builder.pieces.store.hosts_parts) is not None:
                parts.begin_step()
            return self.builder.train_step(data)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch, on towers."""
        with self._self_program.step_scope():
            return self.builder.test_step(data)

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch, on towers."""
        with self._self_program.step_scope():
            return self.builder.predict_step(data)

    def __copy__(self):
        return self.__deepcopy__({})

    def __deepcopy__(self, memo):
        # Keras creates new variables for a copy, also for one by `copy.copy`.
        model = copy.deepcopy(self.__wrapped__, memo)
        program = self._self_program
        return TowerModel(Program(model, program.config, program.layout))

    def __reduce__(self):
        return self.__wrapped__.__reduce__()


class _OfLayout:
    """A function of Keras's loop, which is made again after variables were joined.

    TensorFlow's trace refers to variables that were in parts; another step may have
    joined them since, as it assigns them. The function is called on the host.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]], builder: Builder):
        """Makes the function by calling `make`."""
        self._make, self._facts = make, builder.context.facts
        self._plan = builder.context.plan
        self._function = _called_on_the_host(make(), self._plan)
        self._kept_whole = len(self._facts.kept_whole)

    def __call__(self, data: Any) -> Any:
        """Calls the function with an iterator, or with batches."""
        if self._kept_whole != len(self._facts.kept_whole):
            self._function = _called_on_the_host(self._make(), self._plan)
        made = self._function(data)
        # The call itself may have joined variables, before it was traced.
        self._kept_whole = len(self._facts.kept_whole)
        return made


def _called_on_the_host(function, plan):
    """Wraps a function of Keras's loop so that it is called on the host."""
    on_gpus = any(map(is_gpu, [plan.home, *plan.all_devices]))
    # A second pass of TensorFlow's optimizer computes a few more shapes ahead. A host
    # with GPUs would otherwise wait for these; on CPUs, nothing waits.
    optimizing = contextlib.nullcontext if on_gpus else runtime.optimizing_for_cpus

    def call(data):
        if isinstance(data, tf.data.Iterator):
            free_aside(data)
            python_calls.guard_all()
        # By default, TensorFlow would send values that a loop passes from step to step
        # through the first GPU.
        with tf.device(HOST), optimizing():
            return function(data)

    return call


def _swap_functions(parallel, change):
    """Replaces the functions of the loop by the result of `change`; returns the old."""
    before = {name: getattr(parallel, name) for name in _FUNCTIONS}
    functions = change(before)
    for name in _FUNCTIONS:
        setattr(parallel, name, functions.get(name))
    return before


@contextlib.contextmanager
def _explained(parallel, step):
    plan, model = parallel.builder.plan, parallel.__wrapped__

    def reason():
        return feature("numerics.failed_stage").reason(parallel.builder, step)

    with contextlib.ExitStack() as explained:
        if len(plan.devices) > 1:
            explained.enter_context(explained_shapes(model))
            explained.enter_context(explained_look_ups(model))
        if plan.pipeline.stages > 1:
            explained.enter_context(explained_stages(model, reason))
        yield


@contextlib.contextmanager
def _stops(parallel):
    """Inside, a call may stop because of other hosts; see `Agreement.stops`."""
    agreement = parallel.builder.context.agreement
    if agreement is None:
        yield
        return
    try:
        with agreement.stops(parallel):
            yield
    except HostsDifferError:
        if (parts := parallel.builder.pieces.store.hosts_parts) is not None:
            parts.join()
        raise


@contextlib.contextmanager
def _together(parallel, name, args, kwargs):
    """Inside, all hosts run a method of the loop, with the first host's variables.

    For methods that take many batches, hosts compare their arguments, and end together.
    Yields the arguments, with data of which each host reads its own rows.
    """
    agreement, many = parallel.builder.context.agreement, name in _OF_MANY_BATCHES
    with group.together():
        if agreement is None or name == "train_on_batch":
            yield args, kwargs
            return
        if many:
            model = parallel.__wrapped__
            method = inspect.signature(getattr(type(model), name))
            options = method.bind(parallel, *args, **kwargs).arguments
            # Within `fit`, hosts have compared the model already.
            inside = parallel._self_call is not None
            agreement.check_alike(given(name, options, None if inside else model))
            share = parallel.builder.plan.share
            args = [fit_call.of_host(value, share) for value in args]
            kwargs = {k: fit_call.of_host(value, share) for k, value in kwargs.items()}
        parallel.builder.follow_first_host()
        yield args, kwargs
        if many:
            agreement.end_evaluation()


def _loop_method(name):
    def method(self, *args, **kwargs):
        self._reset_if_changed()
        with _together(self, name, args, kwargs) as (args, kwargs):
            return getattr(type(self.__wrapped__), name)(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"See `keras.Model.{name}`."
    return method


for _name in (
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
):
    setattr(TowerModel, _name, _loop_method(_name))

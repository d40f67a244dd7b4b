"""A Keras model whose steps run on towers.

Keras is the loop. The model is the user's in everything but its three steps, which a
builder computes on towers; `fit` and its siblings, callbacks, metrics and saving stay
Keras's own.
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
from towers.devices.names import HOST
from towers.hosts import group
from towers.hosts.group import HostsChange, HostsDifferError
from towers.keras_adapter import runtime
from towers.keras_adapter.datasets import free_aside
from towers.model import fit_call
from towers.model.fit_call import FitCall, given
from towers.model.update.first_call import FirstCall
from towers.model.update.variable_update import VariableUpdate
from towers.program import python_calls
from towers.program.features import feature
from towers.tower.errors import (
    explained_look_ups,
    explained_shapes,
    explained_stages,
)

# Beside `fit`, whose `FitCall` sees to it.
_OF_MANY_BATCHES = "evaluate", "predict"
# What the loop calls, by the names that it has for them.
_FUNCTIONS = "train_function", "test_function", "predict_function"


class TowerModel(wrapt.CallableObjectProxy):
    """A Keras model whose steps run on towers: a proxy of the user's own model.

    Every attribute is that of the model, but for the loop's methods, which run with
    this object as their `self` and so find the builder's steps instead of the model's.
    """

    # What the loop keeps on its `self`, apart from the model's own of the same name.
    train_function = None
    test_function = None
    predict_function = None

    def __init__(self, update: VariableUpdate):
        """Makes a proxy of the model that `update` trains."""
        super().__init__(update.model)
        self._self_update = update
        self._self_call: FitCall | None = None
        self._reset_if_changed()

    @property
    def builder(self) -> Builder:
        """The builder, which knows towers and home. "auto" may put another here."""
        return self._self_update.builder

    def resize(
        self,
        gpus: int | Sequence[int] | Sequence[str] | None = None,
        split_ratios: Sequence[int] | None = None,
    ) -> None:
        """Goes on with other towers, between two batches, as in a callback.

        The numbers stay those of one device, as far as they do not depend on the number
        of towers anyway. Compile the model again after layers were frozen. Variables
        leave a GPU that computes no more. Graphs of towers that were used before are
        kept; others are traced in the next step.

        TensorFlow adds no device later, so `configure` has to set up all of them.

        Examples:
            >>> towers.configure(num_gpus=4)
            >>> parallel = towers.multi_gpu_model(model, gpus=2)
            >>> parallel.resize(gpus=4)

        Args:
            gpus: As of `multi_gpu_model`: a number, indices or device strings. `None`
                for all.
            split_ratios: As of `multi_gpu_model`. By default parts are equal.

        Raises:
            ValueError: There are no such devices, or hosts train together.
        """
        update = self._self_update
        layout = update.layout_of(gpus, split_ratios)
        if self.builder.plan.hosts.count > 1:
            raise ValueError(
                f"Received resize() on one of {self.builder.plan.hosts.count} hosts; "
                "expected one host, so have the launcher start other hosts instead."
            )
        self._reset_if_changed()
        if layout == update.layout:
            return
        change = functools.partial(update.change_layout, layout)
        before = _swap_functions(self, change)
        for name in _FUNCTIONS:
            if before[name] is not None and getattr(self, name) is None:
                # A loop calls whatever is here, and asks for nothing.
                getattr(self, f"make_{name}")(force=True)

    @property
    def loss_placement(self) -> str | None:
        """Where the loss is computed, "tower" or "gathered"; `None` before a step."""
        return self.builder.loss_placed

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model; see `keras.Model.compile`."""
        signature = inspect.signature(type(self.__wrapped__).compile)
        bound = signature.bind(self, *args, **kwargs)
        self.__wrapped__.compile(*args, **kwargs)
        wish = kwargs.get("jit_compile", bound.arguments.get("jit_compile", "auto"))
        self._self_update.xla_wish.tell(wish)
        self._reset_if_changed()

    @property
    def jit_compile(self) -> bool:
        """False: XLA compiles each tower, and cannot compile the step around them."""
        return False

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self.__wrapped__.jit_compile = value
        self._self_update.xla_wish.tell(value)
        self._self_update.expect_change()

    def _reset_if_changed(self):
        if self._self_update.reset_if_changed():
            _swap_functions(self, lambda before: {})
            if self._self_call is not None:
                self._self_call.skipped_for = None

    def make_train_function(self, force: bool = False) -> None:
        """Makes what `fit` calls with an iterator; see `keras.Model`."""
        self._reset_if_changed()
        call = self._self_call
        if call is not None and call.skips is not None:
            if self.train_function is not call.skips:
                call.skipped_for = self.train_function
            self.train_function = call.skips
        elif call is not None and call.skipped_for is not None:
            self.train_function, call.skipped_for = call.skipped_for, None
        elif force or self.train_function is None:
            if self._self_update.needs_first_call:
                self.train_function = self._first_call
            else:
                self.train_function = self._train_function(self.builder)

    def _first_call(self, iterator):
        update, call = self._self_update, self._self_call
        # In a loop of the user's, nobody knows.
        calls_left = (lambda: 0) if call is None else call.train_calls
        first = FirstCall(update, iterator, self._train_function, calls_left)
        self.train_function, logs = first.run()
        return logs

    def _train_function(self, builder):
        """Makes a builder's train function, which says what its guard has caught."""
        step_scope, guard = self._self_update.step_scope, builder.guard
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
            call, file = self._self_call, self._self_update.config.numerics_file
            options, place = (call.options, call.place) if call else ({}, "")
            with step_scope():
                raise feature("numerics.not_finite").explain(
                    builder, stopped, options, place, file
                )

        return function

    def _make_loop_function(self, kind, force=False):
        # Makes what `evaluate` calls with an iterator, or `predict` with batches.
        self._reset_if_changed()
        name = f"{kind}_function"
        if not force and getattr(self, name) is not None:
            return

        def make():
            kept, model = getattr(self, name), self.__wrapped__
            # Keras asks the model itself, and XLA cannot compile a step around towers.
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
            with _explained(self, kind), _stops(self):
                return made(data)

        setattr(self, name, function)

    make_test_function = functools.partialmethod(_make_loop_function, "test")
    make_predict_function = functools.partialmethod(_make_loop_function, "predict")

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """See `keras.Model.fit`; with a `towers.callbacks.Checkpoint`, it goes on.

        A callback may run code around it, also where an exception ends it; see
        `FitCall`.
        """
        self._reset_if_changed()
        run = functools.partial(self._fit, args, kwargs)
        if group.member() is None:
            return run()
        update, swap = self._self_update, functools.partial(_swap_functions, self)
        trace = functools.partial(_trace_training, self)

        def prepare():
            call = _fit_call(self, args, kwargs)
            feature("model.rehearsal").rehearse(call, update, swap, trace)

        return feature("model.generations").fit(update, swap, run, prepare)

    def _fit(self, args, kwargs):
        """Calls `fit` of Keras, with these hosts."""
        call = _fit_call(self, args, kwargs)
        call.state_lost = self._self_update.state_lost
        agreement = self.builder.context.agreement
        before, self._self_call = self._self_call, call
        may_write = fit_call.may_change_variables(call.callbacks)
        try:
            with group.together():
                if agreement is not None:
                    for each in call.callbacks:
                        if hasattr(each, "before_hosts_compare"):
                            each.before_hosts_compare()
                    call.follow_hosts(agreement)
                    # All follow the first host where one of them has to.
                    may_write = agreement.any(may_write)
                self.builder.context.callbacks_may_write = may_write
                # No name for the builder: it goes when another one is chosen.
                found = call.run(notes_place=self.builder.guard is not None)
                if (parts := self.builder.pieces.store.hosts_parts) is not None:
                    parts.keep()
                return found
        finally:
            self._self_call = before
            if call.skips is not None:
                self.train_function = call.skipped_for

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """See `keras.Model.evaluate`."""
        if self._self_call is not None and self._self_call.skips is not None:
            return {}  # of an epoch that is skipped
        self._reset_if_changed()
        with _together(self, "evaluate", args, kwargs) as (args, kwargs):
            return type(self.__wrapped__).evaluate(self, *args, **kwargs)

    def reset_metrics(self) -> None:
        """Begins an epoch; see `keras.Model`."""
        # Those that callbacks have made, such as Keras's own TensorBoard.
        runtime.forget_scalars()
        self.builder.mark_copies_stale()
        self.__wrapped__.reset_metrics()

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on one global batch, on towers."""
        with self._self_update.step_scope():
            # Called from a loop of the user's, which may have changed variables.
            self.builder.broadcast_variables()
            if (parts := self.builder.pieces.store.hosts_parts) is not None:
                parts.begin_step()
            return self.builder.train_step(data)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch, on towers."""
        with self._self_update.step_scope():
            return self.builder.test_step(data)

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch, on towers."""
        with self._self_update.step_scope():
            return self.builder.predict_step(data)

    def __copy__(self):
        return self.__deepcopy__({})

    def __deepcopy__(self, memo):
        # Keras makes a copy's variables anew, also of `copy.copy`.
        model = copy.deepcopy(self.__wrapped__, memo)
        update = self._self_update
        return TowerModel(VariableUpdate(model, update.config, update.layout))

    def __reduce__(self):
        return self.__wrapped__.__reduce__()


class _OfLayout:
    """A function of Keras's loop, made again once variables lie elsewhere.

    What TensorFlow has traced refers to variables that were in parts; another step may
    have put them together since, as it assigns them. It is called on the host.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]], builder: Builder):
        """Makes the function, by `make`, of a step of a builder."""
        self._make, self._facts = make, builder.context.facts
        self._function = _called_on_the_host(make())
        self._kept_whole = len(self._facts.kept_whole)

    def __call__(self, data: Any) -> Any:
        """Calls the function with an iterator, or with batches."""
        if self._kept_whole != len(self._facts.kept_whole):
            self._function = _called_on_the_host(self._make())
        made = self._function(data)
        # The call itself may have put some together, before it was traced.
        self._kept_whole = len(self._facts.kept_whole)
        return made


def _called_on_the_host(function):
    """Makes a function of Keras's loop that is called on the host."""

    def call(data):
        if isinstance(data, tf.data.Iterator):
            free_aside(data)
            python_calls.guard_all()
        # Where TensorFlow is not told, it would take what a loop hands from step to
        # step through the first GPU.
        with tf.device(HOST):
            return function(data)

    return call


def _swap_functions(parallel, change):
    """Puts what `change` makes of the functions in their place; returns those."""
    before = {name: getattr(parallel, name) for name in _FUNCTIONS}
    found = change(before)
    for name in _FUNCTIONS:
        setattr(parallel, name, found.get(name))
    return before


def _fit_call(parallel, args, kwargs):
    return FitCall(parallel, args, kwargs, parallel._self_update)


def _trace_training(parallel, call):
    """Has a call of `fit` trace its first step, without a first call that tries."""
    parallel._self_call = call
    parallel.train_function = parallel._train_function(parallel.builder)
    try:
        call.run(notes_place=False)
    finally:
        parallel._self_call = None


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
    except (HostsChange, HostsDifferError):
        if (parts := parallel.builder.pieces.store.hosts_parts) is not None:
            parts.join()
        raise


@contextlib.contextmanager
def _together(parallel, name, args, kwargs):
    """Inside, all hosts run a method of the loop, with the first one's variables.

    Of methods that take many batches, they compare what they were given, and end
    together. Yields the arguments, with data that each reads its own rows of.
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
            # Within `fit`, hosts have compared the model.
            inside = parallel._self_call is not None
            agreement.check_alike(given(name, options, None if inside else model))
            share = parallel.builder.plan.share
            args = [fit_call.of_host(each, share) for each in args]
            kwargs = {k: fit_call.of_host(each, share) for k, each in kwargs.items()}
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

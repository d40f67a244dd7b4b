"""A call of `fit`, and the code that callbacks run around it."""

import contextlib
import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.hosts import group
from towers.loop import alike, loop
from towers.model import auto
from towers.model.program import Program
from towers.plan import Share
from towers.program.features import feature

# Hosts may show progress differently.
_OF_A_HOST = ("verbose",)
# Maps each known class to its functions at registration.
_KNOWN: dict[type, dict[str, Callable]] = {}


class FitsAgain(Exception):
    """Ends `fit`, so that another call continues from here with other arguments."""


class FitCall:
    """A call of `fit`.

    A callback may have a method `around_fit(call)` that returns a context manager, as
    `contextlib.contextmanager` makes them. `fit` runs inside, however it ends. At the
    start, the callback may change the arguments of `fit`.

    Attributes:
        model: The model that `multi_gpu_model` returned.
        options: The arguments of `fit` by name.
        create_variables: Takes the `tf.TypeSpec`s of a batch, and creates variables
            that the model has not built yet.
        skips: A train function that skips batches. While it is not `None`, `fit` calls
            it instead of the model's own, and evaluates nothing.
        skipped_for: The train function that `skips` replaces.
        skipped: Grows with each batch that is skipped or read again for that.
        agreement: Keeps hosts at the same batch; `None` with one host.
    """

    def __init__(
        self,
        model: keras.Model,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        program: Program,
    ):
        """Binds the arguments of `fit` of the user's model; runs nothing."""
        self.model, self._program = model, program
        self.create_variables = program.create_variables
        self.skips: Callable[[Iterator], Any] | None = None
        self.skipped_for: Callable[[Iterator], Any] | None = None
        self.skipped, self.agreement = 0, None
        self._fit = fit = type(model.__wrapped__).fit
        self._bound = inspect.signature(fit).bind(model, *args, **kwargs)
        self._bound.apply_defaults()
        self.options: dict[str, Any] = self._bound.arguments
        self._place, self._ahead, self._behind = _Place(), [], []

    @property
    def callbacks(self) -> list[Any]:
        """All callbacks, also those in a nest or a `CallbackList`."""
        return [*flat(self.options.get("callbacks"))]

    def run(self, notes_place: bool) -> Any:
        """Calls `fit` inside the contexts of callbacks; tracks `place` if asked."""
        with contextlib.ExitStack() as stack:
            if self.agreement is not None:
                stack.enter_context(warnings.catch_warnings())
            for callback in self.callbacks:
                if hasattr(callback, "around_fit"):
                    stack.enter_context(callback.around_fit(self))
            before = [*self._ahead, *([self._place] if notes_place else [])]
            stack.enter_context(self._with_callbacks(before, self._behind))
            return self._fit(*self._bound.args, **self._bound.kwargs)

    def build_optimizer(self) -> None:
        """Creates the optimizer's variables, if the model is built."""
        model = self.model
        if model.built and not model.optimizer.built:
            model.builder.build_optimizer()

    def build_layers(self) -> None:
        """Builds the model before its first batch, if the data have a known spec.

        A model that runs eagerly is not built, as its Python code may take no symbols.
        """
        model = self.model
        if model.built or model.run_eagerly:
            return
        if (x := inputs(self.options)) is not None:
            with self._program.step_scope():
                model.builder.pieces.creator.build_layers(x)

    def train_calls(self) -> int:
        """Estimates the number of calls of training."""
        parameters = inspect.signature(keras.Model.fit).parameters.values()
        options = {
            parameter.name: parameter.default for parameter in parameters
        } | self.options
        batches = options["steps_per_epoch"] or batch_count(options)
        batches = batches or auto.ASSUMED_BATCHES
        calls = math.ceil(batches / self.model.steps_per_execution)
        return calls * max(options["epochs"] - options["initial_epoch"], 0)

    @property
    def place(self) -> str:
        """The current epoch and batch, as a phrase; "" if not known."""
        if self._place.batch is None:
            return ""
        first = self._place.batch + 1
        last = self._place.batch + self.model.steps_per_execution
        batches = f"batch {first}" if last <= first else f"batches {first}-{last}"
        return f"epoch {self._place.epoch + 1}, {batches}"

    def follow_hosts(self, agreement: Any) -> None:
        """Makes this call do the same on all hosts that train together.

        Raises:
            HostsDifferError: The hosts have different arguments.
        """
        agreement.check_alike(given("fit", self.options, self.model.__wrapped__))
        agreement.measure_latency()
        share = self.model.builder.plan.share
        for name, value in self.options.items():
            self.options[name] = of_host(value, share)
        self.agreement = agreement
        module = feature("loop.agreement")
        self._ahead.append(module.EndEpochs(agreement))
        self._behind.append(module.FollowHosts(agreement))

    def may_stop(self, signal: int) -> bool:
        """Returns whether to stop at once for a signal; informs other hosts first."""
        if self.agreement is not None:
            self.agreement.wish = signal
        return self.agreement is None

    def can_read_variables(self) -> bool:
        """Returns whether all variables can be read: not if lost hosts held parts."""
        parts = self.model.builder.pieces.store.hosts_parts
        return parts is None or not (group.is_broken() and parts.any())

    def agrees_to_save(self, wished: bool) -> bool:
        """Returns whether to save here; see `Agreement` for several hosts."""
        if self.agreement is None:
            return wished
        return self.agreement.agrees_to_save(wished)

    def meet_hosts(self) -> None:
        """Waits for other hosts, if there are any; see `Agreement.meet`."""
        if self.agreement is not None:
            self.agreement.meet()

    def begin_validation(self) -> None:
        """Checks that no host has another batch to train with, if there are several."""
        if self.agreement is not None:
            self.agreement.end_data()

    @property
    def left_a_batch(self) -> bool:
        """Whether a batch that has begun was left out, as a host stops."""
        return self.agreement is not None and self.agreement.left_a_batch

    @contextlib.contextmanager
    def _with_callbacks(self, before, behind):
        """Adds callbacks before and behind those that the user passed."""
        added = [*before, *behind]
        if "callbacks" not in self.options or not added:  # The user's own `fit`.
            yield
            return
        passed = self.options["callbacks"]
        if not isinstance(passed, keras.callbacks.CallbackList):
            passed = keras.tree.flatten(passed or [])
            self.options["callbacks"] = [*before, *passed, *behind]
            yield
            return
        for callback in added:
            callback.set_model(self.model)
        passed.callbacks[:] = [*before, *passed.callbacks, *behind]
        try:
            yield
        finally:
            for callback in added:
                passed.callbacks.remove(callback)


def given(
    method: str, options: Mapping[str, Any], model: keras.Model | None
) -> dict[str, Any]:
    """Describes a call of `fit` or another method by values that hosts must share.

    Args:
        method: Name of the method.
        options: Arguments of the method, by name.
        model: The user's model; `None` if hosts have compared it already.
    """
    numbers = {
        name: value
        for name, value in options.items()
        if isinstance(value, int | float) and name not in _OF_A_HOST
    }
    data = [options.get(name) for name in ("x", "y", "sample_weight")]
    data = [data_set for data_set in data if data_set is not None]
    described = {"method": method, f"{method}()": numbers}
    if model is not None:
        described |= alike.of_model(model)
    described["the data"] = alike.of_data(data[0] if len(data) == 1 else data)
    if (validation := options.get("validation_data")) is not None:
        described["the validation data"] = alike.of_data(validation)
    return described


@contextlib.contextmanager
def if_broken_off(end: Callable[[], None]) -> Iterator[None]:
    """For `around_fit`: calls a function if an exception ends `fit`.

    Keras does not call `on_train_end` then.
    """
    try:
        yield
    except BaseException:
        end()
        raise


class _Place(keras.callbacks.Callback):
    """Tracks the position of `fit`.

    Attributes:
        epoch: Number of the epoch, from 0.
        batch: Number of the latest batch that has begun, if any.
    """

    def __init__(self):
        super().__init__()
        self.epoch: int | None = None
        self.batch: int | None = None

    def on_epoch_begin(self, epoch, logs=None):
        """Stores the number of the epoch."""
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        """Stores the number of the batch."""
        self.batch = batch


# The data of `fit`: number of batches, and batch size.


def batch_size(options: Mapping[str, Any]) -> int | None:
    """Returns the batch size of the data of `fit`, if it is known."""
    data = options["x"]
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        return pipeline.batch_size
    if isinstance(data, tf.data.Dataset):
        return array_length(data.element_spec)
    if (examples := _examples(options)) is None:
        return None
    steps = options["steps_per_epoch"]
    return options["batch_size"] or (math.ceil(examples / steps) if steps else 32)


def batch_count(options: Mapping[str, Any]) -> int | None:
    """Returns the number of batches of the data of `fit`, if it is known."""
    data = options["x"]
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches
    if isinstance(data, tf.data.Dataset):
        cardinality = int(data.cardinality())
        return cardinality if cardinality >= 0 else None
    if (examples := _examples(options)) is None:
        return None
    return math.ceil(examples / batch_size(options))


def of_host(data: Any, share: Share) -> Any:
    """Returns data of which this host reads only its own rows, where supported.

    Args:
        data: The data of `fit` or another method. Data sets of
            `towers.input_pipeline.make_dataset` support it.
        share: The share of each batch that the host computes.
    """
    pipeline = getattr(data, "pipeline", None)
    if pipeline is None or pipeline.share is not None:
        return data
    known = getattr(data, "of_host", None)
    if known is None or known.pipeline.share != share:
        # Kept, as the data set counts epochs.
        data.of_host = dataclasses.replace(pipeline, share=share).dataset()
    return data.of_host


def inputs(options: Mapping[str, Any]) -> Any:
    """Returns inputs to build a model with, or their `tf.TypeSpec`s; see `fit`.

    No data are consumed. Returns `None` for data that can be read only once.
    """
    data = options["x"]
    if is_arrays(options):
        return keras.tree.map_structure(lambda array: np.asarray(array[:1]), data)
    if isinstance(data, tf.data.Dataset):
        first = loop.without_optionals(data.element_spec)
    elif isinstance(data, keras.utils.PyDataset):
        first = data[0]
    else:
        return None
    return keras.utils.unpack_x_y_sample_weight(first)[0]


def is_arrays(options: Mapping[str, Any]) -> bool:
    """Returns whether the data of `fit` are arrays, which Keras cuts and shuffles."""
    others = tf.data.Dataset, keras.utils.PyDataset
    return (
        not isinstance(options["x"], others) and array_length(options["x"]) is not None
    )


def array_length(arrays: Any) -> int | None:
    """Returns the first dimension of arrays, or of their specs, if it is known."""
    first = next(iter(keras.tree.flatten(arrays)), None)
    shape = getattr(first, "shape", None)
    if isinstance(shape, tf.TensorShape):
        shape = shape.rank and shape.as_list()
    return shape[0] if shape else None


def _examples(options):
    """Returns the number of examples in arrays, without the validation split."""
    examples = array_length(options["x"])
    if examples and options["validation_split"] and options["validation_data"] is None:
        return math.floor(examples * (1 - options["validation_split"]))
    return examples


# Callbacks that may change variables between two calls of training.
#
# Any callback may, except for known classes. A subclass of a known class may do
# anything, and so may an object that replaces a function of its class: neither counts
# as known.


def changes_no_variable(kind: type) -> type:
    """Declares, as a decorator, that a callback changes no variable between batches.

    The callback may change variables as an epoch begins or ends. The declaration does
    not apply to subclasses.
    """
    _KNOWN[kind] = _functions(kind)
    return kind


def may_change_variables(callbacks: Any) -> bool:
    """Returns whether a callback of `fit` may change variables between batches."""
    return not all(_is_known(callback) for callback in flat(callbacks))


def flat(callbacks: Any) -> Iterator[Any]:
    """Yields all callbacks of an argument of `fit`, also those in a `CallbackList`."""
    for callback in keras.tree.flatten(callbacks or ()):
        yield callback
        if isinstance(callback, keras.callbacks.CallbackList):
            yield from flat(callback.callbacks)


def _is_known(callback):
    kind = callback.__class__  # A proxy returns the class of its object.
    known = _KNOWN.get(kind)
    if known is None or known.keys() & vars(callback).keys():
        return False
    return known == _functions(kind)


def _functions(kind):
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if inspect.isfunction(value)
    }


for _kind in (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.Callback,
    keras.callbacks.CallbackList,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    # Keras has it since 3.14.
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
):
    changes_no_variable(_kind)

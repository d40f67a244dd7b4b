"""Trains a model time and again from the same start, and leaves it as it was."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.collectives.joined_hosts import this_host
from towers.keras_adapter.layers import (
    has_training_argument,
    layers_of,
    own_non_trainable_variables,
    own_seed_generators,
)
from towers.keras_adapter.models import has_own_steps
from towers.keras_adapter.variables import places_kept
from towers.layers import variables
from towers.model.tower_model import TowerModel
from towers.parity.report import ReportEntry, differences
from towers.plan import Plan

_FUNCTIONS = ("train_function", "test_function", "predict_function")

# Seeds of the disturbances that show what rounding does. Several, as it may do much,
# but rarely: where it carries the input of a ReLU over zero.
DISTURBANCES = range(4)


class Setting(NamedTuple):
    """What is changed in the model for a trial.

    Attributes:
        alike: BatchNormalization normalises all examples alike: by the statistics of
            the whole batch, or by its moving averages where towers compute in parts.
        silent: Random layers are called as if this were not training.
    """

    alike: bool = False
    silent: bool = False


@contextlib.contextmanager
def in_place(model: keras.Model) -> Iterator[None]:
    """Leaves the model's variables where they are, and its functions as they are."""
    # Towers may move variables to another device, and back they go.
    functions = [(name, getattr(model, name)) for name in _FUNCTIONS]
    try:
        with places_kept(variables.of(model)):
            yield
    finally:
        for name, function in functions:
            setattr(model, name, function)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Inside, nothing warns of what trials do on purpose."""
    expected = "tf.function retracing", "with the rows of all towers"

    def is_news(record):
        return not any(text in record.getMessage() for text in expected)

    loggers = tf.get_logger(), logging.getLogger("towers")
    for logger in loggers:
        logger.addFilter(is_news)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_news)


class Trials:
    """Trials of one model on the same batches.

    What runs leave is yielded piece by piece, as a large model's is large.

    Attributes:
        model: The model on one device, compiled, with all its variables.
        batches: One batch for each step.
        tolerance: The relative difference up to which numbers are equal.
        plan: The towers.
        loss_placement: Where towers computed the loss.
        unseeded: Where random numbers are drawn without a seed, as phrases.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: Sequence[Any],
        make_parallel: Callable[[], TowerModel],
        tolerance: float,
        plan: Plan,
    ):
        """Prepares, and runs nothing; `make_parallel` returns the model on towers."""
        self.model = model
        self.batches = batches
        self.loss_placement = None
        self.unseeded: Sequence[str] = ()
        self.tolerance = tolerance
        self.plan = plan
        self._make_parallel = make_parallel
        self._start = variables.values(model)
        self._parallel = {}
        self._traced = {}
        self._rounding = {}

    def on_towers(
        self, setting: Setting, disturbance: int | None = None
    ) -> Iterator[ReportEntry]:
        """Trains on towers, and yields what that leaves.

        Args:
            setting: What to change in the model.
            disturbance: Seed of a disturbance of the start, if there is to be one.
        """
        if setting not in self._parallel:
            self._parallel[setting] = self._make_parallel()
        parallel = self._parallel[setting]
        with self._set(setting):
            yield from self._train(parallel, disturbance)
        self.loss_placement = parallel.loss_placement
        self.unseeded = parallel.builder.context.facts.unseeded

    def on_one_device(
        self, setting: Setting, disturbance: int | None = None
    ) -> Iterator[ReportEntry]:
        """Trains as plain Keras does, and yields what that leaves; see `on_towers`.

        Raises:
            ValueError: If a loss is not finite.
        """
        model = self.model
        traced = self._traced.get(setting, (None, None))
        model.train_function, model.predict_function = traced
        with self._set(setting):
            for entry in self._train(model, disturbance):
                _check_finite(entry)
                yield entry
        self._traced[setting] = model.train_function, model.predict_function

    def rounding(self, setting: Setting) -> list[float]:
        """Returns how much each entry changes, at most, if the start is disturbed.

        A disturbance changes the trainable variables that training starts from by a
        tenth of the tolerance, as rounding would.
        """
        if setting not in self._rounding:
            plain = list(self.on_one_device(setting))
            runs = (self.on_one_device(setting, each) for each in DISTURBANCES)
            found = [differences(run, plain) for run in runs]
            most = [max(each) for each in zip(*found, strict=True)]
            self._rounding[setting] = self.agreed(most)
        return self._rounding[setting]

    def agreed(self, found: list[Any]) -> list[Any]:
        """Returns what the first host has found, for all hosts to try the same."""
        return this_host().broadcast_value(found)

    @functools.cached_property
    def batch_norms(self) -> list[keras.layers.Layer]:
        """The BatchNormalization layers that normalise each local batch by itself."""
        return [
            layer
            for layer in layers_of(self.model)
            if isinstance(layer, keras.layers.BatchNormalization)
            and not layer.synchronized
            and any(id(v) in self._changed for v in own_non_trainable_variables(layer))
        ]

    @functools.cached_property
    def random_layers(self) -> list[keras.layers.Layer]:
        """The layers that draw random numbers in training."""
        return [
            layer
            for layer in layers_of(self.model)
            if any(id(g.state) in self._changed for g in own_seed_generators(layer))
        ]

    @property
    def changes_variables(self) -> bool:
        """Whether training changes any trainable variable."""
        return any(id(v) in self._changed for v in self.model.trainable_variables)

    @functools.cached_property
    def _changed(self):
        """Ids of the variables that training on one device changes."""
        for _ in self.on_one_device(Setting()):
            pass
        every = variables.of(self.model)
        now = enumerate(zip(every, self._start, strict=True))
        changed = [k for k, (v, start) in now if not np.array_equal(v.numpy(), start)]
        return {id(every[k]) for k in self.agreed(changed)}

    def _train(self, trainer, disturbance):
        variables.assign(self.model, self._start)
        if disturbance is not None:
            self._disturb(disturbance)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(self.batches[0])
        for step, data in enumerate(self.batches):
            logs = self._train_on_batch(trainer, data)
            if "loss" in logs:
                yield ReportEntry("loss", f"step {step + 1}", step, logs.pop("loss"))
            for name, value in logs.items():
                yield ReportEntry("metric", name, step, np.asarray(value))
            # After the first step, as rounding has not been amplified, and at the end.
            if step in (0, len(self.batches) - 1):
                yield from self._variables(step)
                if not self.predicts:
                    continue
                outputs = trainer.predict_on_batch(x)
                flat = tf.nest.flatten(outputs, expand_composites=True)
                for number, output in enumerate(flat):
                    name = f"output {number}"
                    yield ReportEntry("prediction", name, step, np.asarray(output))

    @functools.cached_property
    def predicts(self) -> bool:
        """Whether the model predicts for what it trains on.

        If it has a step of its own, that may be otherwise: an adversarial network
        trains on pictures, and makes some of noise.
        """
        if not has_own_steps(self.model):
            return True
        x, _, _ = keras.utils.unpack_x_y_sample_weight(self.batches[0])
        try:
            self.model.predict_on_batch(x)
        except Exception:
            # It is the user's model that is called.
            return False
        finally:
            self.model.predict_function = None
        return True

    def _train_on_batch(self, trainer, data):
        if not has_own_steps(self.model):
            data = keras.utils.unpack_x_y_sample_weight(data)
            return trainer.train_on_batch(*data, return_dict=True)
        # A step of its own gets the batch as it is given, which `fit` alone does.
        history = trainer.fit(tf.data.Dataset.from_tensors(data), verbose=0).history
        return {name: values[-1] for name, values in history.items()}

    def _disturb(self, seed):
        random = np.random.default_rng(seed)
        for variable in self.model.trainable_variables:
            factors = 1 + self.tolerance / 10 * random.standard_normal(variable.shape)
            variable.assign(variable.numpy() * factors.astype(variable.dtype))

    def _variables(self, step):
        for kind, found in (
            ("variable", self.model.trainable_variables),
            ("state", self.model.non_trainable_variables),
            ("optimizer", self._optimizer_variables()),
        ):
            for variable in found:
                yield ReportEntry(kind, variable.path, step, variable.numpy())

    def _optimizer_variables(self):
        every = variables.optimizers(self.model).values()
        return [variable for each in every for variable in each.variables]

    @contextlib.contextmanager
    def _set(self, setting):
        with contextlib.ExitStack() as stack:
            for layer in self.batch_norms if setting.alike else ():
                if self.plan.pipeline.alone:
                    stack.enter_context(attribute(layer, "synchronized", True))
                else:
                    stack.enter_context(attribute(layer, "call", _silenced(layer)))
            if setting.silent:
                for layer in filter(has_training_argument, self.random_layers):
                    stack.enter_context(attribute(layer, "call", _silenced(layer)))
            yield


def _silenced(layer):
    """The layer's call, never in training."""
    call = layer.call
    signature = inspect.signature(call)

    @functools.wraps(call)
    def silenced(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.arguments["training"] = False
        return call(*bound.args, **bound.kwargs)

    return silenced


@contextlib.contextmanager
def attribute(layer: keras.layers.Layer, name: str, value: Any) -> Iterator[None]:
    """Inside, the layer has another attribute, behind the back of Keras's tracking."""
    own = vars(layer)
    had = name in own
    before, own[name] = own.get(name), value
    try:
        yield
    finally:
        if had:
            own[name] = before
        else:
            del own[name]


def _check_finite(entry):
    if entry.kind == "loss" and not np.isfinite(entry.value):
        raise ValueError(
            f"The loss on one device is {entry.value} at {entry.name}; expected a "
            "finite one, so use fewer steps or a smaller learning rate."
        )

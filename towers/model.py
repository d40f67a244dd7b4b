"""The Keras door: `multi_gpu_model()` makes a Keras model train on towers.

Keras is the loop. What comes back is the model itself in everything but its three
steps, which a builder computes on towers; `fit` and its siblings, callbacks, metrics
and saving stay Keras's own.
"""

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
import wrapt

from towers import devices
from towers.builders.base import Builder, overrides
from towers.builders.parameter_server import ParameterServer
from towers.tower import ModelError

BUILDERS: dict[str, type[Builder]] = {"parameter_server": ParameterServer}


def multi_gpu_model(
    model: keras.Model,
    gpus: int | Sequence[int] | Sequence[str] | None = None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
    *,
    builder: str = "parameter_server",
    home: str | None = None,
    shares: Sequence[int] | None = None,
    loss_placement: str = "auto",
    strict: bool = True,
) -> "TowerModel":
    """Makes a model train, evaluate and predict on several devices.

    Each batch is cut into one share for each device; the results are those of one
    device with the whole batch. The returned model is compiled and fitted like any
    other. It shares everything with `model`, which itself goes on working on one
    device; whatever is saved is `model`, an ordinary Keras model.

    Example:
    >>> parallel = multi_gpu_model(model, gpus=2)
    >>> parallel.compile(optimizer="adam", loss="mse")
    >>> parallel.fit(x, y, batch_size=64)
    >>> model.save("model.keras")

    The name and the first four arguments are those of Keras 2's `multi_gpu_model`.

    Args:
        model: A Keras model. Its compiled state, if it has one, is kept.
        gpus: How many GPUs, or which: a count, a list of indices, or device strings.
            All by default. Without a GPU, logical CPUs stand in.
        cpu_merge: Whether gradients are added on the CPU; if not, on the first tower.
        cpu_relocation: Whether the variables move to the CPU; if not, they stay where
            they are.
        builder: How the variables are updated: "parameter_server".
        home: A device string to move the variables to, instead of `cpu_relocation`.
        shares: How much of a batch each tower gets, relative to the others: positive
            integers, such as (2, 3, 3) where the first GPU has less room. Even by
            default.
        loss_placement: Where the loss is computed: "tower", each the part of its share;
            "gathered", at home from the outputs of all towers. "auto" does so on the
            towers where the loss is proved to be a mean or a sum over examples. "tower"
            takes any loss for a mean over examples, also those that layers add.
        strict: Whether to refuse a model where it is seen that towers would compute
            other numbers than one device: a layer that lets examples depend on one
            another, or assigns what cannot be put together from shares. If not, each
            tower goes by its share, and assigned values are averaged.
            BatchNormalization, of which that is known, is never refused.

    Returns:
        A model that computes on towers.

    Raises:
        ValueError: If a device does not exist, the model cannot run as a tower, or
            another argument is not as described.
    """
    _check_model(model)
    if loss_placement not in ("auto", "tower", "gathered"):
        raise ValueError(
            f"Received loss_placement={loss_placement!r}; expected 'auto', 'tower' or "
            "'gathered'."
        )
    if builder not in BUILDERS:
        raise ValueError(
            f"Received builder='{builder}'; expected one of {sorted(BUILDERS)}."
        )
    towers = devices.resolve(gpus)
    shares = _check_shares(shares, len(towers))
    if home is None:
        home = devices.HOST if cpu_relocation else _where(model)
    (home,) = devices.resolve([home])
    _move_weights(model, home)
    merge = towers[0]
    if cpu_merge:
        # Home, where the sum is needed, if that is a CPU.
        merge = home if "CPU" in home else devices.HOST
    build = BUILDERS[builder]
    return TowerModel(
        model, build(model, towers, home, merge, shares, loss_placement, strict)
    )


class TowerModel(wrapt.CallableObjectProxy):
    """A Keras model whose steps run on towers: a proxy of the user's own model.

    Every attribute is that of the model, but for the loop's methods, which run with
    this object as their `self` and so find the builder's steps instead of the model's.
    """

    # What the loop keeps on its `self`, apart from the model's own of the same name.
    train_function = None
    test_function = None
    predict_function = None

    def __init__(self, model: keras.Model, builder: Builder):
        super().__init__(model)
        self._self_builder = builder
        self._self_seen = []
        self._follow()

    @property
    def builder(self) -> Builder:
        """The builder, which knows towers and home."""
        return self._self_builder

    @property
    def loss_placement(self) -> str | None:
        """Where the loss is computed, "tower" or "gathered"; `None` before a step."""
        return self._self_builder.loss_placed

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model; see `keras.Model.compile`."""
        self.__wrapped__.compile(*args, **kwargs)
        self._follow()

    @property
    def jit_compile(self) -> bool:
        """False: XLA compiles each tower, and cannot compile the step around them."""
        return False

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self.__wrapped__.jit_compile = value

    def _follow(self):
        """Starts anew if the model was compiled or moved, through whichever object."""
        model = self.__wrapped__
        before, seen = self._self_seen, self._current()
        self._self_seen = seen
        if len(seen) == len(before) and all(map(operator.is_, seen, before)):
            return
        self.train_function = self.test_function = self.predict_function = None
        self._self_builder.forget()
        # A step count, a learning rate and means were created where the user was.
        optimizer = getattr(model, "optimizer", None)
        variables = [*model.metrics_variables]
        variables += optimizer.variables if optimizer is not None else []
        _move(model, variables, self._self_builder.home)

    def _current(self):
        model = self.__wrapped__
        compiled = getattr(model, "_compile_config", None)
        return [compiled, *(v.value for v in model.variables)]

    def make_train_function(self, force: bool = False) -> None:
        """Makes what `fit` calls with an iterator; see `keras.Model`."""
        self._follow()
        if force or self.train_function is None:
            self.train_function = self._self_builder.train_function(self._step)

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on one global batch, on towers."""
        with self._step():
            return self._self_builder.train_step(data)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch, on towers."""
        with self._step():
            return self._self_builder.test_step(data)

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch, on towers."""
        with self._step():
            return self._self_builder.predict_step(data)

    @contextlib.contextmanager
    def _step(self):
        # Where TensorFlow is not told, it would choose the first GPU: for cutting a
        # batch that is on the host, and has to go to all of them.
        with tf.device(devices.HOST):
            try:
                yield
                # What was built in the meantime is not a change.
                self._self_seen = self._current()
            except ValueError as error:
                # TensorFlow has no public name for it.
                if type(error).__name__ != "InaccessibleTensorError":
                    raise
                raise ModelError(
                    f"Model '{self.__wrapped__.name}' keeps a tensor of one call for "
                    "later, in an attribute, or in a variable that it assigns inside "
                    "`tf.cond` or a `tf.function`; towers cannot carry it, so return "
                    "it as an output, or assign outside."
                ) from error

    def __reduce__(self):
        return self.__wrapped__.__reduce__()


def _loop_method(name):
    def method(self, *args, **kwargs):
        self._follow()
        return getattr(type(self.__wrapped__), name)(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"See `keras.Model.{name}`."
    return method


for _name in (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
    "make_test_function",
    "make_predict_function",
    "_make_function",
):
    setattr(TowerModel, _name, _loop_method(_name))


def _check_model(model: Any) -> None:
    if isinstance(model, TowerModel):
        raise ValueError(
            "Received a model that multi_gpu_model() has made; expected the user's own "
            "Keras model, so pass the original one."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"Received a {type(model).__name__}; expected a keras.Model, so build one "
            "with Keras 3 (not tf_keras)."
        )
    kinds = "train", "test", "predict"
    for step in [f"{kind}_step" for kind in kinds] + [
        f"make_{kind}_function" for kind in kinds
    ]:
        if overrides(model, step):
            raise ValueError(
                f"{type(model).__name__} overrides `{step}`, which computes on one "
                "device; expected Keras's own, so override `compute_loss` or "
                "`compute_metrics` instead."
            )
    if tf.distribute.has_strategy():
        raise ValueError(
            f"Called in the scope of {type(tf.distribute.get_strategy()).__name__}; "
            "towers replace tf.distribute, so leave the scope first."
        )


def _check_shares(shares: Any, towers: int) -> tuple[int, ...]:
    if shares is None:
        return (1,) * towers
    try:
        found = tuple(map(operator.index, shares))
    except TypeError:
        found = ()
    if len(found) != towers or min(found) < 1:
        raise ValueError(
            f"Received shares={shares} for {towers} towers; expected a positive "
            "integer for each, such as (2, 3, 3)."
        )
    return found


def _where(model: keras.Model) -> str:
    """The device that the model's variables are on; the host's if it has none yet."""
    variables = model.trainable_variables or model.variables
    return variables[0].value.device if variables else devices.HOST


def _move_weights(model: keras.Model, home: str) -> None:
    """Moves the model's variables to `home`, keeping their values."""
    optimizer = getattr(model, "optimizer", None)
    if _elsewhere(model.variables, home) and optimizer is not None and optimizer.built:
        raise ValueError(
            f"Cannot move the variables to {home}: the model's optimizer is built for "
            "them where they are; create or load the model under `tf.device` instead."
        )
    _move(model, model.variables, home)


def _move(model: keras.Model, variables: Sequence[keras.Variable], home: str) -> None:
    """Moves variables of a model to `home`, keeping their values."""
    for variable in _elsewhere(variables, home):
        old = variable.value
        with tf.device(home):
            variable._value = tf.Variable(
                old, trainable=old.trainable, name=variable.name, dtype=old.dtype
            )
        # What Keras has traced for one device refers to the old ones.
        model.train_function = model.test_function = model.predict_function = None


def _elsewhere(variables, home):
    return [v for v in variables if not v.value.device.endswith(home)]

"""Keras models: their compiled parts, steps and callbacks."""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.models.functional import Functional

from towers.keras_adapter.patching import Target, patched, swapped

TRAINER = next(c for c in keras.Model.__mro__ if "_compute_loss" in vars(c))
"""The base class of `keras.Model` that trains; Keras 3.16 has moved it."""

COMPUTE_LOSS = Target(TRAINER, "_compute_loss")
"""`_compute_loss(x, y, y_pred, sample_weight, training)` of a model."""

_TELLS_FIRST = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 11)
_STEPS = "train_step", "test_step", "predict_step"


def overrides(model: keras.Model, method: str) -> bool:
    """Checks whether a model, or its class, replaces a method of `keras.Model`."""
    bound = getattr(model, method)
    if isinstance(bound, _Prepared):
        bound = bound.method
    return getattr(bound, "__func__", bound) is not getattr(keras.Model, method)


def has_own_steps(model: keras.Model) -> bool:
    """Checks whether a model defines a step itself."""
    return any(overrides(model, step) for step in _STEPS)


def compile_config(model: keras.Model) -> Any:
    """Returns an object that each `compile` creates anew; `None` before the first."""
    return getattr(model, "_compile_config", None)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of the last `compile`, by name; empty before the first."""
    return getattr(compile_config(model), "config", {})


def already(model: keras.Model, name: str) -> list[Any]:
    """Returns a list property of a model; empty if it cannot be computed yet.

    A user's property may refer to attributes that `compile` or `build` creates.
    """
    try:
        return list(getattr(model, name))
    except Exception:
        if model.built and compile_config(model) is not None:
            raise
        return []


def before_training(model: keras.Model, prepare: Callable[[], None]) -> None:
    """Makes Keras call a function before it trains a model by its own loop.

    Args:
        model: A model, whose instance gets a `make_train_function` of its own.
        prepare: The function; replaces an earlier one for this model.
    """
    method = types.MethodType(type(model).make_train_function, model)
    # Keras would track an assigned attribute.
    vars(model)["make_train_function"] = _Prepared(prepare, method)


@dataclasses.dataclass
class _Prepared:
    """A method that calls a function first.

    Attributes:
        prepare: The function.
        method: The method of the model's class.
    """

    prepare: Callable[[], None]
    method: types.MethodType

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.prepare()
        return self.method(*args, **kwargs)


def compiled_loss(model: keras.Model) -> Any:
    """Returns Keras's `CompileLoss`, the sum of all compiled losses, or `None`.

    It is called with `(y_true, y_pred, sample_weight)`. It has `variables`, `metrics`
    (a tracker for each of several losses) and `built`.
    """
    return model._compile_loss


def compute_loss(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    *,
    training: bool = True,
) -> tf.Tensor:
    """Calls `compute_loss` of a model, which need not have a `training` argument.

    The arguments are those of `keras.Model.compute_loss`.
    """
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


@contextlib.contextmanager
def measuring(model: keras.Model, inputs: Any, targets: Any) -> Iterator[None]:
    """Makes a model's metrics take other inputs and targets within the context."""
    compute_metrics = model.compute_metrics
    own = vars(model).get("compute_metrics")

    def measure(x, y, y_pred, sample_weight=None):
        del x, y
        return compute_metrics(inputs, targets, y_pred, sample_weight)

    # The model's `__setattr__` would look for layers.
    vars(model)["compute_metrics"] = measure
    try:
        yield
    finally:
        del vars(model)["compute_metrics"]
        if own is not None:
            vars(model)["compute_metrics"] = own


def symbolic_build(model: keras.Model, data: Any) -> None:
    """Creates the variables of layers, losses, metrics and optimizer.

    `data` is a batch as for `train_step`, of `keras.KerasTensor`s, and of
    `tf.TypeSpec`s of ragged and sparse tensors: Keras would take symbols of these for
    dense ones.
    """
    parts = [*model._flatten_layers(), model._compile_metrics, model._compile_loss]
    built = all(part is None or part.built for part in parts)
    if not built and any(isinstance(s, tf.TypeSpec) for s in tf.nest.flatten(data)):
        backend.compute_output_spec(_call_and_measure, model, data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    measures = []
    if not built and (y_pred := _outputs_known(model, x)) is not None:
        # Keras would call the model for it, which takes half as long as to trace it.
        backend.compute_output_spec(_measure, model, x, y, y_pred, sample_weight)
        measures = [model._compile_metrics, model._compile_loss]
        measures = [measure for measure in measures if measure is not None]
    with swapped(measures, "built", [True] * len(measures)):
        model._symbolic_build(data_batch=data)


def _outputs_known(model, x):
    """Returns the outputs of a built functional model as symbols; `None` of others.

    Their number of rows may be unknown. If another of their dimensions is, or if one of
    an input is not the one that the model was made for, a call tells more about shapes.
    """
    by = Functional if isinstance(model, Functional) else keras.Sequential
    if getattr(model.call, "__func__", None) is not by.call:
        return None
    if not all(layer.built for layer in model._flatten_layers()):
        return None
    # A sequential model of layers that cannot be called on symbols has none.
    expected = [symbol.shape[1:] for symbol in getattr(model, "inputs", None) or ()]
    received = [getattr(symbol, "shape", ())[1:] for symbol in keras.tree.flatten(x)]
    if not expected or received != expected:
        return None
    if any(None in symbol.shape[1:] for symbol in model.outputs):
        return None
    # As in `call`, a list of one output is this output.
    return model.outputs[0] if len(model.outputs) == 1 else model.output


def _call_and_measure(model, data):
    """Calls the parts that Keras builds, as Keras does, with ragged placeholders."""
    data = tf.nest.map_structure(_placeholder, data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    _measure(model, x, y, model(x, training=False), sample_weight)


def _measure(model, x, y, y_pred, sample_weight):
    """Calls the compiled metrics and losses that are not built, as Keras does."""
    metrics, loss = model._compile_metrics, model._compile_loss
    if metrics is not None and not metrics.built:
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    if loss is not None and not loss.built:
        model._compute_loss(x, y, y_pred, sample_weight=sample_weight, training=False)


def _placeholder(symbol):
    if isinstance(symbol, tf.SparseTensorSpec):
        return tf.compat.v1.sparse_placeholder(symbol.dtype, symbol.shape)
    if isinstance(symbol, tf.RaggedTensorSpec):
        rank = symbol.ragged_rank
        inner = symbol.shape[rank + 1 :]
        return tf.compat.v1.ragged.placeholder(symbol.dtype, rank, inner)
    return symbol


@contextlib.contextmanager
def compute_loss_replaced(model: keras.Model, by: Callable[..., Any]) -> Iterator[None]:
    """Makes Keras's own steps and `symbolic_build` call another `compute_loss`.

    `by` is called with `(x, y, y_pred, sample_weight, training)`. Other models keep
    their own method.
    """

    def dispatch(original, called, *args, **kwargs):
        if called is not model:
            return original(called, *args, **kwargs)
        return by(*args, **kwargs)

    with patched(COMPUTE_LOSS, dispatch):
        yield


@contextlib.contextmanager
def compiled_loss_as_built(model: keras.Model) -> Iterator[None]:
    """Keeps Keras from building the compiled losses within the context."""
    losses = [model._compile_loss] if model._compile_loss is not None else []
    with swapped(losses, "built", [True] * len(losses)):
        yield


def batches_done(model: keras.Model, batch: int) -> int:
    """Returns how many batches of an epoch are done when Keras reports a batch.

    Keras 3.10 reports the first of a call's `steps_per_execution` batches, as it does
    in `on_train_batch_begin`; later versions report the last one. The last call of an
    epoch may have fewer batches, which no version reports.
    """
    return batch + (model.steps_per_execution if _TELLS_FIRST else 1)


def called_callback(frame: types.FrameType) -> keras.callbacks.Callback | None:
    """Returns the callback that a `CallbackList` calls in a frame.

    Returns `None` for other frames, and while Keras waits for the values that it passes
    to callbacks.
    """
    if frame.f_globals.get("__name__") != keras.callbacks.CallbackList.__module__:
        return None
    return frame.f_locals.get("callback")


def builds_graph(frame: types.FrameType) -> bool:
    """Checks whether TensorFlow traces a function, or Keras a layer, in a frame."""
    return frame.f_code.co_name in ("func_graph_from_py_func", "compute_output_spec")

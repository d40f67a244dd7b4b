"""Rewrites errors of models that towers cannot run, with a remedy in a sentence."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from towers.keras_adapter.layers import layer_of
from towers.keras_adapter.models import compiled_loss
from towers.layers import sharded
from towers.program import words

# TensorFlow's messages for shapes that do not fit.
_SHAPES_DO_NOT_FIT = (
    "Dimensions must be equal",
    "Dimensions of inputs should match",
    "Incompatible shapes",
    "Input to reshape is a tensor with",
    "Matrix size-incompatible",
    "In[0] mismatch In[1] shape",
    "must be evenly divisible",
    "required broadcastable shapes",
    "required shape to be",
)

_IN_THE_LOSS = ", in its loss"

_ROWS_DIFFER = r"(Received .* with different numbers of rows; .*?)\] \[Condition"
# Packages whose lines do not help a user.
_LIBRARIES = "keras", "tensorflow", "towers"


class ModelError(ValueError):
    """A model does something that a tower, as a pure function, cannot do."""


class StageError(ModelError):
    """A stage has failed for an unknown reason."""


@contextlib.contextmanager
def explained_build(model: keras.Model) -> Iterator[None]:
    """Rewrites errors about shapes while Keras builds a model in the context.

    Args:
        model: The model.

    Raises:
        ModelError: Shapes do not fit, whatever the number of towers.
    """
    try:
        yield
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, ModelError) or (message := _about_shapes(error)) is None:
            raise
        raise ModelError(
            f"Model '{model.name}' cannot compute a whole batch{_where(model, error)} "
            f"({message}); expected y and sample_weight whose shapes fit those of the "
            "outputs. If one device raises the same error, no number of towers can."
        ) from error


@contextlib.contextmanager
def explained_shapes(model: keras.Model) -> Iterator[None]:
    """Rewrites errors about shapes while towers are traced or run in the context.

    Args:
        model: The model of the towers.

    Raises:
        ModelError: TensorFlow reports that shapes do not fit.
    """
    try:
        yield
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, ModelError):
            raise
        # The message of `batch.check_rows` if only the graph knows the numbers of rows.
        if rows := re.search(_ROWS_DIFFER, str(error)):
            raise ModelError(rows[1]) from error
        message = _about_shapes(error)
        if message is None:
            raise
        where = _where(model, error)
        if where == _IN_THE_LOSS:
            expected = "y and sample_weight whose shapes fit those of the outputs"
        else:
            expected = (
                "layers that treat each example by itself, so do not group rows, as "
                "`reshape(h, (-1, 4, d))` does, and make a matrix of all rows a "
                "variable of the model"
            )
        raise ModelError(
            f"Model '{model.name}' cannot compute a local batch, a part of the rows"
            f"{where} ({message}); expected {expected}. If one device raises the same "
            "error, the shapes do not fit there either."
        ) from error


@contextlib.contextmanager
def explained_trace(model: keras.Model) -> Iterator[None]:
    """Rewrites errors that towers can explain while a step is traced in the context.

    Args:
        model: The model.

    Raises:
        ModelError: The step uses a static batch size, or no variable has a gradient.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        if "No gradients provided" in str(error):
            raise ModelError(
                f"No variable of model '{model.name}' has a gradient; expected a loss "
                "that depends on trainable variables, so look for a stop_gradient, or "
                "for an operation without a gradient."
            ) from error
        if "None" not in str(error):
            raise
        raise ModelError(
            f"Model '{model.name}' could not be traced with an unknown number of "
            "examples, as towers do; expected no use of a static one, so write "
            f"keras.ops.shape(x)[0] instead of x.shape[0]. It said: {error}"
        ) from error


def _about_shapes(error):
    """Returns the line of an error that says that shapes do not fit, or `None`."""
    lines = re.sub(r"\x1b\[\d*m|\{\{.*?\}\}", "", str(error)).splitlines()
    for line in lines:
        if any(wording in line for wording in _SHAPES_DO_NOT_FIT):
            message = re.sub(r"^\(\d+\) [A-Z_]+:\s*", "", line.strip())
            return re.split(r" for '|\[\[| \[Op:", message)[0].strip().rstrip(".")
    return None


def _where(model, error):
    """Returns ", in ..." with the layer or loss whose operation failed, or ""."""
    node = re.search(r"\{\{node (\S+?)\}\}|Detected at node (\S+)", str(error))
    if not node:
        return ""
    operation = node[1] or node[2]
    loss = compiled_loss(model)
    if loss is not None and loss.name in operation.split("/"):
        return _IN_THE_LOSS
    layer = layer_of(model, operation)
    return f", in layer '{layer}'" if layer else ""


@contextlib.contextmanager
def explained_stages(
    model: keras.Model, reason: Callable[[], Exception | None]
) -> Iterator[None]:
    """Finds the error of a failed stage while a model runs in the context.

    When a function fails, TensorFlow cancels all operations that wait for it, on all
    devices, before it reports the failure.

    Args:
        model: The model.
        reason: Finds the error of a failed stage; returns `None` if it cannot.

    Raises:
        ModelError: A stage has failed.
        StageError: A stage has failed for an unknown reason.
    """
    try:
        yield
    except tf.errors.CancelledError as error:
        failed = f"A stage of model '{model.name}' has failed"
        cause = reason()
        if cause is None:
            raise StageError(
                f"{failed}, and TensorFlow does not hand on how; computed again op by "
                "op, on the host, the batch does not fail, so perhaps a device has run "
                "out of memory. Look for the first 'aborting with status' among what "
                "TensorFlow prints, with TF_CPP_MIN_LOG_LEVEL=1 in the environment, or "
                "pass stages=1 to multi_gpu_model."
            ) from error
        text = words.error_sentence(cause).strip()
        raise ModelError(
            f"{failed}: {type(cause).__name__}: {text}. The batch was computed again "
            "to find that out, op by op, on the host, which changes no variable."
        ) from cause


@contextlib.contextmanager
def explained_look_ups(model: keras.Model) -> Iterator[None]:
    """Corrects ids in errors of look-ups within the context.

    TensorFlow numbers the rows of a shard from 0.

    Args:
        model: The model.

    Raises:
        ModelError: A table that is cut by rows lacks one of the ids.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        match = re.search(r"= (-?\d+) is not in \[0, (\d+)\)", str(error))
        if match is None:
            raise
        row, size = map(int, match.groups())
        last = 0 if row < 0 else -1
        tables = [
            f"{row + cut.starts[last]} for table '{variable.path}', whose "
            f"{variable.shape[0]} rows lie on several devices"
            for variable in model.trainable_variables
            if (cut := sharded.of(variable)) is not None
            and cut.axis == 0
            and cut.shards[last].shape[0] == size != variable.shape[0]
        ]
        if not tables:
            raise
        raise ModelError(
            f"Received id {', or '.join(tables)}; expected ids from 0 to the number of "
            "rows less one, so make `input_dim` of the Embedding larger, or check the "
            "data."
        ) from error


@contextlib.contextmanager
def explained_leaks(model: keras.Model) -> Iterator[None]:
    """Rewrites errors about leaked tensors while a step is traced in the context.

    Args:
        model: The model.

    Raises:
        ModelError: A tensor of one call is used in another.
    """
    try:
        yield
    except ValueError as error:
        # TensorFlow has no public name for this error.
        if type(error).__name__ != "InaccessibleTensorError":
            raise
        raise ModelError(
            f"Model '{model.name}' keeps a tensor of one call for later, in an "
            "attribute, or in a variable that it assigns inside `tf.cond` or a "
            "`tf.function`; towers cannot carry it, so return it as an output, or "
            "assign outside."
        ) from error


class PartitionError(ModelError):
    """A function of a batch does something that several towers cannot do together."""


def where(op: tf.Operation) -> str:
    """Returns the line of user code that made an operation, as a phrase, or ""."""
    known = [
        os.path.dirname(sys.modules[name].__file__) + os.sep
        for name in _LIBRARIES
        if name in sys.modules
    ]
    for frame in reversed(op.traceback or ()):
        file, line = frame[0], frame[1]
        if not any(os.path.abspath(file).startswith(folder) for folder in known):
            return f" at {file}:{line}"
    return ""

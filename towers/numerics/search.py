"""Finds where numbers stop being finite in a stopped step.

The step is computed again, op by op, with the same variables, batch and random seeds,
and each layer's call is watched. Forward, the search finds the first layer with finite
inputs and non-finite outputs; backward, the first that turns a finite gradient into a
non-finite one. Steps that are not stopped run none of this.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.collectives import batch
from towers.keras_adapter.layers import (
    OPERATION_CALL,
    TAGS,
    call_model,
    logits_of,
    set_tag,
    tag,
)
from towers.keras_adapter.models import compute_loss
from towers.keras_adapter.patching import patched
from towers.layers import substitutes
from towers.layers.variables import not_trained
from towers.numerics import recorded_step
from towers.numerics.recorded_step import RecordedStep, named
from towers.program import words
from towers.tower import eager


@dataclasses.dataclass(frozen=True)
class NonFiniteOrigin:
    """The first value that was not finite.

    Attributes:
        source: "data", "variable" (before the step), "layer", "loss", "gradient" (of a
            step that the model defines itself), or "unknown".
        name: The tensor, variable or layer, as a phrase.
        during: "forward", "backward", "update" (of the step before), or "" if the value
            was not finite before.
        tower: The index of the tower, `None` if unknown.
        towers: The number of towers.
        micro_batches: How many of these towers are micro-batches of one tower.
        rows: The examples in question, as rows of the batch; none if unknown.
        examples: The number of examples in the step.
    """

    source: str
    name: str = ""
    during: str = ""
    tower: int | None = None
    towers: int = 1
    micro_batches: int = 1
    rows: tuple[int, ...] = ()
    examples: int = 0

    def __str__(self) -> str:
        if self.source == "data":
            more = len(self.rows) - 1
            others = f" (and {words.count(more, 'more row')})"
            clause = f"{self.name}[{self.rows[0]}] of the batch"
            return f"{clause}{others if more else ''} is not finite{self._on()}"
        if self.source == "variable":
            made = ": the update of the step before made it so" if self.during else ""
            return f"the variable {self.name} was not finite before it{made}"
        if self.source == "unknown":
            return (
                "the loss or a gradient is not finite, but was when the step was "
                "computed once more, op by op"
            )
        if self.source == "gradient":
            return f"a gradient is not finite{self._on()}"
        clause = {
            ("layer", "forward"): f"the output of {self.name} is not finite",
            ("layer", "backward"): f"{self.name} makes a gradient that is not finite",
            ("loss", "forward"): "the loss is not finite, while the outputs are,",
            ("loss", "backward"): "the loss has a gradient that is not finite",
        }[self.source, self.during]
        count = ""
        if self.rows:
            count = f", {len(self.rows)} of {self.examples} examples"
        return f"{clause}{self._on()} ({self.during} pass){count}"

    @property
    def advice(self) -> str:
        """A hint at where to look, as a clause."""
        if self.source == "variable" and not self.during:
            return "look for what has set it"
        return {
            "data": "look where it comes from, or leave it out",
            "variable": "try a smaller learning rate, or clip the gradients",
            "layer": "look for a root, logarithm or quotient there, or try a smaller "
            "learning rate",
            "loss": "look for a root, logarithm or quotient in it, and for targets "
            "that it does not expect",
            "gradient": "look for a root, logarithm or quotient in the step, or try a "
            "smaller learning rate",
            "unknown": "look for a layer that does not compute the same twice",
        }[self.source]

    def _on(self):
        if self.tower is None:
            return ""
        count = self.micro_batches
        clause = f" on tower {self.tower // count} of {self.towers // count}"
        if count > 1:
            clause += f", in micro-batch {self.tower % count} of {count}"
        return clause


def locate(model: keras.Model, file: str | os.PathLike) -> NonFiniteOrigin:
    """Repeats a stopped step, and finds the first value that is not finite.

    Examples:
        >>> parallel = multi_gpu_model(model, gpus=2, check_numerics="bad.npz")
        >>> parallel.fit(x, y)  # stops, says where, and writes bad.npz
        >>> print(locate(model, "bad.npz"))

    Args:
        model: The same model, compiled with the same loss, on any machine. The step is
            computed with the values of the file; no variable of the model changes.
        file: The file that was written when the step was stopped.

    Returns:
        The origin. `str()` gives a sentence.

    Raises:
        ValueError: The file does not hold such a step, or holds one of another model,
            or the model is not compiled.
    """
    model = getattr(model, "__wrapped__", model)
    if not model.compiled:
        raise ValueError(
            f"Received model '{model.name}', which is not compiled; expected the loss "
            "of the step, so call `model.compile(loss=...)` first (towers.train has "
            "SparseCategoricalCrossentropy, or CategoricalCrossentropy of mixed "
            "examples, and from_logits=True unless the model ends in a softmax)."
        )
    recorded = recorded_step.read(file)
    eager.from_symbols(model, recorded.data)
    shapes = [tuple(variable.shape) for variable in variables_of(model)]
    saved = [tuple(value.shape) for value in recorded.variables]
    if shapes != saved:
        raise ValueError(
            f"Received {os.fspath(file)} with {len(saved)} variables for a model with "
            f"{len(shapes)}, or of other shapes; expected the model that it was "
            "written for."
        )
    return search(model, recorded)


def search(model: keras.Model, recorded: RecordedStep) -> NonFiniteOrigin:
    """Finds the first value of a step that is not finite, on the current device.

    Args:
        model: A built, compiled model. No variable changes.
        recorded: The step.
    """
    origin = _search(model, recorded)
    towers, count = recorded.towers, recorded.micro_batches
    return dataclasses.replace(origin, towers=towers, micro_batches=count)


def _search(model, recorded):
    values = [tf.convert_to_tensor(value) for value in recorded.variables]
    for variable, value in zip(variables_of(model), values, strict=True):
        if not _is_finite(value):
            during = "update" if recorded.step > 1 else ""
            return NonFiniteOrigin("variable", f"'{variable.path}'", during)
    size = batch.batch_size(recorded.data)
    bounds = batch.split_bounds(size, recorded.split_ratios)
    origin = _search_batch(model, recorded.data, values, bounds)
    if origin is None:
        return NonFiniteOrigin("unknown")
    if origin.tower is None and origin.rows:
        (tower,) = (k for k, (i, end) in enumerate(bounds) if i <= origin.rows[0] < end)
        origin = dataclasses.replace(origin, tower=tower)
    if origin.tower is not None:
        origin = dataclasses.replace(origin, tower=recorded.first + origin.tower)
    return origin


# The batch.


def _search_batch(model, data, values, bounds):
    """Returns the first non-finite value of a batch, `None` if all are finite.

    `bounds` are the bounds of the towers' rows.
    """
    origin = _replay(model, data, values, bounds)
    if origin is None:
        return None
    origin = in_data(data) or origin
    return dataclasses.replace(origin, examples=batch.batch_size(data))


def in_data(data: tuple[Any, Any, Any]) -> NonFiniteOrigin | None:
    """Finds a non-finite value in (x, y, sample_weight); `None` if all are finite."""
    size = batch.batch_size(data)
    for name, tensor in named(data).items():
        if rows := bad_rows(tensor, size):
            return NonFiniteOrigin("data", name, rows=rows)
    return None


def _replay(model, data, values, bounds):
    x, y, sample_weight = data
    params = values[: len(model.trainable_variables)]
    mapping = [*zip(variables_of(model), values, strict=True)]
    size = batch.batch_size(x)
    with (
        tf.GradientTape() as tape,
        keras.StatelessScope(mapping, collect_losses=True),
        substitutes.batch_normalization(),
    ):
        tape.watch(params)
        with _watched() as calls:
            outputs = call_model(model, x, training=True)
        if origin := _forward(model, calls, size):
            return origin
        loss = compute_loss(model, x, y, outputs, sample_weight)
        if not _is_finite(loss):
            tower = _tower_of_loss(model, (x, y, outputs, sample_weight), bounds)
            return NonFiniteOrigin("loss", during="forward", tower=tower)
    return _backward(model, calls, tape, loss, params, outputs, size)


def _tower_of_loss(model, given, bounds):
    """Returns the first tower whose rows alone have a non-finite loss, if any."""
    for k, (start, end) in enumerate(bounds):
        if start == end:
            continue
        try:
            tower_loss = compute_loss(model, *batch.take(given, start, end))
        except Exception:
            # The user's loss may need the whole batch.
            return None
        if not _is_finite(tower_loss):
            return k
    return None


class _Call(NamedTuple):
    """A finished call of a layer, or of another of Keras's operations.

    Attributes:
        operation: The operation that was called.
        inputs: Copies of its floating inputs, so that their gradients are those of this
            call alone.
        outputs: Its floating outputs.
    """

    operation: keras.Operation
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


@contextlib.contextmanager
def _watched() -> Iterator[list[_Call]]:
    """Inside, lists calls as they end: inner calls before outer ones."""
    calls = []

    def watched(call, operation, *args, **kwargs):
        if not tf.executing_eagerly():
            return call(operation, *args, **kwargs)
        args, kwargs = keras.tree.map_structure(_copy, (args, kwargs))
        outputs = call(operation, *args, **kwargs)
        calls.append(_Call(operation, _floats((args, kwargs)), _floats(outputs)))
        return outputs

    with patched(OPERATION_CALL, watched):
        yield calls


def _copy(value):
    if not _is_float(value):
        return value
    copy = tf.identity(value)
    for name in TAGS:
        set_tag(copy, name, tag(value, name))
    return copy


def _forward(model, calls, size):
    """Returns the first call that has finite inputs and non-finite outputs."""
    reached = None
    for operation, inputs, outputs in calls:
        if not _all_finite(inputs):
            # Finite in the data, but not in the layer's type, or computed in between.
            reached = reached or (
                f"what comes before {_phrase(model, operation)}",
                inputs,
            )
        elif not _all_finite(outputs):
            reached = reached or (_phrase(model, operation), outputs)
            break
    if reached is None:
        return None
    name, tensors = reached
    return NonFiniteOrigin("layer", name, "forward", rows=_rows_of(tensors, size))


def _backward(model, calls, tape, loss, params, outputs, size):
    """Returns the call that turns a finite gradient into a non-finite one."""
    ends = [t for t in _ends(outputs) if _is_float(t)]
    sources = [ends, params, [call.inputs for call in calls]]
    sources.append([call.outputs for call in calls])
    of_ends, of_params, of_inputs, of_outputs = tape.gradient(loss, sources)
    if not _all_finite(of_ends):
        rows = _rows_of(of_ends, size)
        return NonFiniteOrigin("loss", during="backward", rows=rows)
    by_variable = {
        id(variable): gradient
        for variable, gradient in zip(model.trainable_variables, of_params, strict=True)
    }
    for call, before, after in zip(calls, of_inputs, of_outputs, strict=True):
        weights = getattr(call.operation, "trainable_variables", ())
        of_weights = [by_variable.get(id(variable)) for variable in weights]
        if _all_finite(after) and not _all_finite([*before, *of_weights]):
            name = _phrase(model, call.operation)
            return NonFiniteOrigin(
                "layer", name, "backward", rows=_rows_of(before, size)
            )
    return None


def _ends(outputs):
    """Returns the outputs and their logits, on which a loss may depend."""
    flat = tf.nest.flatten(outputs)
    return [*flat, *(logits for logits in map(logits_of, flat) if logits is not None)]


def _phrase(model, operation):
    if operation is model:
        return f"model '{model.name}' outside of its layers"
    layer = isinstance(operation, keras.layers.Layer)
    return f"{'layer' if layer else 'operation'} '{operation.name}'"


# Tensors.


def bad_rows(tensor: Any, size: int) -> tuple[int, ...]:
    """Returns the rows of a tensor that are not finite, if it has one an example."""
    if not _is_float(tensor) or not tensor.shape.rank or tensor.shape[0] != size:
        return ()
    wrong = ~tf.math.is_finite(tensor)
    rows = tf.reduce_any(tf.reshape(wrong, [size, -1]), axis=1)
    return tuple(map(int, np.flatnonzero(rows)))


def _rows_of(tensors, size):
    return next(filter(None, (bad_rows(tensor, size) for tensor in tensors)), ())


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that a call may assign: trained ones, then the state."""
    return model.trainable_variables + not_trained(model)


def _is_float(value):
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _floats(nest):
    return [*filter(_is_float, keras.tree.flatten(nest))]


def _is_finite(tensor):
    if isinstance(tensor, tf.IndexedSlices):
        tensor = tensor.values
    if not _is_float(tensor):
        return True
    return bool(tf.reduce_all(tf.math.is_finite(tensor)))


def _all_finite(tensors):
    return all(map(_is_finite, tensors))

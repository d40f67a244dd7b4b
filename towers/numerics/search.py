"""Finds where numbers stop being finite in a step that was stopped.

The step is computed once more, op by op, with the same variables, batch and random
seeds, and each layer's call is watched: forward, the first whose outputs are not finite
while its inputs are; backward, the first that makes such a gradient of one that is
finite. Where no step is stopped, nothing of this runs.
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
from towers.layers import fused
from towers.layers.variables import not_trained
from towers.numerics import recorded_step
from towers.numerics.recorded_step import RecordedStep, named
from towers.program import words
from towers.tower import build


@dataclasses.dataclass(frozen=True)
class NonFiniteOrigin:
    """What was not finite first.

    Attributes:
        source: "data", "variable" (before the step), "layer", "loss", "gradient" (of a
            step that the model defines itself), or "unknown".
        name: Of the tensor, variable or layer, as a phrase.
        during: "forward", "backward", "update" (of the step before), or "" where it was
            there before.
        tower: Index of the tower, `None` if it cannot be told.
        towers: Number of towers.
        micro_batches: How many of these towers are micro-batches of one.
        rows: The examples in question, as rows of the batch; none if they cannot be
            told.
        examples: How many examples the step had.
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
            what = f"{self.name}[{self.rows[0]}] of the batch"
            return f"{what}{others if more else ''} is not finite{self._on()}"
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
        what = {
            ("layer", "forward"): f"the output of {self.name} is not finite",
            ("layer", "backward"): f"{self.name} makes a gradient that is not finite",
            ("loss", "forward"): "the loss is not finite, while the outputs are,",
            ("loss", "backward"): "the loss has a gradient that is not finite",
        }[self.source, self.during]
        count = ""
        if self.rows:
            count = f", {len(self.rows)} of {self.examples} examples"
        return f"{what}{self._on()} ({self.during} pass){count}"

    @property
    def advice(self) -> str:
        """What to look at, as a clause."""
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
        found = f" on tower {self.tower // count} of {self.towers // count}"
        if count > 1:
            found += f", in micro-batch {self.tower % count} of {count}"
        return found


def locate(model: keras.Model, file: str | os.PathLike) -> NonFiniteOrigin:
    """Repeats a step that was stopped, and says what was not finite first.

    Examples:
        >>> parallel = multi_gpu_model(model, gpus=2, check_numerics="bad.npz")
        >>> parallel.fit(x, y)  # stops, says where, and writes bad.npz
        >>> print(locate(model, "bad.npz"))

    Args:
        model: The same model, compiled with the same loss, on any machine. The step is
            computed with the values of the file, and no variable of the model changes.
        file: The file that was written when the step was stopped.

    Returns:
        The origin. `str()` gives a sentence.

    Raises:
        ValueError: The file is not of such a step or of another model, or the model is
            not compiled.
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
    build.from_symbols(model, recorded.data)
    shapes = [tuple(variable.shape) for variable in variables_of(model)]
    found = [tuple(value.shape) for value in recorded.variables]
    if shapes != found:
        raise ValueError(
            f"Received {os.fspath(file)} with {len(found)} variables for a model with "
            f"{len(shapes)}, or of other shapes; expected the model that it was "
            "written for."
        )
    return search(model, recorded)


def search(model: keras.Model, recorded: RecordedStep) -> NonFiniteOrigin:
    """Says what was not finite first in a step, which the device of the scope computes.

    Args:
        model: A built, compiled model. No variable changes.
        recorded: The step.
    """
    found = _search(model, recorded)
    towers, count = recorded.towers, recorded.micro_batches
    return dataclasses.replace(found, towers=towers, micro_batches=count)


def _search(model, recorded):
    values = [tf.convert_to_tensor(value) for value in recorded.variables]
    for variable, value in zip(variables_of(model), values, strict=True):
        if not _is_finite(value):
            during = "update" if recorded.step > 1 else ""
            return NonFiniteOrigin("variable", f"'{variable.path}'", during)
    size = batch.batch_size(recorded.data)
    bounds = batch.split_bounds(size, recorded.split_ratios)
    found = _search_batch(model, recorded.data, values, bounds)
    if found is None:
        return NonFiniteOrigin("unknown")
    if found.tower is None and found.rows:
        (tower,) = (k for k, (i, end) in enumerate(bounds) if i <= found.rows[0] < end)
        found = dataclasses.replace(found, tower=tower)
    if found.tower is not None:
        found = dataclasses.replace(found, tower=recorded.first + found.tower)
    return found


# The batch.


def _search_batch(model, data, values, bounds):
    """What is not finite first in a batch, `None` if all is.

    `bounds` are those of the towers' rows.
    """
    found = _replay(model, data, values, bounds)
    if found is None:
        return None
    found = in_data(data) or found
    return dataclasses.replace(found, examples=batch.batch_size(data))


def in_data(data: tuple[Any, Any, Any]) -> NonFiniteOrigin | None:
    """Finds what is not finite in (x, y, sample_weight); `None` if all is."""
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
        fused.batch_normalization(),
    ):
        tape.watch(params)
        with _watched() as calls:
            outputs = call_model(model, x, training=True)
        if found := _forward(model, calls, size):
            return found
        loss = compute_loss(model, x, y, outputs, sample_weight)
        if not _is_finite(loss):
            tower = _tower_of_loss(model, (x, y, outputs, sample_weight), bounds)
            return NonFiniteOrigin("loss", during="forward", tower=tower)
    return _backward(model, calls, tape, loss, params, outputs, size)


def _tower_of_loss(model, given, bounds):
    """The first tower whose rows alone have a loss that is not finite, if one has."""
    for k, (start, end) in enumerate(bounds):
        if start == end:
            continue
        try:
            mine = compute_loss(model, *batch.take(given, start, end))
        except Exception:
            # It is the user's loss, which may need the whole batch.
            return None
        if not _is_finite(mine):
            return k
    return None


class _Call(NamedTuple):
    """A call of a layer, or of another of Keras's operations, that has ended.

    Attributes:
        operation: What was called.
        inputs: The floating tensors that it was called with: copies of its own, so
            that their gradients are those of this call alone.
        outputs: Those that it returned.
    """

    operation: keras.Operation
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


@contextlib.contextmanager
def _watched() -> Iterator[list[_Call]]:
    """Inside, calls are noted as they end: inner ones before those around them."""
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
    """The first call that makes what is not finite of what is."""
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
    """The call that makes a gradient that is not finite of one that is."""
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
    """All that a loss of outputs may depend on: them, and their logits."""
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
    """Returns what a call may assign: the trained variables, and the state."""
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

"""Compares rows computed as a part of a batch with the same rows of the whole.

That is done where the graph does not tell whether a model treats each example by
itself: once, on the first batch, before a step is taken. A tower's function is pure, so
nothing changes: no variable, no random seed and no metric.

In training, gradients are compared as well: a layer may have one of its own. A part
draws other random numbers than the whole, and BatchNormalization differs by design.
So layers that are trusted (`trust.py`) behave as in inference, and where others draw
random numbers, all do.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.analysis.layer_calls import parts
from towers.analysis.trust import is_trusted
from towers.collectives import batch
from towers.keras_adapter.layers import LAYER_CALL, has_training_argument, layers_of
from towers.keras_adapter.patching import patched
from towers.layers import seeds
from towers.program import words
from towers.tower import passes
from towers.tower.errors import ModelError, explained_data, explained_shapes
from towers.tower.traced import Traced

# Relative to the largest value: what a kernel makes of another number of rows, with
# TensorFloat-32 as well. Examples that meet make more of a difference.
TOLERANCE, TOLERANCE_16_BITS = 1e-3, 5e-2
# Smaller numbers are sums that cancel.
NOTHING = 1e-6


class BatchWanted(Exception):
    """A step is traced that needs a comparison, and a graph has no numbers.

    Attributes:
        training: Whether the step is one of training.
        key: The name of the verdict in `Builder.compared`.
    """

    def __init__(self, model: str, culprit: str, training: bool, key: Any):
        super().__init__(
            f"Model '{model}': {culprit} cannot be read, and a graph of your own has "
            "no numbers to compare; call `fit`, `evaluate`, `predict` or one of the "
            "`..._on_batch` methods instead, or pass strict=False to multi_gpu_model."
        )
        self.training, self.key = training, key


class Comparison(NamedTuple):
    """What a comparison has found.

    Attributes:
        rows: How many rows were compared.
        difference: The largest difference, relative to the largest value.
        tolerance: How large it may be.
        random: Whether the model draws random numbers, so that nothing was compared
            in this mode.
        inference: Whether the layers behaved as in inference, though a step of
            training is traced.
        error: What was said where a part could not be computed.
    """

    rows: int
    difference: float = 0.0
    tolerance: float = TOLERANCE
    random: bool = False
    inference: bool = False
    error: str = ""

    @property
    def differs(self) -> bool:
        """Tells whether rows of a part are others than those of the whole."""
        return bool(self.error) or self.difference > self.tolerance

    def __str__(self) -> str:
        """Says it, as a clause."""
        if self.error:
            return f"a part of the rows cannot be computed ({self.error})"
        if self.differs:
            return (
                "rows of a part differ from those of the whole "
                f"(by {self.difference:.0e} of the largest value)"
            )
        if self.rows < 2:
            return (
                "the first batch has too few rows to compare any, so towers assume "
                "that each example is treated by itself"
            )
        if self.random:
            return (
                "it draws random numbers, so nothing could be compared, and towers "
                "assume that each example is treated by itself"
            )
        mode = " in inference, as it draws random numbers in training," * self.inference
        return (
            f"compared{mode} on {self.rows} rows of the first batch: rows of a part "
            f"equal those of the whole (to {self.difference:.0e} of the largest value)"
        )


def compare(model: keras.Model, training: bool, values: Any, x: Any) -> Comparison:
    """Computes a batch as a whole and in parts.

    Args:
        model: A built Keras model.
        training: Whether layers behave as in training.
        values: The values of the model's variables; see `reader.Values`.
        x: The batch: a nest of tensors with one row an example.

    Returns:
        What was found.

    Raises:
        ModelError: Where the whole batch cannot be computed, or shapes do not fit a
            part of it.
        ResourceExhaustedError: Where the device has no room for the whole batch.
    """
    rows = int(batch.batch_size(x))
    if rows < 2:
        return Comparison(rows)
    policies = {layer.compute_dtype for layer in layers_of(model)}
    sixteen = any(policy and "16" in policy for policy in policies)
    tolerance = TOLERANCE_16_BITS if sixteen else TOLERANCE
    traced = _trace(model, training, values, x)
    # One row by itself, since parts of even size may hide what pairs do.
    edges = sorted({0, 1, (rows + 1) // 2, rows})
    one = tf.ones([], batch.FRACTION)
    with explained_data(model, rows):
        whole = traced(*values, x, one)
    try:
        with explained_shapes(model):
            again = traced(
                values.params, seeds.of_tower(model, values.state, 1), x, one
            )
            if _difference(whole.outputs, again.outputs) > 0:
                if not training:
                    return Comparison(rows, random=True)
                return compare(model, False, values, x)._replace(inference=True)
            found = [
                traced(*values, batch.take(x, start, end), one)
                for start, end in itertools.pairwise(edges)
            ]
            sizes = np.diff(edges).tolist()
            joined = [batch.join(each, sizes) for each in _each(found)]
    except (ModelError, tf.errors.ResourceExhaustedError):
        raise
    except (tf.errors.OpError, ValueError) as error:
        return Comparison(rows, error=words.error_line(error))
    difference = _difference(joined, [whole.outputs, whole.tags])
    if training:
        gradients = [
            _sum(each) for each in zip(*(r.gradients for r in found), strict=True)
        ]
        whole_gradients = [_dense(gradient) for gradient in whole.gradients]
        difference = max(difference, _of_sums(gradients, whole_gradients))
    return Comparison(rows, difference, tolerance)


def _each(results):
    return [[r.outputs for r in results], [r.tags for r in results]]


def _trace(model, training, values, x):
    specs = [
        *batch.specs(values),
        batch.local_spec(x, None),
        tf.TensorSpec([], batch.FRACTION),
    ]
    function = functools.partial(passes.probe, model, training)
    with _settled():
        return Traced(function, specs, xla=False, noinline=False)


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    """Inside, layers that are trusted are called as in inference."""

    def call(original, layer, *args, **kwargs):
        by_position = any(isinstance(argument, bool) for argument in args)
        if has_training_argument(layer) and not by_position:
            inputs = [tensor for _, tensor in parts([args, kwargs])]
            if is_trusted(layer, inputs):
                kwargs["training"] = False
        return original(layer, *args, **kwargs)

    with patched(LAYER_CALL, call):
        yield


def _difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two nests, each tensor's relative to its largest value.

    Infinite where shapes differ, or what is not finite.
    """
    ours = tf.nest.flatten(ours, expand_composites=True)
    theirs = tf.nest.flatten(theirs, expand_composites=True)
    return max(
        (
            _of_arrays(a.numpy(), b.numpy())
            for a, b in zip(ours, theirs, strict=True)
            if a is not None
        ),
        default=0.0,
    )


def _of_arrays(ours, theirs):
    if ours.shape != theirs.shape:
        return np.inf
    if not np.issubdtype(theirs.dtype, np.floating) and theirs.dtype.name != "bfloat16":
        return 0.0 if np.array_equal(ours, theirs) else np.inf
    ours, theirs = ours.astype("float64"), theirs.astype("float64")
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return np.inf
    apart = np.abs(ours[finite] - theirs[finite])
    if not np.all(np.isfinite(apart)):
        return np.inf
    scale = max(np.max(np.abs(theirs[finite]), initial=0.0), NOTHING)
    return float(np.max(apart, initial=0.0) / scale)


def _of_sums(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The largest difference of gradients, relative to the largest value of each.

    A sum over many rows may overflow where sums over fewer do not, and one that is
    next to nothing beside the others is rounding.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None]
    apart, scales = [0.0], [NOTHING]
    for a, b in pairs:
        finite = np.isfinite(a) & np.isfinite(b)
        apart.append(np.max(np.abs(a - b)[finite], initial=0.0))
        scales.append(np.max(np.abs(b)[finite], initial=0.0))
    least = max(NOTHING, 1e-3 * max(scales))
    return float(max(np.array(apart) / np.maximum(scales, least)))


def _sum(gradients):
    gradients = [_dense(gradient) for gradient in gradients]
    return None if gradients[0] is None else sum(gradients)


def _dense(gradient):
    if gradient is None:
        return None
    return tf.convert_to_tensor(gradient).numpy().astype("float64")

"""Runs a user's preprocessing on the towers, before the model sees the examples.

Batches are sent as they are stored, such as in 8 bits, and each tower converts its
local batch. The model and its saved files do not include the preprocessing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.collectives import batch
from towers.devices.names import HOST
from towers.tower.errors import ModelError

Function = Callable[[Any, Any, bool], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class OfSmallTypes:
    """A preprocessing of batches that are sent in smaller types than it takes.

    The model's metrics, too, see the types below.

    Attributes:
        function: The preprocessing.
        dtypes: The types of x, y and sample_weight: a nest like each of them, in which
            `None` stands for the type that a tensor has.
        kept: `KeptExamples` that stay on the devices, if any. A batch may then have
            the numbers of their rows.
    """

    function: Function
    dtypes: tuple[Any, Any, Any]
    kept: Any = None

    def __call__(self, x: Any, y: Any, training: bool) -> tuple[Any, Any]:
        """Preprocesses x and y, in the types that they have or in smaller ones."""
        return self.function(*self.widened((x, y)), training)

    def widened(self, data: Any) -> Any:
        """Returns a batch in the larger types.

        Args:
            data: x, (x, y) or (x, y, sample_weight), as tensors or `tf.TypeSpec`s;
                `None` entries stay. Of row numbers, all of the examples is returned.
        """
        if self.looks_up(data):
            is_spec = isinstance(tf.nest.flatten(data)[0], tf.TypeSpec)
            data = self.kept.specs() if is_spec else self.kept.rows(data)
        if not isinstance(data, tuple):
            return self.widened((data,))[0]
        pairs = zip(data, self.dtypes, strict=False)
        return tuple(
            part if part is None else tf.nest.map_structure(_cast, part, dtypes)
            for part, dtypes in pairs
        )

    def looks_up(self, data: Any) -> bool:
        """Tells whether a batch has the numbers of rows of examples that are kept."""
        return self.kept is not None and self.kept.are_numbers(data)


def _cast(tensor, dtype):
    if dtype is None:
        return tensor
    if isinstance(tensor, tf.TypeSpec):
        return tf.TensorSpec(tensor.shape, dtype)
    return tf.cast(tensor, dtype)


class Preprocess:
    """A user's function `preprocess(x, y, training)`, with checks.

    It takes x and y of some examples, nests of tensors with one row an example (y is
    `None` in prediction), and whether the examples are for training. It returns x and
    y.
    """

    def __init__(self, function: Function):
        self._function = function
        self._small = function if isinstance(function, OfSmallTypes) else None
        self._traced = tf.function(
            lambda *data, training: self(data, training), autograph=False
        )

    def __repr__(self) -> str:
        return repr(self._function)

    def __call__(self, local_batch: Any, training: bool) -> tuple[Any, Any, Any]:
        """Preprocesses one local batch, on the device of the caller.

        Args:
            local_batch: (x, y, sample_weight).
            training: Whether the examples are for training.

        Returns:
            The batch with the new x and y; see `widened` for sample_weight.

        Raises:
            ModelError: The function breaks a rule above. If only the running graph
                knows the number of rows, it raises a `tf.errors.InvalidArgumentError`
                instead.
        """
        x, y, sample_weight = self.widened(local_batch)
        rows = batch.batch_size(x)
        try:
            returned = self._function(x, y, training)
        except (TypeError, ValueError) as error:
            if isinstance(rows, int) or "None" not in str(error):
                raise
            raise ModelError(
                "`preprocess` could not be called with an unknown number of examples, "
                "as towers do; expected no use of a static one, so write "
                f"tf.shape(x)[0] instead of x.shape[0]. It said: {error}"
            ) from error
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise ModelError(
                f"`preprocess` returned {_describe(returned)}; expected the pair "
                "(x, y), so return both, also where one of them stays as it is."
            )
        if not tf.executing_eagerly():
            _refuse_effects(tf.compat.v1.get_default_graph())
        _check_rows(rows, returned)
        return *returned, sample_weight

    def widened(self, data: Any) -> Any:
        """Returns a batch in the types that the function takes; see `OfSmallTypes`."""
        return data if self._small is None else self._small.widened(data)

    def looked_up(self, data: Any, device: str) -> Any | None:
        """Returns the examples of a batch of row numbers, from those on a device.

        Returns `None` for another batch, which has its examples; see `KeptExamples`.
        """
        if self._small is None or not self._small.looks_up(data):
            return None
        return self._small.kept.rows(data, device)

    def spec(self, data: Any, training: bool) -> tuple[Any, Any, Any]:
        """Returns the specs of a batch after preprocessing.

        `data` is (x, y, sample_weight), as tensors, arrays or `tf.TypeSpec`s.
        """
        specs = self.widened(batch.specs(data))
        with tf.device(None):
            traced = self._traced.get_concrete_function(*specs, training=training)
        return traced.structured_outputs


class OnEachTower(keras.layers.Layer):
    """Calls a function with the rows of one tower as if they were the batch.

    The function returns one row for each example. If it mixes examples, it mixes only
    those of a tower, and the step differs from that of one device. The layer therefore
    suits random operations, such as mixup.
    """

    # See `layer_calls.py`.
    takes_rows_for_batch = True

    def __init__(self, function: Callable[..., Any]):
        """Stores the function, which gets the inputs of the layer."""
        super().__init__(autocast=False, trainable=False)
        self._function = function

    def call(self, *inputs: Any) -> Any:
        """Calls the function with the inputs."""
        return self._function(*inputs)


def _describe(returned):
    size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
    return f"a {type(returned).__name__}{size}"


def _refuse_effects(graph):
    for effect in effects.of(graph.get_operations()):
        if effect.type not in effects.RANDOM | effects.REPEATED:
            raise ModelError(
                f"`preprocess` changes something outside of itself, by {effect}, and "
                "each tower would change it again; expected a function that only "
                "computes, so draw random numbers by tf.random instead of Keras's "
                "seed generators."
            )


def _check_rows(before, returned):
    """Checks that the function has returned a row for each example."""
    for tensor in tf.nest.flatten(returned):
        if tensor is None or tf.TensorShape(tensor.shape).rank == 0:
            continue
        after = batch.batch_size(tensor)
        if isinstance(before, int) and isinstance(after, int):
            if before != after:
                raise ModelError(
                    f"`preprocess` returned {after} rows for {before} examples; "
                    "expected as many, so remove examples in the data instead."
                )
            continue
        # Row counts are in host memory, also those of a GPU's tensors.
        with tf.device(HOST):
            tf.debugging.assert_equal(
                after, before, "Expected `preprocess` to return as many rows as it got."
            )

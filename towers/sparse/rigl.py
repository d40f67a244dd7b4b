"""RigL: blocks move to where gradients are large, while a model trains."""

import collections
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.collectives.joined_hosts import this_host
from towers.models.block_sparse.layout import sums_of_blocks
from towers.program.voice import say
from towers.sparse.changing import (
    begin_anew,
    dynamic_layers,
    intervals,
    squares_of_blocks,
)


class RigL(keras.callbacks.Callback):
    """Moves blocks of block-sparse layers while a model trains.

    Every so many steps, the blocks with the smallest weights are dropped, and as many
    grow where the gradient is largest, with weights of zero (RigL, Evci et al. 2020,
    https://arxiv.org/abs/1911.11134; here at the level of blocks). The share that moves
    falls from `drop` to 0 by half a cosine. Each input and each output of a layer keeps
    its number of blocks, so nothing is traced again.

    The gradients are those of whole kernels, of one batch of `data`. They are computed
    on one device, whatever the number of towers, so that all runs move the same blocks.
    They need as much memory as those of a dense model. If several hosts train, all do
    as the first one. Which blocks there are is part of the model's weights, so that it
    is saved with them.

    Examples:
        >>> model = towers.sparsify(model, "erdos_renyi", 0.9, dynamic=True)
        >>> parallel = towers.multi_gpu_model(model, gpus=2)
        >>> parallel.compile("adam", "mse")
        >>> rigl = towers.RigL((x[:256], y[:256]), every=100, until=7500)
        >>> parallel.fit(x, y, epochs=10, callbacks=[rigl])
    """

    def __init__(self, data: Any, every: int, until: int, drop: float = 0.3):
        """Moves nothing yet.

        Args:
            data: A batch (x, y) or (x, y, sample_weight), or a `tf.data.Dataset` of
                batches, of which each move takes the next one. A function `preprocess`
                of towers has been applied to them.
            every: Steps between two moves.
            until: The step after which nothing moves. The authors take three quarters
                of all steps.
            drop: The share of the blocks that moves at first.

        Raises:
            ValueError: A number is none of these.
        """
        super().__init__()
        self._every, self._interval = every, intervals(every)
        if not isinstance(until, int) or until < every:
            raise ValueError(
                f"Received until={until!r} and every={every}; expected until to be a "
                "number of steps of at least every."
            )
        if not 0 < drop <= 1:
            raise ValueError(
                f"Received drop={drop!r}; expected more than 0 and at most 1, such as "
                "0.3."
            )
        self._data, self._until, self._drop = data, until, drop

    def on_train_begin(self, logs=None):
        """Looks for layers whose blocks can move."""
        self._layers = dynamic_layers(self.model)
        self._norms = self._batches = None

    def on_epoch_begin(self, epoch, logs=None):
        """Looks how many steps there have been."""
        self._interval.begin(self.model)
        if self._batches is None:
            moves = self._interval.step // self._every
            self._batches = _batches(self._data, moves)

    def on_train_batch_end(self, batch, logs=None):
        """Moves blocks, if it is time."""
        is_over, step = self._interval.is_over(self.model), self._interval.step
        if not is_over or step > self._until:
            return
        share = self._drop / 2 * (1 + math.cos(math.pi * step / self._until))
        if self._norms is None:
            self._layers = [layer for layer in self._layers if layer.built]
            self._norms = norms_of_blocks(self.model, self._layers)
        batch = next(self._batches, None)
        if batch is None:
            raise ValueError(
                f"Received data={self._data!r}, which has no batch; expected one at "
                "least."
            )
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        norms = [each.numpy() for each in self._norms(x, y, weight)]
        number = sum(
            self._move(layer, each, share)
            for layer, each in zip(self._layers, norms, strict=True)
        )
        blocks = sum(layer.layouts[0].num_blocks for layer in self._layers)
        say(f"RigL moved {number} of {blocks} blocks after step {step}.")

    def _move(self, layer, gradients, share):
        """Moves blocks of a layer; returns how many."""
        before = keras.ops.convert_to_numpy(layer.places)
        after = moved(
            before,
            layer.layouts[0].outputs,
            np.sqrt(squares_of_blocks(layer)),
            gradients,
            round(share * len(before)),
        )
        # On another machine, sums may be rounded otherwise.
        after = np.array(this_host().broadcast_value(after.tolist()), before.dtype)
        layer.places.assign(after)
        begin_anew(self.model.optimizer, layer, after != before)
        return int((after != before).sum())


def _batches(data: Any, begin: int) -> Iterable[Any]:
    """An endless iterator of batches, from one of a number on."""
    if isinstance(data, tf.data.Dataset):
        return iter(data.repeat().skip(begin))
    parts = keras.utils.unpack_x_y_sample_weight(data)
    return itertools.repeat(keras.tree.map_structure(_tensor, parts))


def _tensor(values):
    return None if values is None else tf.convert_to_tensor(values)


# Gradients of whole kernels, of which layers have only some blocks.


def norms_of_blocks(
    model: keras.Model, layers: Sequence[keras.layers.Layer]
) -> Callable[[Any, Any, Any], list[tf.Tensor]]:
    """Makes a function that tells how large gradients of blocks are.

    Args:
        model: A compiled model.
        layers: Layers of it that are block-sparse.

    Returns:
        A function of x, y and sample weights. It returns for each layer the norms of
        the gradients of all blocks, also of those that are not there: float32
        [input blocks, output blocks]. It changes no variable.
    """

    @tf.function(autograph=False, reduce_retracing=True)
    def norms(x, y, sample_weight):
        kernels = [tf.zeros(layer.dense_shape) for layer in layers]
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            # What training would change, such as statistics and seeds, stays as it is.
            keras.StatelessScope(collect_losses=True),
            _added(layers, kernels),
        ):
            tape.watch(kernels)
            outputs = model(x, training=True)
            loss = model.compute_loss(x, y, outputs, sample_weight, training=True)
            # In float16, gradients would be zero without it.
            loss = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, kernels)
        return [
            # Of batches of any size, shapes of gradients are not known.
            _norms(tf.ensure_shape(gradient, layer.dense_shape), layer.layouts[0])
            for gradient, layer in zip(gradients, layers, strict=True)
        ]

    return norms


@contextlib.contextmanager
def _added(layers: Sequence[Any], kernels: Sequence[tf.Tensor]) -> Iterator[None]:
    """Inside, layers add what kernels make of their inputs."""
    try:
        for layer, kernel in zip(layers, kernels, strict=True):
            layer.added_kernel = kernel
        yield
    finally:
        for layer in layers:
            layer.added_kernel = None


def _norms(gradient, layout):
    """The norm of each block of a matrix [..., inputs, outputs]."""
    squares = tf.square(tf.cast(gradient, tf.float32))
    return tf.sqrt(sums_of_blocks(squares, layout.mask.shape, layout.block_shape))


# Which blocks RigL moves: from the smallest weights to the largest gradients.


def moved(
    inputs: np.ndarray,
    outputs: np.ndarray,
    magnitudes: np.ndarray,
    gradients: np.ndarray,
    number: int,
) -> np.ndarray:
    """Tells which input each block reads after blocks have moved.

    RigL (Evci et al. 2020, https://arxiv.org/abs/1911.11134) drops the weights with the
    smallest magnitudes, and grows those with the largest gradients. Here each input and
    each output keeps its number of blocks, so that shapes stay as they are: the blocks
    that are dropped exchange their inputs. Beginning with the largest gradient, a block
    is grown where it can be by such an exchange.

    Args:
        inputs: The input of each block, int [blocks].
        outputs: The output of each block, int [blocks].
        magnitudes: Of the weights of each block, [blocks].
        gradients: Magnitudes of the gradients of all blocks, also of those that are not
            there, [inputs, outputs].
        number: How many blocks may move.

    Returns:
        The input of each block, int [blocks]. No two blocks are at one place.
    """
    inputs = inputs.copy()
    free = np.argsort(magnitudes, kind="stable")[:number].tolist()
    by_input, by_output = collections.defaultdict(set), collections.defaultdict(set)
    for block in free:
        by_input[inputs[block]].add(block)
        by_output[outputs[block]].add(block)
    there = np.zeros(gradients.shape, bool)
    there[inputs, outputs] = True
    wanted = gradients.copy()
    # Where blocks stay, none can grow.
    kept = np.setdiff1d(np.arange(len(inputs)), free)
    wanted[inputs[kept], outputs[kept]] = -np.inf
    for place in np.argsort(-wanted, axis=None, kind="stable"):
        source, target = np.unravel_index(place, wanted.shape)
        givers, takers = by_input[source], by_output[target]
        for block in takers & givers:
            # It was dropped, and grows again.
            takers.discard(block)
            givers.discard(block)
        if there[source, target]:
            continue
        pair = _exchange(inputs, outputs, there, takers, givers)
        if pair is not None:
            taker, giver = pair
            before = inputs[taker]
            there[before, target] = there[source, outputs[giver]] = False
            there[source, target] = there[before, outputs[giver]] = True
            inputs[taker], inputs[giver] = source, before
            # The taker is where it is to be; the giver may move once more.
            by_output[target].discard(taker)
            by_input[before].discard(taker)
            by_input[source].discard(giver)
            by_input[before].add(giver)
    return inputs


def _exchange(inputs, outputs, there, takers, givers):
    """Returns a taker and a giver that may exchange their inputs; None without any."""
    for taker in sorted(takers):
        for giver in sorted(givers):
            if not there[inputs[taker], outputs[giver]]:
                return taker, giver
    return None

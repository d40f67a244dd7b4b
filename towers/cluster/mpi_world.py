"""The `World` of hosts that MPI connects, by functions of NumPy arrays."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from towers.cluster import scattered
from towers.cluster.hosts import Cluster
from towers.cluster.scattered import LARGE, aligned
from towers.devices.names import HOST
from towers.hosts import group

T = TypeVar("T")


class MpiWorld(Cluster):
    """Hosts that MPI has started; `communicator` is an `MpiCommunicator`."""

    def reduce_scatter(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[tf.Tensor]:
        """See `World`."""
        return scattered.reduce_scatter(self, parts, purpose)

    def gather_parts(
        self,
        mine: Sequence[tf.Tensor],
        like: Sequence[Sequence[tf.TensorSpec]],
        purpose: str,
    ) -> list[list[tf.Tensor]]:
        """See `World`."""
        return scattered.gather_parts(self, mine, like, purpose)

    def all_to_all(
        self,
        parts: Sequence[Sequence[tf.Tensor]],
        purpose: str,
        sizes: Any = None,
    ) -> list[list[tf.Tensor]]:
        """See `World`."""
        own = parts[self.index]
        shapes, count = [tuple(tensor.shape[1:]) for tensor in own], len(own)
        starts = [k * count for k in range(self.count)]

        def swap(*arrays):
            flat = [array.reshape(-1) for array in arrays]
            of_hosts = [flat[start : start + count] for start in starts]
            known = None if sizes is None else arrays[-1] * [*map(math.prod, shapes)]
            received = self.communicator.all_to_all(of_hosts, purpose, known)
            del received[self.index]
            return [
                array.reshape(-1, *shape)
                for of_host in received
                for array, shape in zip(of_host, shapes, strict=True)
            ]

        with tf.device(HOST), tf.name_scope("hosts"):
            inputs = [*itertools.chain(*parts)]
            inputs += [] if sizes is None else [tf.cast(sizes, tf.int64)]
            types = [tensor.dtype for tensor in own] * (self.count - 1)
            others = self.meet(swap, inputs, types)
        for k, tensor in enumerate(others):
            tensor.set_shape([None, *shapes[k % count]])
        received = [others[start : start + count] for start in starts[:-1]]
        received.insert(self.index, [*own])
        return received

    def broadcast(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """See `World`."""
        varying = not all(tensor.shape.is_fully_defined() for tensor in tensors)

        def send(*arrays):
            if varying:
                # Random numbers may decide on a shape, too.
                sizes = np.array([n for array in arrays for n in array.shape], np.int64)
                self.communicator.broadcast(_as_bytes(sizes), f"shapes of {purpose}")
                ends = np.cumsum([array.ndim for array in arrays])[:-1]
                shapes = np.split(sizes, ends)
            else:
                shapes = [array.shape for array in arrays]
            if self.index > 0:
                arrays = [
                    aligned(math.prod(shape), like.dtype).reshape(shape)
                    for shape, like in zip(shapes, arrays, strict=True)
                ]
            for array in arrays:
                self.communicator.broadcast(_as_bytes(array), purpose)
            return arrays

        with tf.device(HOST), tf.name_scope("hosts"):
            sent = self.meet(send, tensors, [tensor.dtype for tensor in tensors])
        for tensor, like in zip(sent, tensors, strict=True):
            tensor.set_shape(like.shape)
        return sent

    def exchange(self, value: T) -> list[T]:
        """See `World`."""
        data = json.dumps(value).encode()
        with group.explained():
            values = self.communicator.all_gather(data, "what each host tells")
        return [json.loads(bytes(of_host)) for of_host in values]

    def _sum_bucket(self, tensors, purpose, wire):
        """Adds flat tensors of one type."""
        # There is nothing to be gained with doubles.
        wire = wire if tensors[0].dtype == tf.float32 else None
        sizes = [each.shape[0] for each in tensors]
        # To join large ones would copy them twice; many small ones take time each.
        large = [k for k, size in enumerate(sizes) if size >= LARGE]
        small = [k for k, size in enumerate(sizes) if size < LARGE]
        joined = [tf.concat([tensors[k] for k in small], 0)] if small else []
        buffers = [tensors[k] for k in large] + joined

        def add(*arrays):
            return self.communicator.grouped_all_reduce(arrays, purpose, wire)

        totals = self.meet(add, buffers, [each.dtype for each in buffers])
        for total, like in zip(totals, buffers, strict=True):
            total.set_shape(like.shape)
        if small:
            totals[-1:] = tf.split(totals[-1], [sizes[k] for k in small])
        placed = dict(zip(large + small, totals, strict=True))
        return [placed[k] for k in range(len(tensors))]

    def _rows(self, rows, purpose):
        """Puts the rows of all hosts together, the first host's first."""

        def gather(array):
            parts = self.communicator.all_gather(_as_bytes(array), purpose)
            # They lie side by side in one array.
            whole = parts[0].obj.view(array.dtype)
            return [whole.reshape(-1, *array.shape[1:])]

        (whole,) = self.meet(gather, [rows], [rows.dtype])
        whole.set_shape([None, *rows.shape[1:]])
        return whole

    def meet(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        inputs: Sequence[tf.Tensor],
        types: Sequence[tf.DType],
    ) -> list[tf.Tensor]:
        """Calls a function of arrays at this place in the order of collectives.

        Args:
            function: Returns arrays.
            inputs: The arguments of the function.
            types: The types of the arrays that it returns.
        """

        def call(order, *arrays):
            try:
                return [order, *function(*arrays)]
            except Exception as error:
                # TensorFlow would log the whole traceback, twice.
                raise error.with_traceback(None) from None

        # It has a side effect, and waits for the one before.
        inputs = [self._order.read_value(), *inputs]
        order, *results = tf.nest.flatten(
            tf.numpy_function(call, inputs, [tf.float32, *types])
        )
        self._order.assign(tf.ensure_shape(order, []))
        return results


def _as_bytes(array):
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

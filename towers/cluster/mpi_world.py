"""The `World` of hosts that MPI connects, by functions of NumPy arrays."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from towers.cluster.hosts import Cluster
from towers.hosts import group

T = TypeVar("T")
# Numbers, or bytes, that MPI sends at once: it counts them in a C int.
_MOST = 2**30
# TensorFlow takes an array as it is if it begins at such an address.
_ALIGNED_BYTES = 64


class MpiWorld(Cluster):
    """Hosts that MPI has started; `communicator` is an `MpiCommunicator`."""

    def exchange(self, value: T) -> list[T]:
        """See `World`."""
        with group.explained(), self.communicator.collective("what each host tells", 0):
            texts = self.communicator.comm.allgather(json.dumps(value))
        return [json.loads(text) for text in texts]

    def _sums(self, tensors, purpose):
        """See `Cluster`. To join the tensors would copy them twice."""

        def add(comm, *arrays):
            totals = [_aligned(array.shape, array.dtype) for array in arrays]
            for array, total in zip(arrays, totals, strict=True):
                for start in range(0, array.size, _MOST):
                    block = slice(start, start + _MOST)
                    comm.Allreduce(array[block], total[block])
            return totals

        totals = self._call(add, tensors, purpose)
        for total, like in zip(totals, tensors, strict=True):
            total.set_shape(like.shape)
        return totals

    def _gather_equal(self, rows, purpose):
        """See `Cluster`."""

        def gather(comm, array):
            whole = _aligned((self.count * len(array), *array.shape[1:]), array.dtype)
            _send(comm.Allgather, _bytes(array), _bytes(whole).reshape(self.count, -1))
            return [whole]

        (whole,) = self._call(gather, [rows], purpose)
        known = rows.shape[0] and self.count * rows.shape[0]
        whole.set_shape([known, *rows.shape[1:]])
        return whole

    def _swap(self, parts, purpose):
        """See `Cluster`."""

        def swap(comm, array):
            received = _aligned(array.shape, array.dtype)
            of_hosts = [_bytes(x).reshape(self.count, -1) for x in (array, received)]
            _send(comm.Alltoall, *of_hosts)
            return [received]

        (received,) = self._call(swap, [parts], purpose)
        received.set_shape(parts.shape)
        return received

    def _call(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        inputs: Sequence[tf.Tensor],
        purpose: str,
    ) -> list[tf.Tensor]:
        """Calls a function at this place in the order of collectives.

        Args:
            function: Takes mpi4py's communicator and arrays; returns as many arrays, of
                the same types.
            inputs: The arrays, of the same sizes on all hosts.
            purpose: Name of the collective.
        """

        def call(order, *arrays):
            size = sum(array.nbytes for array in arrays)
            try:
                with self.communicator.collective(purpose, size):
                    return [order, *function(self.communicator.comm, *arrays)]
            except Exception as error:
                # TensorFlow would log the whole traceback, twice.
                raise error.with_traceback(None) from None

        types = [tf.float32, *(tensor.dtype for tensor in inputs)]
        # It has a side effect, and waits for the one before.
        order, *results = tf.nest.flatten(
            tf.numpy_function(call, [self._order.read_value(), *inputs], types)
        )
        self._order.assign(tf.ensure_shape(order, []))
        return results


def _bytes(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _send(collective, sent, received):
    """Calls a collective of MPI's, with at most so many bytes for each host."""
    if received.shape[-1] <= _MOST:
        collective(sent, received)
        return
    for start in range(0, received.shape[-1], _MOST):
        block = np.s_[..., start : start + _MOST]
        into = np.empty_like(received[block])
        collective(np.ascontiguousarray(sent[block]), into)
        received[block] = into


def _aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns a new array that TensorFlow takes without a copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + _ALIGNED_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNED_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)

"""What each of several hosts has a part of: sums in parts, and parts put together.

A reduce-scatter and an all-gather between hosts, as ZeRO has them in the place of one
all-reduce (Rajbhandari et al. 2020). Tensors travel as flat buffers: large ones as they
are, since to join them would copy them twice, and small ones of a type joined.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.collectives.packing import widened
from towers.devices.names import HOST

# TensorFlow takes an array as it is if it begins at such an address.
_ALIGNMENT = 64
# Tensors of as many numbers travel as they are; smaller ones are joined.
LARGE = 2**14


def reduce_scatter(
    hosts: Any, parts: Sequence[Sequence[tf.Tensor]], purpose: str
) -> list[tf.Tensor]:
    """Adds tensors over all hosts, each for one host alone.

    All but `hosts`, a `Cluster`, is as of `World.reduce_scatter`.
    """
    with tf.device(HOST), tf.name_scope("hosts"):
        wide = [[*map(widened, of_host)] for of_host in parts]
        sums: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(each.dtype for each in itertools.chain(*wide)):
            every = [_Buffers(of_host, [dtype]) for of_host in wide]
            inputs = [
                each.joined(of_host) for each, of_host in zip(every, wide, strict=True)
            ]
            counts = [*map(len, inputs)]
            wire = hosts.wire if dtype == tf.float32 else None

            def add(*arrays, counts=counts, wire=wire):
                arrays = iter(arrays)
                of_hosts = [[*itertools.islice(arrays, n)] for n in counts]
                return hosts.communicator.reduce_scatter(of_hosts, purpose, wire)

            mine = every[hosts.index]
            inputs = [*itertools.chain(*inputs)]
            sums |= mine.taken_apart(hosts.meet(add, inputs, mine.types))
        return [
            tf.cast(tf.reshape(sums[i], like.shape), like.dtype)
            for i, like in enumerate(parts[hosts.index])
        ]


def gather_parts(
    hosts: Any,
    mine: Sequence[tf.Tensor],
    like: Sequence[Sequence[tf.TensorSpec]],
    purpose: str,
) -> list[list[tf.Tensor]]:
    """Gives all hosts what each of them has of tensors, to the bit.

    All but `hosts`, a `Cluster`, is as of `World.gather_parts`.
    """
    types = dict.fromkeys(each.dtype for each in itertools.chain(*like))
    every = [_Buffers(of_host, types) for of_host in like]

    def gather(*arrays):
        of_hosts = [each.empty() for each in every]
        of_hosts[hosts.index] = arrays
        as_bytes = [[_bytes(array) for array in of_host] for of_host in of_hosts]
        if any(as_bytes):
            hosts.communicator.gather_parts(as_bytes, purpose)
        others = of_hosts[: hosts.index] + of_hosts[hosts.index + 1 :]
        return [*itertools.chain(*others)]

    with tf.device(HOST), tf.name_scope("hosts"):
        own = every[hosts.index].joined([tf.reshape(each, [-1]) for each in mine])
        others = every[: hosts.index] + every[hosts.index + 1 :]
        of_others = [dtype for each in others for dtype in each.types]
        received = iter(hosts.meet(gather, own, of_others))
        found = []
        for k, (each, of_host) in enumerate(zip(every, like, strict=True)):
            buffers = own if k == hosts.index else itertools.islice(received, len(each))
            flat = each.taken_apart([*buffers])
            shapes = enumerate(spec.shape for spec in of_host)
            found.append([tf.reshape(flat[i], shape) for i, shape in shapes])
        return found


class _Buffers:
    """How tensors of one host travel, as flat buffers.

    Attributes:
        types: The type of each buffer.
    """

    def __init__(self, like: Sequence[Any], types: Any):
        """Takes tensors or their specs; those of other types are left out."""
        self._sizes = [each.shape.num_elements() for each in like]
        self._places, self.types = [], []
        for dtype in types:
            mine = [i for i, each in enumerate(like) if each.dtype == dtype]
            small = [i for i in mine if self._sizes[i] < LARGE]
            groups = [[i] for i in mine if self._sizes[i] >= LARGE]
            groups += [small] if small else []
            self._places += groups
            self.types += [dtype] * len(groups)

    def __len__(self):
        return len(self._places)

    def joined(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Makes buffers of flat tensors."""
        return [
            tensors[places[0]]
            if len(places) == 1
            else tf.concat([tensors[i] for i in places], 0)
            for places in self._places
        ]

    def taken_apart(self, buffers: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """Makes flat tensors of buffers, by their places."""
        found = {}
        for places, buffer in zip(self._places, buffers, strict=True):
            sizes = [self._sizes[i] for i in places]
            buffer = tf.ensure_shape(buffer, [sum(sizes)])
            parts = [buffer] if len(places) == 1 else tf.split(buffer, sizes)
            found.update(zip(places, parts, strict=True))
        return found

    def empty(self) -> list[np.ndarray]:
        """Makes arrays to be filled."""
        return [
            aligned(sum(self._sizes[i] for i in places), np.dtype(dtype.as_numpy_dtype))
            for places, dtype in zip(self._places, self.types, strict=True)
        ]


def _bytes(array):
    return np.ascontiguousarray(array).view(np.uint8)


def aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """Returns a new flat array that TensorFlow takes without a copy."""
    count = size * np.dtype(dtype).itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype)

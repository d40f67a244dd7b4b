"""The hosts that train together, as all that computes sees them: the protocol `World`.

A host is a process with towers of its own. All hosts build the same graphs, so they
meet in the same sums, one after another. `Alone` is one host, which makes no operation.
Those that are connected are `towers.cluster.hosts.Cluster`, a feature.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from towers.devices.names import HOST

T = TypeVar("T")

# The types in which gradients may travel.
COMPRESSIONS = {
    "none": None,
    "fp16": np.dtype(tf.float16.as_numpy_dtype),
    "bf16": np.dtype(tf.bfloat16.as_numpy_dtype),
}


class World(Protocol):
    """All hosts. Each of them calls the same methods in the same order.

    A `purpose` says in a word what tensors are, and is the same on all hosts.

    Attributes:
        count: Number of hosts.
        index: Which of them this one is.
        names: What to call each in sentences.
        communicator: Their connection; hosts that meet again have another one.
    """

    count: int
    index: int
    names: Sequence[str]
    communicator: Any

    def compressing(self, compression: str) -> "World":
        """Returns the same hosts, that compress what `all_reduce` may compress.

        Args:
            compression: A key of `COMPRESSIONS`.
        """

    def overlaps(self, size: int) -> bool:
        """Tells whether sums of so many bytes begin before all bytes are computed."""

    def all_reduce(
        self, tensors: T, purpose: str, compressible: Sequence[tf.Tensor] = ()
    ) -> T:
        """Adds a nest of tensors over all hosts.

        Args:
            tensors: Tensors, `tf.IndexedSlices` or `None`. All but the rows of slices
                have the same shapes on all hosts.
            purpose: What they are.
            compressible: Which of the tensors may travel rounded, if of floats of at
                most 32 bits.
        """

    def reduce_scatter(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[tf.Tensor]:
        """Adds tensors over all hosts, each for one host alone.

        They may travel rounded, as the hosts compress. Numbers of 16 bits are added in
        float32.

        Args:
            parts: For each host, dense tensors of floats, of which it is to have the
                sums. All are of known shapes, the same on all hosts.
            purpose: What they are.

        Returns:
            The sums of this host.
        """

    def all_gather(self, tensors: T, total: Any, purpose: str) -> T:
        """Puts together the rows that the hosts have of a nest of tensors.

        Args:
            tensors: Dense tensors of numbers; `None` and scalars stay.
            total: Number of rows of all hosts.
            purpose: What they are.

        Raises:
            ValueError: A tensor is of another kind.
        """

    def gather_parts(
        self,
        mine: Sequence[tf.Tensor],
        like: Sequence[Sequence[tf.TensorSpec]],
        purpose: str,
    ) -> list[list[tf.Tensor]]:
        """Gives all hosts what each of them has of tensors, to the bit.

        Args:
            mine: What this one has.
            like: For each host, the known shapes and the types of what it has.
            purpose: What they are.

        Returns:
            For each host, what it has.
        """

    def stack(self, tensor: tf.Tensor, purpose: str) -> tf.Tensor:
        """Stacks what each host has of a tensor: the first axis is the hosts'."""

    def broadcast(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """Returns what the first host has of tensors, to the bit.

        Args:
            tensors: Dense tensors of known shapes.
            purpose: What they are.
        """

    def meet(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        inputs: Sequence[tf.Tensor],
        types: Sequence[tf.DType],
    ) -> list[tf.Tensor]:
        """Calls a function of arrays at this place in the order of collectives.

        It may call `all_to_all`.

        Args:
            function: Returns arrays.
            inputs: What it is called with.
            types: Those of what it returns.
        """

    def all_to_all(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        purpose: str,
        sizes: Sequence[Sequence[int]] | None = None,
    ) -> Sequence[Sequence[np.ndarray]]:
        """Sends each host arrays of its own, of any sizes, within `meet`.

        Args:
            arrays: For each host, flat arrays: as many for each, on all hosts, and of
                the same types.
            purpose: What they are.
            sizes: Of what each host sends this one, if all hosts know that. Else they
                tell one another first.

        Returns:
            For each host, what it has sent this one.
        """

    def send_files(self, folder: str | None, to: str) -> str | None:
        """Copies a folder of the first host's into a folder of each other host's.

        Args:
            folder: The first host's; `None` for nothing. Others need not say it.
            to: Where each other host puts it, under the same name.

        Returns:
            Where it lies on this host.
        """

    def broadcast_value(self, value: T) -> T:
        """Returns what the first host has: anything that JSON can hold."""

    def exchange(self, value: T) -> list[T]:
        """Returns what each host has: anything that JSON can hold."""


class Alone:
    """A host that trains by itself; see `World`."""

    count, index, names, communicator = 1, 0, ("this host",), None

    def compressing(self, compression: str) -> World:
        """See `World`."""
        return self

    def overlaps(self, size: int) -> bool:
        """See `World`."""
        return False

    def all_reduce(
        self, tensors: T, purpose: str, compressible: Sequence[tf.Tensor] = ()
    ) -> T:
        """See `World`."""
        return tensors

    def reduce_scatter(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[tf.Tensor]:
        """See `World`."""
        return [*parts[0]]

    def all_gather(self, tensors: T, total: Any, purpose: str) -> T:
        """See `World`."""
        return tensors

    def gather_parts(
        self,
        mine: Sequence[tf.Tensor],
        like: Sequence[Sequence[tf.TensorSpec]],
        purpose: str,
    ) -> list[list[tf.Tensor]]:
        """See `World`."""
        return [[*mine]]

    def stack(self, tensor: tf.Tensor, purpose: str) -> tf.Tensor:
        """See `World`."""
        return tensor[tf.newaxis]

    def broadcast(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """See `World`."""
        return list(tensors)

    def meet(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        inputs: Sequence[tf.Tensor],
        types: Sequence[tf.DType],
    ) -> list[tf.Tensor]:
        """See `World`."""
        with tf.device(HOST):
            return list(tf.numpy_function(function, inputs, list(types)))

    def all_to_all(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        purpose: str,
        sizes: Sequence[Sequence[int]] | None = None,
    ) -> Sequence[Sequence[np.ndarray]]:
        """See `World`."""
        return arrays

    def send_files(self, folder: str | None, to: str) -> str | None:
        """See `World`."""
        return folder

    def broadcast_value(self, value: T) -> T:
        """See `World`."""
        return value

    def exchange(self, value: T) -> list[T]:
        """See `World`."""
        return [value]


ALONE = Alone()

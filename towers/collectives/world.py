"""The protocol `World`: the group of hosts that train together, and its collectives.

A host is a process with its own towers. All hosts build the same graphs, so they run
the same collectives in the same order. `Alone` is a single host, whose collectives add
no operations. Connected hosts are `towers.cluster.hosts.Cluster`, a feature.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

T = TypeVar("T")

# The types to which gradients may be compressed on the network.
COMPRESSIONS = {
    "none": None,
    "fp16": np.dtype(tf.float16.as_numpy_dtype),
    "bf16": np.dtype(tf.bfloat16.as_numpy_dtype),
}


class World(Protocol):
    """A group of hosts. Each of them calls the same methods in the same order.

    A `purpose` names the tensors in a word, and is the same on all hosts.

    Attributes:
        count: Number of hosts.
        index: Index of this host.
        names: Names of the hosts, for messages.
        communicator: The connection of the hosts; a new group has a new one.
        connects_devices: Whether hosts can add tensors on the devices that have these;
            see `reduce.all_reduce`.
    """

    count: int
    index: int
    names: Sequence[str]
    communicator: Any
    connects_devices: bool

    def compressing(self, compression: str) -> "World":
        """Returns the same hosts, with compression of tensors that allow it.

        Args:
            compression: A key of `COMPRESSIONS`.
        """

    def overlaps(self, size: int) -> bool:
        """Returns whether sums of `size` bytes begin before all are computed."""

    def all_reduce(
        self, tensors: T, purpose: str, compressible: Sequence[tf.Tensor] = ()
    ) -> T:
        """Adds a nest of tensors over all hosts.

        Args:
            tensors: Tensors, `tf.IndexedSlices` or `None`. Shapes are the same on all
                hosts, except for the number of rows of slices.
            purpose: Name of the tensors.
            compressible: Those of the tensors that may be rounded, if of floating types
                of at most 32 bits.
        """

    def reduce_scatter(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[tf.Tensor]:
        """Adds tensors over all hosts, and returns to each host its own sums.

        Tensors may be rounded, if the hosts compress. Types of 16 bits are added in
        float32.

        Args:
            parts: For each host, the dense floating tensors whose sums it receives. All
                shapes are static, and the same on all hosts.
            purpose: Name of the tensors.

        Returns:
            The sums of this host.
        """

    def all_gather(self, tensors: T, total: Any, purpose: str) -> T:
        """Concatenates the rows of all hosts, for a nest of tensors.

        Args:
            tensors: Dense tensors of numbers; `None` and scalars stay.
            total: Number of rows of all hosts.
            purpose: Name of the tensors.

        Raises:
            ValueError: A tensor is of another kind.
        """

    def gather_parts(
        self,
        mine: Sequence[tf.Tensor],
        like: Sequence[Sequence[tf.TensorSpec]],
        purpose: str,
    ) -> list[list[tf.Tensor]]:
        """Gathers the tensors of all hosts on each host, bit for bit.

        Args:
            mine: The tensors of this host.
            like: For each host, the specs of its tensors; shapes are static.
            purpose: Name of the tensors.

        Returns:
            For each host, its tensors.
        """

    def stack(self, tensor: tf.Tensor, purpose: str) -> tf.Tensor:
        """Stacks the tensors of all hosts along a new first axis."""

    def broadcast(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """Returns the first host's tensors, bit for bit.

        Args:
            tensors: Dense tensors, of the same ranks on all hosts. In a graph, sizes
                that are not known when it is traced may differ between hosts.
            purpose: Name of the tensors.
        """

    def all_to_all(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[list[tf.Tensor]]:
        """Sends different rows, of any number, to each host.

        Args:
            parts: For each host, the tensors that this one sends it: on all hosts as
                many, and of the same types. Shapes are the same and static, except for
                the number of rows.
            purpose: Name of the tensors.

        Returns:
            For each host, the tensors that it has sent this host; its own unchanged.
        """

    def send_files(self, folder: str | None, to: str) -> str | None:
        """Copies a folder of the first host to all other hosts.

        Args:
            folder: The folder on the first host; `None` for nothing. Other hosts may
                pass anything.
            to: The folder in which other hosts put the copy, under the same name.

        Returns:
            The path on this host.
        """

    def broadcast_value(self, value: T) -> T:
        """Returns the first host's value, which JSON can represent."""

    def exchange(self, value: T) -> list[T]:
        """Returns the values of all hosts, which JSON can represent."""


class Alone:
    """A host that trains by itself; see `World`."""

    count, index, names, communicator = 1, 0, ("this host",), None
    connects_devices = False

    def compressing(self, compression: str) -> World:
        """Returns this host; see `World`."""
        return self

    def overlaps(self, size: int) -> bool:
        """Returns False: there is nothing to send; see `World`."""
        return False

    def all_reduce(
        self, tensors: T, purpose: str, compressible: Sequence[tf.Tensor] = ()
    ) -> T:
        """Returns the tensors unchanged; see `World`."""
        return tensors

    def reduce_scatter(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[tf.Tensor]:
        """Returns this host's tensors; see `World`."""
        return [*parts[0]]

    def all_gather(self, tensors: T, total: Any, purpose: str) -> T:
        """Returns the tensors unchanged; see `World`."""
        return tensors

    def gather_parts(
        self,
        mine: Sequence[tf.Tensor],
        like: Sequence[Sequence[tf.TensorSpec]],
        purpose: str,
    ) -> list[list[tf.Tensor]]:
        """Returns the tensors of this host alone; see `World`."""
        return [[*mine]]

    def stack(self, tensor: tf.Tensor, purpose: str) -> tf.Tensor:
        """Adds an axis of size 1; see `World`."""
        return tensor[tf.newaxis]

    def broadcast(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """Returns the tensors unchanged; see `World`."""
        return list(tensors)

    def all_to_all(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[list[tf.Tensor]]:
        """Returns the tensors unchanged; see `World`."""
        return [[*parts[0]]]

    def send_files(self, folder: str | None, to: str) -> str | None:
        """Returns the folder; see `World`."""
        return folder

    def broadcast_value(self, value: T) -> T:
        """Returns the value; see `World`."""
        return value

    def exchange(self, value: T) -> list[T]:
        """Returns the value in a list; see `World`."""
        return [value]


ALONE = Alone()

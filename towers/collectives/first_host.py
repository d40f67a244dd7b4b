"""Assigns the values of the first host to the variables of all hosts."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.collectives.world import World
from towers.devices.names import HOST
from towers.layers.variables import digest


def follow_first_host(hosts: World, variables: Sequence[Any]) -> None:
    """Assigns the first host's values to variables; all hosts call it together.

    Values are sent only if digests show that they differ.

    Args:
        hosts: All hosts.
        variables: Variables of Keras or TensorFlow, in the same order on each host.
    """
    if not variables:
        return
    with tf.device(HOST), tf.name_scope("first_host"):
        values = [*map(tf.convert_to_tensor, variables)]
        digests = hosts.stack(digest(values), "digests")

        def follow():
            received = hosts.broadcast(values, "variables")
            for variable, value in zip(variables, received, strict=True):
                variable.assign(value)
            return tf.constant(True)

        # All hosts see all digests, and so take the same branch.
        equal = tf.reduce_all(digests == digests[0])
        tf.cond(equal, lambda: tf.constant(True), follow)

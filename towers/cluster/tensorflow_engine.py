"""The engine for hosts that TensorFlow's collectives connect: the default.

TensorFlow carries the bytes, by gRPC, and its coordination service notices hosts that
are silent. Its server belongs to one cluster for the life of a process, and listens on
all interfaces without authentication, as under `MultiWorkerMirroredStrategy`.
"""

import functools
import socket

from towers.cluster import addresses, connecting
from towers.cluster.tensorflow_watch import SILENT_S, HostWatch
from towers.cluster.tensorflow_world import TensorFlowWorld
from towers.hosts import group
from towers.hosts.group import Membership
from towers.keras_adapter import cluster
from towers.program import forks, voice


def join(membership: Membership, seconds: float) -> group.Joined:
    """Prepares TensorFlow to connect this host to others when it initialises.

    Args:
        membership: The hosts, which have met.
        seconds: Maximum time for which this host waits for all others to connect.

    Returns:
        The hosts. They are connected by the first call of `connect`.

    Raises:
        RuntimeError: TensorFlow is initialised already.
        OSError: Another process listens at this host's port.
    """
    if cluster.is_initialized():
        raise RuntimeError(
            "TensorFlow is initialised already, so this process can join no other "
            "hosts; call towers.configure(hosts='auto') before anything else uses "
            "TensorFlow."
        )
    rank = membership.rank
    _, port = addresses.split(membership.addresses[rank])
    # Until TensorFlow listens there, no other process may take the port. Others find by
    # it that this host has not ended.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        held = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        forks.close_in_children(held)
    except OSError as error:
        address = membership.addresses[rank]
        raise OSError(
            error.errno,
            f"{membership.names[rank]} cannot listen at {address} ({error.strerror}); "
            "expected a free port: end the process that has it, or give this host "
            "another one.",
        ) from error
    server = cluster.configure(membership.addresses, rank, SILENT_S)
    watch = HostWatch(rank, membership.names)
    watch.describe = functools.partial(group.describe, watch)
    connect = functools.partial(_connect, membership, seconds, watch, held, server)
    return group.Joined(membership, watch, watch, connect)


def _connect(membership, seconds, watch, held, server):
    """Initialises TensorFlow, which connects all hosts; returns their `World`."""
    pairs = zip(membership.names, membership.addresses, strict=True)
    hosts = [[name, *addresses.split(address)] for name, address in pairs]
    del hosts[membership.rank]
    with connecting.bounded(seconds, hosts):
        held.close()
        cluster.start(server)
    if membership.rank == 0:
        ports = ", ".join(
            sorted({address.rpartition(":")[2] for address in membership.addresses})
        )
        voice.say(
            f"TensorFlow's servers listen on all interfaces, at {ports}, without "
            "authentication; docs/scale/hosts.md says how to shut others out."
        )
    watch.start()
    return TensorFlowWorld(membership.names, membership.rank, watch)

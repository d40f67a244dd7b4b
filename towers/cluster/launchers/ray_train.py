"""What Ray Train says to each of its workers."""

import secrets
import sys

from towers.cluster import addresses

_LOCAL = "127.0.0.1"


def is_worker() -> bool:
    """Tells whether this process runs a function for Ray Train."""
    # Nobody runs one who has not imported it.
    if (train := sys.modules.get("ray.train")) is None:
        return False
    try:
        train.get_context()
    except RuntimeError:
        return False  # this is the program that asks Ray, or a task of another kind
    return True


def read() -> tuple[int, int, str, str]:
    """Returns this worker's rank, how many there are, the coordinator, and a token.

    The first worker chooses a port and the token, and Ray tells the others. Thus every
    worker has to call this.
    """
    import ray
    from ray.train import collective, get_context

    context = get_context()
    rank, count = context.get_world_rank(), context.get_world_size()
    chosen = None
    if rank == 0:
        on_one_node = context.get_local_world_size() == count
        address = _LOCAL if on_one_node else ray.util.get_node_ip_address()
        with addresses.held_port(address) as free:
            port = free.getsockname()[1]
        chosen = addresses.joined(address, port), secrets.token_hex(16)
    return rank, count, *collective.broadcast_from_rank_zero(chosen)

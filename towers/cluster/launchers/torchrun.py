"""Reads the variables by which PyTorch's launchers number processes."""

from collections.abc import Mapping
from typing import NamedTuple

from towers.cluster import addresses


class Names(NamedTuple):
    """The names of the variables that hold a process's place among others."""

    rank: str
    count: str
    host: str
    port: str


# torchrun sets these for each of its processes; Kubeflow's PyTorchJob and Volcano's
# plugin `pytorch` for each pod.
_PROCESS = Names("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Kubeflow's Trainer sets these for each pod. They are flags of torchrun, which starts
# processes in the pod and leaves them these variables, too.
_POD = Names("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_RUN, _AGENT_STORE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_LAST_PORT = 2**16 - 1


def names(environ: Mapping[str, str]) -> Names | None:
    """Returns the variables that hold this process's place; `None` without them.

    Args:
        environ: The environment.
    """
    # A PyTorchJob of several processes in a pod has RANK of pods and WORLD_SIZE of
    # processes, so that those of pods count first where torchrun is not between.
    kinds = [_PROCESS] if environ.get(_RUN) else [_POD, _PROCESS]
    return next((kind for kind in kinds if all(map(environ.get, kind))), None)


def unfinished(environ: Mapping[str, str]) -> str | None:
    """Says which variables are missing to a process that is one of several.

    Bare RANK or MASTER_ADDR are common, and mean nothing. A WORLD_SIZE above one may:
    several processes that each train alone write over each other's files.

    Args:
        environ: The environment.
    """
    count = environ.get(_PROCESS.count, "")
    if not (count.isascii() and count.isdecimal() and int(count) > 1):
        return None
    missing = [name for name in _PROCESS if not environ.get(name)]
    return f"{_PROCESS.count} is {count}, but {', '.join(missing)} is missing"


def coordinator(environ: Mapping[str, str], kind: Names) -> str:
    """Returns the address at which the first process waits for the others.

    Args:
        environ: The environment.
        kind: What `names` has returned.

    Raises:
        ValueError: It is no address.
    """
    host, port = environ[kind.host], environ[kind.port]
    address = addresses.joined(host, port)
    if not addresses.is_address(address):
        raise ValueError(
            f"Received {kind.host}={host} and {kind.port}={port}; expected the name or "
            "address of the first host, such as node0, and a port, such as 29500."
        )
    number = int(port)
    if kind is _PROCESS and environ.get(_AGENT_STORE) == "True":
        # torchrun itself listens at this port, for as long as its processes run.
        number += 1 if number < _LAST_PORT else -1
    if environ.get(_RUN) and environ.get("LOCAL_WORLD_SIZE") == environ[kind.count]:
        # On one machine, whose own name may mean an address that it does not have.
        host = "127.0.0.1"
    return addresses.joined(host, number)

"""Ray's cluster: to connect to it, and what hosts take of it."""

import os
import secrets
from collections.abc import Mapping
from typing import Any

import ray

from towers.launch.arguments import LaunchOptions
from towers.machine import limits


def connect(cpus: int) -> None:
    """Connects to the cluster that there is, or starts one on this machine.

    Args:
        cpus: How many CPUs that is to have at least, whatever the machine has.

    Raises:
        ConnectionError: RAY_ADDRESS names one that does not answer.
    """
    if not join():
        # Processes on one machine share its CPUs.
        start(num_cpus=max(cpus, limits.cpu_count()))


def join() -> bool:
    """Connects to the cluster that there is; tells whether there is one.

    Raises:
        ConnectionError: RAY_ADDRESS names one that does not answer.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "local":
        return False
    try:
        ray.init(address=address)
    except ConnectionError:
        if address != "auto":
            raise
        return False
    return True


def start(**options: Any) -> None:
    """Starts a cluster on this machine, with options of `ray.init`."""
    # For this run only; Ray would leave one in the home directory.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray.init(address="local", **options)


def resources(options: LaunchOptions) -> dict[str, int]:
    """Returns what Ray is to reserve for each host, by Ray's names."""
    found = {"CPU": options.num_cpus}
    # Without GPUs, --num_gpus is for logical CPUs, which share those of the node.
    if ray.cluster_resources().get("GPU"):
        found["GPU"] = options.num_gpus or 1
    return found


def in_words(resources: Mapping[str, float]) -> str:
    """Says how many CPUs and GPUs there are."""
    found = [f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU")]
    return " and ".join(each for each in found if not each.startswith("0 ")) or "none"


def first_line(error: Exception) -> str:
    """Returns the first line of what an error says, without a full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].removesuffix(".")

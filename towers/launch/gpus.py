"""Divides the GPUs of this machine among the hosts that start on it."""

from collections.abc import Mapping

from towers.doctor.gpus import checks as gpus
from towers.program import words

VISIBLE = "CUDA_VISIBLE_DEVICES"


def divide(hosts: int, each: int | None, environ: Mapping[str, str]) -> list[list[str]]:
    """Returns the GPUs of each host, as CUDA_VISIBLE_DEVICES names them.

    Args:
        hosts: How many hosts there are.
        each: How many GPUs each gets; `None` for as many as there are for each.
        environ: The environment, which may hide some.

    Raises:
        ValueError: There are too few.
    """
    visible = visible_in(environ)
    if not visible:
        return [[] for _ in range(hosts)]
    count = each or len(visible) // hosts
    if not count or count * hosts > len(visible):
        asked = f"--num_gpus={each} for {hosts} hosts" if each else f"{hosts} hosts"
        raise ValueError(
            f"Received {asked}, but {words.count(len(visible), 'GPU')} to divide; "
            f"expected fewer, or {VISIBLE}= to train on CPUs."
        )
    return [visible[count * k : count * (k + 1)] for k in range(hosts)]


def visible_in(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that are visible, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE not in environ:
        return [str(card.index) for card in gpus.look(environ=environ).cards]
    indices = []
    for entry in map(str.strip, environ[VISIBLE].split(",")):
        if entry in ("", "-1"):
            break  # CUDA, too, takes those before it
        indices.append(entry)
    return indices

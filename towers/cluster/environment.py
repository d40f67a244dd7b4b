"""Finds this process's place among the hosts, in what a launcher says of it.

That is the environment: of `python -m towers.launch`, of anything that sets TF_CONFIG,
of MPI's `mpirun`, of `torchrun` and its kin, or of Slurm's `srun`. Ray Train answers
its workers instead.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from towers.cluster.addresses import is_address
from towers.cluster.launchers import ray_train, tf_config, torchrun
from towers.hosts.group import (
    JOIN_SECONDS,
    MPI,
    ProcessPlace,
)
from towers.program.voice import warn

_RANK, _COUNT = "TOWERS_HOST_RANK", "TOWERS_HOST_COUNT"
_COORDINATOR, _TOKEN = "TOWERS_COORDINATOR", "TOWERS_TOKEN"
_SECONDS, _GENERATION = "TOWERS_JOIN_SECONDS", "TOWERS_GENERATION"
_INTERFACE, _TF_CONFIG = "TOWERS_INTERFACE", "TF_CONFIG"
_SLURM_RESTARTS = "SLURM_RESTART_COUNT"
# Whoever hears a greeting can try out tokens: of four digits, all in a moment.
_LEAST_TOKEN = 16
# Ports from here on are below those that Linux gives to whoever asks for any.
_SLURM_PORTS = 15_000

Environ = Mapping[str, str]


def find(environ: Environ = os.environ) -> ProcessPlace | None:
    """Finds this process's place among several hosts; `None` if it is alone.

    What `TOWERS_HOST_RANK` and its kin say counts first, then what Ray Train says, then
    `TF_CONFIG`, then MPI's variables, then torchrun's, then Slurm's.
    `TOWERS_COORDINATOR`, `TOWERS_TOKEN`, `TOWERS_INTERFACE` and `TOWERS_JOIN_SECONDS`
    are for all but MPI.

    Args:
        environ: The environment.

    Raises:
        ValueError: It contradicts itself, or is of another form.
    """
    if environ.get(_RANK) or environ.get(_COUNT):
        place = _of_towers(environ)
    elif ray_train.is_worker():
        # Before TF_CONFIG, as Ray may have picked the ports there long ago; and before
        # Slurm, which may have started Ray.
        place = _of_ray(environ)
    elif environ.get(_TF_CONFIG, "").strip() not in ("", "{}"):
        place = _of_tf_config(environ)
    elif (rank := _rank_of_mpi(environ)) is not None:
        # Before Slurm, which may have started mpirun.
        place = _of_mpi(environ, rank)
    elif (names := torchrun.names(environ)) is not None:
        # Before Slurm, which may have started torchrun.
        place = _of_torchrun(environ, names)
    elif environ.get("SLURM_STEP_ID"):
        place = _of_slurm(environ)
    elif environ.get(_COORDINATOR):
        place = _of_towers(environ)  # which says what is missing
    else:
        _check_alone(environ)
        return None
    return place if place.count > 1 else None


def _check_alone(environ: Environ) -> None:
    """Warns, or raises, where a process without a place may be one of several."""
    if rank := environ.get("PMIX_RANK"):
        # So `prterun` and `prun` of PRRTE start a process. PMIx tells its size only to
        # who speaks its protocol.
        raise ValueError(
            f"Received PMIX_RANK={rank} without the number of processes; start with "
            "mpirun or srun --mpi=pmix, which tell it, or unset PMIX_RANK to train "
            "alone."
        )
    if _number(environ, "SLURM_NTASKS", 1, default=1) > 1:
        warn(
            f"Slurm has {environ['SLURM_NTASKS']} tasks for this job, but srun did "
            "not start this process, which trains alone; begin its command with "
            "srun to train on all."
        )
    elif missing := torchrun.unfinished(environ):
        warn(f"{missing}, so this process trains alone; set all of them, or none.")


def variables(place: ProcessPlace) -> dict[str, str]:
    """Returns the environment in which `find` finds a place."""
    values = {
        _RANK: place.rank,
        _COUNT: place.count,
        _COORDINATOR: place.coordinator,
        _TOKEN: place.token,
        _SECONDS: f"{place.join_seconds:g}",
        _INTERFACE: place.interface,
        _GENERATION: place.generation,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def restarted(environ: Environ = os.environ) -> bool:
    """Tells whether this process goes on with a run that a launcher began before.

    Args:
        environ: The environment.

    Raises:
        ValueError: It is of another form.
    """
    # A requeued job of Slurm's may start launchers anew, each with generation 0.
    names = _GENERATION, torchrun.RESTARTS, _SLURM_RESTARTS
    return any(_number(environ, name, 0, default=0) > 0 for name in names)


def _of_towers(environ: Environ) -> ProcessPlace:
    """The place that `towers.launch` says."""
    names = _RANK, _COUNT, _COORDINATOR, _TOKEN
    if missing := [name for name in names if not environ.get(name)]:
        given = [name for name in names if name not in missing]
        raise ValueError(
            f"Received {', '.join(given)} without {', '.join(missing)}; expected all "
            "of them, as python -m towers.launch sets them, or none."
        )
    count = _number(environ, _COUNT, 1)
    return _place(environ, _rank(environ, _RANK, count), count, "")


def _of_ray(environ: Environ) -> ProcessPlace:
    """The place of a worker of Ray Train's."""
    rank, count, coordinator, token = ray_train.read()
    place = _place(environ, rank, count, coordinator)
    return dataclasses.replace(place, token=place.token or token)


def _of_tf_config(environ: Environ) -> ProcessPlace:
    """The place that TF_CONFIG says: the chief is first, if there is one."""
    try:
        cluster, kind, index = tf_config.read(environ[_TF_CONFIG])
    except ValueError as error:
        raise ValueError(f"{_TF_CONFIG}: {error}.") from error
    kinds = "chief", "worker"
    if others := [name for name in (*cluster, kind) if name not in kinds]:
        raise ValueError(
            f"{_TF_CONFIG} has tasks of type {others[0]}; expected chief and worker, "
            "as every host of Towers trains: leave out parameter servers and "
            "evaluators."
        )
    chiefs, workers = (cluster.get(name, []) for name in kinds)
    if len(chiefs) > 1:
        raise ValueError(f"{_TF_CONFIG} has {len(chiefs)} chiefs; expected at most 1.")
    addresses = (*chiefs, *workers)
    rank = index if kind == "chief" else len(chiefs) + index
    # The first host's own port is free until the hosts have met.
    place = _place(environ, rank, len(addresses), addresses[0])
    return dataclasses.replace(place, addresses=addresses)


class ScheduledTask(NamedTuple):
    """One of several tasks that a scheduler has started.

    Attributes:
        rank: Its number, from 0.
        by: What tells it.
        coordinator: Where the first one can be reached; `None` if it is not told.
    """

    rank: int
    by: str
    coordinator: str | None = None


def task(environ: Environ, name: str) -> ScheduledTask:
    """Returns which of the tasks of Slurm or Kubernetes this process is.

    Args:
        environ: The environment.
        name: The name of this machine, which Kubernetes numbers.

    Raises:
        ValueError: Neither tells it.
    """
    if environ.get("SLURM_STEP_ID"):
        rank = _number(environ, "SLURM_PROCID", 0)
        return ScheduledTask(rank, "SLURM_PROCID", _slurm_coordinator(environ))
    index = "JOB_COMPLETION_INDEX"
    if environ.get(index):
        return ScheduledTask(_number(environ, index, 0), index)
    ordinal = re.search(r"-(\d+)$", name)
    if environ.get("KUBERNETES_SERVICE_HOST") and ordinal:
        return ScheduledTask(int(ordinal[1]), f"the name of the pod {name}")
    raise ValueError(
        "Received --host_rank=auto, but neither Slurm's srun nor an indexed Job or a "
        "StatefulSet of Kubernetes has started this process; expected a number, from 0."
    )


def _rank_of_mpi(environ: Environ) -> str | None:
    """Returns the variable with the rank, if MPI connects the processes."""
    name = next((k for k, size in MPI.items() if {k, size} <= environ.keys()), None)
    by_srun = environ.get("SLURM_STEP_ID") and name in ("PMI_RANK", "PMIX_RANK")
    # Some clusters let each srun set these, also for programs without MPI.
    if by_srun and importlib.util.find_spec("mpi4py") is None:
        return None
    return name


def _of_mpi(environ: Environ, name: str) -> ProcessPlace:
    """Returns the place of a process that MPI has started."""
    count = _number(environ, MPI[name], 1)
    rank, seconds = _rank(environ, name, count), _seconds(environ)
    return ProcessPlace(rank, count, "", None, join_seconds=seconds, mpi=name)


def _of_torchrun(environ: Environ, names: torchrun.Names) -> ProcessPlace:
    """Returns the place of a process of torchrun's, or of a pod of its kin."""
    count = _number(environ, names.count, 1)
    rank = _rank(environ, names.rank, count)
    coordinator = torchrun.coordinator(environ, names)
    return _place(environ, rank, count, coordinator, torchrun.RESTARTS)


def _of_slurm(environ: Environ) -> ProcessPlace:
    """The place of a task of `srun`."""
    tasks = "SLURM_STEP_NUM_TASKS"
    tasks = tasks if environ.get(tasks) else "SLURM_NTASKS"
    count = _number(environ, tasks, 1)
    rank = _rank(environ, "SLURM_PROCID", count)
    coordinator = _slurm_coordinator(environ)
    return _place(environ, rank, count, coordinator, _SLURM_RESTARTS)


def _slurm_coordinator(environ: Environ) -> str:
    """Where the first task of a step waits for the others."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    # On one node, nobody else has to reach it.
    several = any(sign in nodes for sign in ",[")
    node = first_node(nodes) if several else "127.0.0.1"
    job = _number(environ, "SLURM_JOB_ID", 0)
    # Steps of a job, and jobs that share nodes, have ports of their own.
    port = _SLURM_PORTS + (31 * job + _number(environ, "SLURM_STEP_ID", 0)) % 10_000
    # A cluster's names for its nodes need not be known to the network.
    return _coordinator(environ, f"{node}:{port}")


def first_node(nodes: str) -> str:
    """Returns the first node of a list of Slurm's.

    Args:
        nodes: The list, such as "n[08-10,12],gpu-a[1-2]", whose first is n08.

    Raises:
        ValueError: It is no such list.
    """
    name = r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not (first := re.match(name, nodes)) or not re.fullmatch(
        f"{name}(,{name})*", nodes
    ):
        raise ValueError(
            f"Received the node list {nodes!r}; expected one of Slurm's, such as "
            "n[1-3,7]."
        )
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])


def _place(
    environ: Environ, rank: int, count: int, coordinator: str, restarts: str = ""
) -> ProcessPlace:
    """Returns a place, with what the environment says of it besides.

    Args:
        environ: The environment.
        rank: Rank of this host.
        count: Number of hosts.
        coordinator: Where the first host waits, unless `TOWERS_COORDINATOR` says it.
        restarts: Name of the variable in which the launcher counts its restarts.
    """
    generation = _number(environ, restarts, 0, default=0)
    return ProcessPlace(
        rank,
        count,
        _coordinator(environ, coordinator),
        token(environ),
        _seconds(environ),
        environ.get(_INTERFACE) or None,
        generation=_number(environ, _GENERATION, 0, default=generation),
    )


def _seconds(environ: Environ) -> float:
    text = environ.get(_SECONDS) or str(JOIN_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"Received {_SECONDS}={text}; expected for how many seconds to wait for "
            f"other hosts, such as {JOIN_SECONDS:g}."
        )
    return seconds


def token(environ: Environ) -> str | None:
    """Returns the token of the environment, if there is one.

    Raises:
        ValueError: It is so short that whoever hears a greeting can find it.
    """
    secret = environ.get(_TOKEN) or None
    if secret is not None and len(secret) < _LEAST_TOKEN:
        raise ValueError(
            f"Received a {_TOKEN} of {len(secret)} characters; expected at least "
            f"{_LEAST_TOKEN}, such as openssl rand -hex 16 prints."
        )
    return secret


def _coordinator(environ: Environ, default: str) -> str:
    coordinator = environ.get(_COORDINATOR) or default
    if not is_address(coordinator):
        raise ValueError(
            f"Received {_COORDINATOR}={coordinator}; expected the address of the first "
            "host, such as node0:8476."
        )
    return coordinator


def _rank(environ: Environ, name: str, count: int) -> int:
    rank = _number(environ, name, 0)
    if rank >= count:
        raise ValueError(
            f"Received {name}={rank} for {count} hosts; expected 0 to {count - 1}."
        )
    return rank


def _number(environ: Environ, name: str, least: int, default: int | None = None) -> int:
    text = environ.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(
            f"Received {name}={text}; expected a whole number of at least {least}."
        )
    return int(text)

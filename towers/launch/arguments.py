"""The arguments of towers.launch, and the command that they make of what follows --."""

import dataclasses
import importlib.util
import itertools
import os
import re
import socket
import sys
from collections.abc import Sequence
from typing import Literal

from towers.cluster import environment
from towers.cluster.addresses import is_address
from towers.hosts.group import JOIN_SECONDS
from towers.machine import limits
from towers.program import voice, words
from towers.program.extras import install_command
from towers.program.flags import command_line, table
from towers.program.flags.table import flag
from towers.train import checks, flags, settings, tower_flags

_EXAMPLE = "towers launch --hosts=2 -- --model=resnet20"
_INSTEAD = (
    "one number, such as --hosts=4, to start again with another number and the same "
    "--model_dir, from the last checkpoint; or --launcher=ray, which does so by itself"
)


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """What a launch is asked to do.

    Attributes:
        least: How many hosts may do; fewer than `most` only with Ray.
        most: How many there are at most.
        command: What each host runs.
        num_gpus: GPUs of each host; `None` for as many as there are for each.
        host_rank: The one host that is started here; `None` for all of them.
        coordinator: Where the first host listens; `None` to choose.
        interface: What hosts on other machines are reached by.
        join_seconds: How long hosts wait for one another.
        fail_seconds: How long they may take to end when one has failed.
        max_restarts: How often all are started anew because of a failure.
        log_dir: Where the output of hosts other than the first goes; `None` to choose.
        launcher: "local" to start processes of its own, "ray" for Ray Train.
        num_cpus: CPUs that Ray reserves for each host.
        placement_strategy: How Ray spreads the hosts over its nodes.
    """

    least: int
    most: int
    command: tuple[str, ...]
    num_gpus: int | None = None
    host_rank: int | None = None
    coordinator: str | None = None
    interface: str | None = None
    join_seconds: float = JOIN_SECONDS
    fail_seconds: float = 30.0
    max_restarts: int = 0
    log_dir: str | None = None
    launcher: str = "local"
    num_cpus: int = 1
    placement_strategy: str = "PACK"


# With a range of hosts, a run is meant to outlive nodes, so it restarts by default.
_RANGE_RESTARTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """The flags of towers.launch; defaults are torchrun's, where it has them."""

    hosts: str | None = flag(
        None,
        "Flags",
        "Number of hosts. With --launcher=ray, 2:4 for as many as Ray has places for: "
        "it starts all again with another number as nodes come and go.",
    )
    num_gpus: int | None = flag(
        None,
        "Flags",
        "Number of GPUs of each host, or of logical CPUs without a GPU. Default: the "
        "GPUs of this machine in equal parts.",
        at_least=1,
    )
    host_rank: int | Literal["auto"] | None = flag(
        None,
        "Flags",
        "Start only this host here, from 0, and the others on other machines. auto: "
        "the number of this task of Slurm's srun, or of this pod of an indexed Job or "
        "a StatefulSet of Kubernetes. Default: start all here.",
    )
    coordinator: str | None = flag(
        None,
        "Flags",
        "HOST:PORT, with --host_rank: where the first host waits for the others. "
        "Default for --host_rank=auto under Slurm: the first node, at a port by the "
        "job's number.",
    )
    interface: str | None = flag(
        None,
        "Flags",
        "With --host_rank: network interface, or its address, by which the other hosts "
        "reach this one. Default: the one by which it reaches --coordinator.",
    )
    join_seconds: float = flag(
        JOIN_SECONDS,
        "Flags",
        "Number of seconds for which hosts wait for one another at the start.",
        above=0,
    )
    fail_seconds: float = flag(
        30.0,
        "Flags",
        "Number of seconds in which hosts may end by themselves when one has failed; "
        "then the launcher ends them.",
        above=0,
    )
    max_restarts: int | None = flag(
        None,
        "Flags",
        "How often all hosts start again when one has failed. Default: 0, and "
        f"{_RANGE_RESTARTS} with --hosts=2:4.",
        at_least=0,
    )
    log_dir: str | None = flag(
        None,
        "Flags",
        "Folder for host1.log and so on, the output of hosts other than the first. "
        "Default: the --model_dir after --, else a temporary folder.",
    )
    launcher: Literal["local", "ray"] = flag(
        "local",
        "Flags",
        "local: start processes here. ray: have Ray Train start them, on its cluster "
        "or on one started here.",
    )
    num_cpus: int = flag(
        1,
        "Flags",
        "With --launcher=ray: number of CPUs that Ray reserves for each host.",
        at_least=1,
    )
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = (
        flag(
            "PACK",
            "Flags",
            "With --launcher=ray: how it spreads hosts over nodes.",
        )
    )


# Hosts on a machine, which are for tests unless it has many GPUs.
_MOST_HERE = 32


def read(argv: Sequence[str], doc: str) -> LaunchOptions:
    """Reads the arguments, without the program's name.

    Raises:
        ValueError: One is unknown, missing, or has a bad value.
        SystemExit: The help was asked for.
    """
    own, theirs = _parts(argv)
    known = table.fields(LaunchFlags)
    for arg in own:
        name = arg.lstrip("-").partition("=")[0]
        if arg.startswith("--") and name == "host_file":
            raise ValueError(
                f"Received {arg}; --host_file is gone, with the hosts that came and "
                f"went while others trained; expected {_INSTEAD}."
            )
        if arg.startswith("--") and name in settings.NAMES and name not in known:
            raise ValueError(
                f"Received --{name} before --; expected flags of towers train after "
                f"it, such as {_EXAMPLE}."
            )
    asked = command_line.read(LaunchFlags, ["towers.launch", *own], doc)
    found = dataclasses.asdict(asked)
    if found["host_rank"] == "auto":
        _find_rank(found)
    hosts = found.pop("hosts")
    least, most = _hosts(hosts)
    if least < most and found["launcher"] == "local":
        raise ValueError(
            f"Received --hosts={hosts}; a range is for --launcher=ray only; expected "
            f"{_INSTEAD}."
        )
    _check(found, most)
    if found["max_restarts"] is None:
        found["max_restarts"] = _RANGE_RESTARTS if least < most else 0
    command, more = _command(theirs, found)
    return LaunchOptions(least, most, command, **(found | more))


def _parts(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides the arguments at --, or where a command begins, as torchrun does."""
    for k, (before, arg) in enumerate(itertools.pairwise(["", *argv])):
        if arg == "--":
            return [*argv[:k]], [*argv[k + 1 :]]
        if not arg.startswith("-") and not re.fullmatch(r"--\w+", before):
            return [*argv[:k]], [*argv[k:]]
    return [*argv], []


def _find_rank(found: dict) -> None:
    """Asks the scheduler that has started the launcher; says what it tells."""
    task = environment.task(os.environ, socket.gethostname())
    found["host_rank"] = task.rank
    found["coordinator"] = found["coordinator"] or task.coordinator
    said = f"This is host {task.rank}, by {task.by}"
    if found["coordinator"]:
        said += f"; the first one waits at {found['coordinator']}"
    voice.say(f"{said}.")


def _hosts(text: str | None) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})", text or "")
    least, most = (int(match[1] or match[2]), int(match[2])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(
            f"Received --hosts={text or ''}; expected a number, such as --hosts=2, or "
            "with --launcher=ray the least and the most, such as --hosts=2:4."
        )
    return least, most


def _check(found: dict, most: int) -> None:
    if found["launcher"] == "ray":
        return _check_ray(found)
    for name in ("num_cpus", "placement_strategy"):
        if found[name] != getattr(LaunchFlags(), name):
            raise ValueError(
                f"Received --{name}={found[name]} without --launcher=ray; expected "
                "both or neither."
            )
    rank = found["host_rank"]
    for name in ("coordinator", "interface"):
        if found[name] is not None and rank is None:
            raise ValueError(
                f"Received --{name} without --host_rank; expected both, to start one "
                "host on each machine, or neither, to start all on this one."
            )
    if rank is None:
        return _check_here(most)
    if not 0 <= rank < most:
        raise ValueError(
            f"Received --host_rank={rank} for {most} hosts; expected 0 to {most - 1}."
        )
    if not is_address(found["coordinator"]):
        raise ValueError(
            f"Received --coordinator={found['coordinator'] or ''}; expected where the "
            "first host waits for the others, such as node0:8476."
        )


def _check_here(hosts: int) -> None:
    """Checks that this machine has not too many hosts to be done in minutes."""
    cores = limits.cpu_count()
    most = max(_MOST_HERE, cores)
    if hosts > most:
        raise ValueError(
            f"Received {hosts:,} hosts by --hosts, all of them on this machine, which "
            f"has {words.count(cores, 'core')}; expected at most {most}."
        )


def _check_ray(found: dict) -> None:
    for name in ("host_rank", "coordinator", "log_dir"):
        if found[name] is not None:
            raise ValueError(
                f"Received --{name} with --launcher=ray; expected neither, as Ray "
                "chooses the nodes, and keeps what hosts write."
            )
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "Received --launcher=ray, but Ray is not installed; run: "
            f"{install_command('ray')}"
        )


def _command(theirs: Sequence[str], found: dict) -> tuple[tuple[str, ...], dict]:
    """Returns what a host runs, and what else that says of the launch."""
    first = theirs[0] if theirs else "--"
    # A flag, too, may end with .py, such as --model=mine.py.
    if re.fullmatch(r"-m|[^-].*\.py", first):
        return (sys.executable, *theirs), _log_dir(theirs, found)
    if not first.startswith("-"):
        return tuple(theirs), _log_dir(theirs, found)
    # One sentence here instead of one from each host.
    asked = checks.check_model_dir(
        flags.read(["towers.train", *theirs], "Flags of towers.train, after --.")
    )
    tower_flags.check_fixed(asked, "each of several hosts")
    gpus = asked.num_gpus if found["num_gpus"] is None else found["num_gpus"]
    if asked.num_gpus not in (None, gpus):
        raise ValueError(
            f"Received --num_gpus={gpus} before -- and {asked.as_flag('num_gpus')} "
            "after it; expected one of them, which is for each host."
        )
    if asked.gpu_indices and found["host_rank"] is None:
        raise ValueError(
            f"Received {asked.as_flag('gpu_indices')} for hosts on one machine; "
            "expected CUDA_VISIBLE_DEVICES with the GPUs that they divide."
        )
    more = [] if gpus is None or asked.num_gpus else [f"--num_gpus={gpus}"]
    folder = found["log_dir"] or asked.absolute_model_dir
    command = (sys.executable, "-m", "towers.train", *theirs, *more)
    return command, {"num_gpus": gpus, "log_dir": folder}


def _log_dir(theirs: Sequence[str], found: dict) -> dict:
    text = "\n".join(theirs)
    given = re.search(r"^--?model_dir[=\n](.+)$", text, re.MULTILINE)
    return {"log_dir": found["log_dir"] or (given[1] if given else None)}

"""Says what is wrong with this machine if training does not start or is slow.

    python -m towers.doctor --model_dir=runs/mine
    python -m towers.doctor --hosts=node0:8476,node1:8476
    python -m towers.doctor --gpus

It prints a line for each check: "ok", "note" (good to know) or "wrong", with what was
found, what was expected and what to do. It trains nothing and leaves no files.
With --hosts, which is run on each host at the same time, it checks names, ports,
versions, clocks and the network between them. With --gpus, it only lists the GPUs, and
who uses them.
Exit codes: 0 nothing is wrong; 1 error; 2 something is wrong; 130 stopped by Ctrl-C.
"""

import collections
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Sequence

from towers.doctor import cluster, devices, host, versions
from towers.doctor.finding import NOTE, OK, WRONG, Check, Finding, examine
from towers.doctor.gpus import checks as gpus
from towers.processes import signals
from towers.program.flags import command_line
from towers.program.flags.table import flag

_PROGRAM = "towers.doctor"
_WIDTH = 18


def main(argv: Sequence[str]) -> int:
    """Makes all checks, and says what they find; returns the exit code."""
    try:
        options = parse(argv)
    except ValueError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 1
    signals.raise_at_ctrl_c()
    try:
        if options.gpus:
            return say_gpus(options)
        if options.hosts is None:
            found = say(checks(options), options.json)
        else:
            found = say(between_hosts(options), options.json)
    except ValueError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: Stopped by Ctrl-C.", file=sys.stderr)
        return 130
    return 2 if WRONG in (finding.verdict for _, finding in found) else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The flags of towers.doctor."""

    model_dir: str = flag("runs", "Flags", "Folder of a run, whose disk is checked.")
    data_dir: str = flag(
        "data",
        "Flags",
        "Folder where digits and tfds: store their files, whose disk is checked.",
    )
    num_gpus: int | None = flag(
        None,
        "Flags",
        "Number of devices. Default: all GPUs; without a GPU, 2 logical CPUs.",
        at_least=1,
    )
    hosts: str | None = flag(
        None,
        "Flags",
        "Check hosts instead of this machine: the address of each, such as "
        "node0:8476,node1:8476, or auto in a process that a launcher has started. Run "
        "it on each of them at the same time, with the same TOWERS_TOKEN.",
    )
    host_rank: int | None = flag(
        None,
        "Flags",
        "With --hosts: which of them this one is, from 0. Default: the one that is on "
        "this machine.",
    )
    gpus: bool = flag(
        False,
        "Flags",
        "Only list this machine's GPUs, or with --hosts those of all hosts, the "
        "processes that hold their memory, and what slows them down.",
    )
    json: bool = flag(False, "Flags", "Print JSON instead of lines.")


def parse(argv: Sequence[str]) -> DoctorOptions:
    """Reads the flags.

    Args:
        argv: The program's name and its flags.

    Raises:
        ValueError: A flag is unknown, or its value bad.
    """
    options = command_line.read(DoctorOptions, argv, __doc__)
    if options.host_rank is not None and options.hosts in (None, "auto"):
        raise ValueError(
            f"Received --host_rank={options.host_rank} without addresses in --hosts; "
            "expected both, or neither."
        )
    return options


def say_gpus(options: DoctorOptions) -> int:
    """Prints who holds which GPU, of this host or all; returns the exit code.

    Raises:
        ValueError: There is no NVIDIA driver, it does not answer, or hosts do not meet.
    """
    from towers.doctor.gpus import table  # needs more packages than the doctor itself

    if options.hosts is None:
        found = table.cards()
        if options.json:
            print(json.dumps(table.as_json(found), indent=2))
        else:
            print(table.as_text(found))
        return 0
    from towers.doctor import hosts

    place = hosts.place(options.hosts, options.host_rank)
    try:
        told = hosts.gather(place, table.of_this_host())
    except OSError as error:
        raise ValueError(str(error)) from error
    if options.json:
        gpus_of = {name: each["gpus"] for name, each in told.items()}
        print(json.dumps(gpus_of, indent=2))
    else:
        print("\n".join(f"{name}\n{each['text']}" for name, each in told.items()))
    return 0


def checks(options: DoctorOptions) -> Iterator[tuple[str, Check]]:
    """The checks and their names, in the order in which they are made."""
    bind = functools.partial
    yield "Python", versions.python
    for name, asked_by in versions.NAMED.items():
        yield name, bind(versions.package, name, asked_by)
    yield "other packages", versions.others
    # Before TensorFlow takes of their memory.
    machine = gpus.look()
    found = devices.probe(options.num_gpus)
    yield "TensorFlow", bind(devices.start, found)
    yield "Keras settings", versions.of_keras
    yield "GPUs", bind(gpus.check_gpus, machine, found)
    yield "driver", bind(gpus.check_driver, machine, found)
    yield "CUDA", bind(gpus.check_libraries, machine, found)
    yield "GPU kernels", bind(gpus.check_kernels, machine, found)
    yield "GPU settings", gpus.check_settings
    yield "GPU memory", bind(gpus.check_memory, machine)
    for device in found.towers:
        yield device.removeprefix("/device:"), bind(devices.computation, found, device)
    if found.towers:
        yield "copies", bind(devices.copies, found)
    yield "TF_CONFIG", cluster.check
    yield "model_dir", bind(host.model_dir, options.model_dir)
    yield "data_dir", bind(host.data_dir, options.data_dir)
    yield "shared memory", bind(host.shared_memory, machine.gpus)
    yield "open files", host.open_files
    gpus_mb = sum(card.memory_mb for card in machine.cards)
    yield "memory", bind(host.memory, gpus_mb)
    yield "cores", host.cores


def between_hosts(options: DoctorOptions) -> Iterator[tuple[str, Check]]:
    """The checks of several hosts, as `checks`.

    Raises:
        ValueError: The flags name no hosts.
    """
    # Without NumPy, the doctor can still look at this machine.
    from towers.doctor import hosts

    yield from hosts.BetweenHosts(
        hosts.place(options.hosts, options.host_rank)
    ).checks()


def say(named: Iterator[tuple[str, Check]], as_json: bool) -> list[tuple[str, Finding]]:
    """Makes the checks, and prints each finding at once, or one JSON at the end."""
    found = []
    for name, check in named:
        finding = examine(check)
        found.append((name, finding))
        if not as_json:
            print(line(name, finding), flush=True)
    count = collections.Counter(finding.verdict for _, finding in found)
    if as_json:
        report = [
            {"name": n, "verdict": f.verdict, "text": f.text, "figures": f.figures}
            for n, f in found
        ]
        worst = next(each for each in (WRONG, NOTE, OK) if count[each])
        print(json.dumps({"verdict": worst, "checks": report}, indent=2))
    else:
        print(f"\n{count[WRONG] or 'Nothing'} wrong, {count[NOTE]} to note.")
    return found


def line(name: str, finding: Finding) -> str:
    """A finding as a line, with its table below it."""
    text = " ".join(finding.text.split())
    lines = [f"{finding.verdict:7}{name:{_WIDTH}}{text}"]
    indent = " " * (7 + _WIDTH)
    return "\n".join(lines + [indent + row for row in finding.table.splitlines()])


if __name__ == "__main__":
    sys.exit(main(sys.argv))

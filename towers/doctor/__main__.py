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

import argparse
import collections
import functools
import json
import sys
from collections.abc import Iterator, Sequence

from towers.doctor import cluster, devices, host, versions
from towers.doctor.finding import NOTE, OK, WRONG, Check, Finding, examine
from towers.doctor.gpus import checks as gpus
from towers.processes import signals
from towers.program.flags.arguments import Parser

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


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the flags.

    Raises:
        ValueError: If one is unknown, or its value bad.
    """
    # Not absl's flags: nothing is imported that may be what is missing.
    parser = Parser(_PROGRAM, __doc__)
    parser.add_argument(
        "--model_dir",
        default="runs",
        help="Folder of a run, whose disk is checked. Default: runs.",
    )
    parser.add_argument(
        "--data_dir",
        default="data",
        help="Folder where digits and tfds: store their files, whose disk is checked. "
        "Default: data.",
    )
    parser.add_argument(
        "--num_gpus",
        type=int,
        help="Number of devices. Default: all GPUs; without a GPU, 2 logical CPUs.",
    )
    parser.add_argument(
        "--hosts",
        help="Check hosts instead of this machine: the address of each, such as "
        "node0:8476,node1:8476, or auto in a process that a launcher has started. Run "
        "it on each of them at the same time, with the same TOWERS_TOKEN.",
    )
    parser.add_argument(
        "--host_rank",
        type=int,
        help="With --hosts: which of them this one is, from 0. Default: the one that "
        "is on this machine.",
    )
    parser.add_argument(
        "--gpus",
        action="store_true",
        help="Only list this machine's GPUs, or with --hosts those of all hosts, the "
        "processes that hold their memory, and what slows them down.",
    )
    parser.add_argument(
        "--json", action="store_true", help="Print JSON instead of lines."
    )
    options = parser.parse_args(argv)
    _check(options)
    return options


def _check(options):
    if options.host_rank is not None and options.hosts in (None, "auto"):
        raise ValueError(
            f"Received --host_rank={options.host_rank} without addresses in --hosts; "
            "expected both, or neither."
        )
    if options.num_gpus is not None and options.num_gpus < 1:
        raise ValueError(
            f"Received --num_gpus={options.num_gpus}; expected at least 1."
        )


def say_gpus(options: argparse.Namespace) -> int:
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


def checks(options: argparse.Namespace) -> Iterator[tuple[str, Check]]:
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


def between_hosts(options: argparse.Namespace) -> Iterator[tuple[str, Check]]:
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
    sys.exit(main(sys.argv[1:]))

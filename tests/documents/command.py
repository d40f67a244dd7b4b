"""Decides what the test does for a command of a page.

Most commands run as they are. Those that train long are shortened by further flags: of
flags that are given twice, the last one counts. `OTHERWISE` lists what is done instead
of a command that would install something, run all tests, or never end.
"""

import dataclasses
import os
import re
import shlex
import sys

from packaging.requirements import Requirement

# An epoch of digits has 23 steps, and of the made-up data few: it ends, as there is a
# best model only then.
_TRAIN = "--train_epochs=1", "--max_train_steps=24", "--eval_steps=1"
# By commands of Towers, the flags that make them short.
SHORT = {
    "train": _TRAIN,
    "queue": _TRAIN,
    "parity": ("--batch_size=8", "--parity_steps=1", "--eval_steps=1"),
    "find_batch_size": ("--max_batch_size=8", "--probe_steps=1"),
    "scaling": ("--batch_size=8", "--seconds=0.3", "--rounds=1"),
    "generate": ("--max_tokens=8",),
    "benchmark": ("--examples=64", "--batch_size=8"),
}
# Of `towers launch` and of other starters: more hosts than two have no place here.
MOST_HOSTS = 2
# The programs that have a stand-in, so that what they start is decided here.
PROGRAMS = ("towers", "python", "python3", "pip", "make", "tensorboard", "mpirun")
OTHERWISE = {
    "pip install": "It would change the environment: it is checked that the arguments "
    "are requirements, and that setup.py has the extras.",
    "make": "Targets install, test for hours or build the site: `make --dry-run`.",
    "pytest": "It would run the tests within a test: `--collect-only`.",
    "python scripts/": "Benchmarks and checks take minutes to hours: `--helpfull`, in "
    "which each flag must stand.",
    "tensorboard": "It never ends: it is started, asked for its page, and stopped.",
    "towers service": "It never ends: the next command runs once it says its address, "
    "and it is stopped at the end of the page.",
    "towers train, then towers resize": "The run has to train while it is resized: it "
    "trains on in the background, and is stopped at the end of the page.",
    "mpirun": "Its number of processes, and that of hosts, is at most two.",
}


@dataclasses.dataclass(frozen=True)
class Deed:
    """The command that is run in place of one of a page.

    Attributes:
        words: The command that is run.
        why: The row of `OTHERWISE` if it is another one than the page's, beyond flags
            that make it short.
        until: An expression in the output of a command that never ends; found, the next
            command runs.
        ends: Whether such a command is stopped as soon as it has answered.
        expected: What the output has to hold.
    """

    words: tuple[str, ...]
    why: str | None = None
    until: str | None = None
    ends: bool = False
    expected: tuple[str, ...] = ()


def deed(words: list[str], resized: tuple[str, ...] = ()) -> Deed:
    """Decides what is done for a command.

    Args:
        words: The command, as its shell has read it; the first is one of `PROGRAMS`.
        resized: The folders of runs that the page resizes.

    Raises:
        ValueError: The command is wrong.
    """
    name, *args = words
    if name in ("python", "python3"):
        return _python(args, resized)
    if name == "towers":
        return _towers(args, resized)
    if name == "pip":
        return _pip(args)
    if name == "make":
        return Deed(("make", "--dry-run", *args), "make")
    if name == "tensorboard":
        command = sys.executable, "-m", "tensorboard.main", *args, "--port=0"
        return Deed(command, name, r"at (http://\S+) \(Press CTRL", ends=True)
    if name == "mpirun":
        return _mpirun(args)
    return Deed(tuple(words))


def _python(args, resized):
    if args[:1] == ["-m"] and len(args) > 1:
        module, rest = args[1], args[2:]
        for name, of_command in _modules().items():
            if module in (of_command, f"{of_command}.__main__"):
                return _towers([name, *rest], resized)
        if module == "towers":
            return _towers(rest, resized)
        if module == "pip":
            return _pip(rest)
        if module == "pytest":
            return Deed(_ours(*args, "--collect-only", "--quiet"), "pytest")
        if module.startswith("scripts."):
            return _help(("-m", module), rest)
    elif args and args[0].startswith("scripts/"):
        return _help(args[:1], args[1:])
    return Deed(_ours(*args))


def _ours(*args):
    return sys.executable, *args


def _modules():
    # `towers` takes a moment: most commands here do without.
    from towers.__main__ import COMMANDS

    return {name: module for name, (module, _) in COMMANDS.items()}


def _help(script, args):
    flags = {re.match(r"--?(?:no)?([\w-]+)", arg) for arg in args} - {None}
    expected = (rf"^ *--(\[no\])?{flag[1]}\b|-{flag[1]}\b" for flag in flags)
    return Deed(_ours(*script, "--helpfull"), "python scripts/", expected=(*expected,))


def _towers(args, resized):
    name, *rest = args or ["--help"]
    name = name.replace("-", "_")
    command = _ours("-m", "towers", name, *shorten(name, rest))
    if name == "service":
        return Deed(command, "towers service", r"(dispatcher at|worker of) \S+")
    if name == "train" and _model_dir(rest) in resized:
        long = "--train_epochs=100000", "--max_train_steps=1000000000"
        command = _ours("-m", "towers", name, *rest, *long)
        why = "towers train, then towers resize"
        return Deed(command, why, "epoch 1/")
    return Deed(command)


def shorten(name: str, args: list[str]) -> list[str]:
    """Returns the arguments of a command of Towers, with those that make it short."""
    if name == "launch":
        args = [_fewer(arg, "--hosts=") for arg in args]
        own, mark, of_hosts = _split(args)
        script = bool(of_hosts) and of_hosts[0].endswith(".py")
        return own + mark + (of_hosts if script else of_hosts + [*_TRAIN])
    args = [re.sub(r"^--search=random:\d+$", "--search=random:2", arg) for arg in args]
    short = [*SHORT.get(name, ())]
    if "--eval_only" in args or any(arg in ("--help", "--helpfull") for arg in args):
        return args
    return [_fewer(arg, "--hosts=") for arg in args] + short


def _split(args):
    at = args.index("--") if "--" in args else len(args)
    return args[:at], args[at : at + 1], args[at + 1 :]


def _fewer(arg, flag):
    """An argument `FLAG=NUMBER` with at most two, and `FLAG=LEAST:MOST` the same."""
    if not re.fullmatch(rf"{flag}\d+(:\d+)?", arg):
        return arg
    numbers = [min(int(n), MOST_HOSTS) for n in arg.removeprefix(flag).split(":")]
    return flag + ":".join(map(str, numbers))


def _model_dir(args):
    given = [arg.partition("=")[2] for arg in args if arg.startswith("--model_dir=")]
    return given[-1] if given else None


def resized(commands: list[list[str]]) -> tuple[str, ...]:
    """Returns the folders of the runs that commands of a page resize."""
    return tuple(words[2] for words in commands if words[:2] == ["towers", "resize"])


def _pip(args):
    if args[:1] != ["install"]:
        return Deed(_ours("-m", "pip", *args))
    wanted = [arg for arg in args[1:] if not arg.startswith("-")]
    if not wanted:
        raise ValueError(f"Received pip {shlex.join(args)}; expected a requirement.")
    for name in wanted:
        path, _, extras = name.rstrip("]").partition("[")
        if os.path.exists(path):  # a checkout
            asked = {*filter(None, extras.split(","))}
        else:
            requirement = Requirement(name)
            asked = requirement.extras if requirement.name == "keras-towers" else set()
        if missing := asked - extras_of_setup():
            raise ValueError(f"Received {name}: setup.py has no {sorted(missing)}.")
    return Deed(("true",), "pip install")


def extras_of_setup() -> set[str]:
    """Returns the names of the extras in setup.py."""
    from distutils.core import run_setup

    import setuptools  # noqa: F401  # `distutils` comes from there

    from tests.documents.blocks import ROOT

    here = os.getcwd()
    os.chdir(ROOT)
    try:
        return {*run_setup("setup.py", stop_after="init").extras_require}
    finally:
        os.chdir(here)


def _mpirun(args):
    args = list(args)
    for k, arg in enumerate(args[:-1]):
        if arg in ("-n", "-np"):
            args[k + 1] = str(min(int(args[k + 1]), MOST_HOSTS))
    return Deed(("mpirun", *args), "mpirun")

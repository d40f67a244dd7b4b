"""Runs the programs of Towers: `towers train` is `python -m towers.train`."""

import difflib
import os
import runpy
import sys

import towers

# By the word for each program: its module, and what it does.
COMMANDS = {
    "train": ("towers.train", "Train a model, save it, continue a run."),
    "launch": ("towers.launch", "Start the hosts of a run, on one machine or many."),
    "queue": ("towers.queue", "Train several runs, each on a device of its own."),
    "resize": ("towers.resize", "Give a run that trains other GPUs."),
    "parity": ("towers.parity", "Check that a model trains as on one device."),
    "find_batch_size": (
        "towers.find_batch_size",
        "Find the largest batch that fits, and the fastest.",
    ),
    "scaling": ("towers.scaling", "Say how many towers pay, by measuring."),
    "predict": ("towers.predict", "Predict for files, with a trained model."),
    "export": ("towers.export", "Make a SavedModel that takes files as they are."),
    "generate": ("towers.generate", "Write text with a trained language model."),
    "report": ("towers.report", "Write one HTML page about a run."),
    "doctor": ("towers.doctor", "Say what is wrong with this machine."),
    "convert": ("towers.input_pipeline.convert", "Convert a data set to TFRecords."),
    "benchmark": (
        "towers.input_pipeline.benchmark",
        "Measure the input, and name its slowest stage.",
    ),
    "service": (
        "towers.input_pipeline.service",
        "Serve batches to training on other machines.",
    ),
}
_HELP = f"""Trains Keras models on several devices of one machine, as on one big device.

    towers COMMAND [FLAGS]

Commands:
{"".join(f"  {name:<17}{does}{chr(10)}" for name, (_, does) in COMMANDS.items())}
towers COMMAND --help shows the flags of a command; towers --version, the version.
Each command is a module, too: towers train is python -m towers.train."""


def main() -> int:
    """Runs the program that the command line names, as `python -m` does.

    Returns:
        The exit code, unless the program itself exits.

    Raises:
        SystemExit: The program exits, or there is no such command.
    """
    name, *flags = sys.argv[1:] or ["--help"]
    if (plain := name.replace("-", "_")) in COMMANDS:
        name = plain  # as commands of other packages are written
    if name in ("-h", "-help", "--help", "help"):
        print(_HELP)
    elif name == "--version":
        print(_version())
    elif name in COMMANDS:
        _look_here()
        sys.argv[1:] = flags
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    else:
        sys.exit(f"towers: {unknown(name)}")
    return 0


def unknown(name: str) -> str:
    """Says that there is no such command, and which one may be meant."""
    plain = name.replace("-", "_").lower().removeprefix("towers.")
    meant = difflib.get_close_matches(plain, COMMANDS, n=1)
    hint = f" (did you mean {meant[0]}?)" if meant else ""
    expected = ", ".join(COMMANDS)
    return f"Received the command {name}; expected one of {expected}{hint}."


def _look_here() -> None:
    """Lets models import modules in the current directory, as `python -m` does."""
    here = os.getcwd()
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.append(here)


def _version() -> str:
    if version := getattr(towers, "__version__", None):
        return f"towers {version}"
    return "towers: not known, as the package keras-towers is not installed here"


if __name__ == "__main__":
    sys.exit(main())

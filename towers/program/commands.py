"""Functions that the command lines of several programs share."""

import importlib.util
import os
import re
import socket
import sys
import tempfile
from collections.abc import Sequence

from absl import flags, logging

from towers.program.extras import install_command

_SECONDS = 10


def read_image_size(text: str | None) -> tuple[int, int] | None:
    """Reads the value of --image_size.

    Returns:
        Height and width, or None if no size was given.

    Raises:
        ValueError: The text is neither N nor HxW.
    """
    if text is None:
        return None
    sizes = text.lower().split("x")
    if len(sizes) > 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(
            f"Received --image_size={text}; expected pixels, as 224 or as 240x320 "
            "(height x width)."
        )
    return int(sizes[0]), int(sizes[-1])


def read_randaugment(parts: Sequence[str] | None) -> tuple[int, int] | None:
    """Reads the value of --randaugment.

    Returns:
        Layers and magnitude, or None if none were given.

    Raises:
        ValueError: The parts are not two numbers in their ranges.
    """
    if parts is None:
        return None
    if len(parts) == 2 and all(part.isdecimal() for part in parts):
        layers, magnitude = map(int, parts)
        if 1 <= layers <= 8 and magnitude <= 10:
            return layers, magnitude
    raise ValueError(
        f"Received --randaugment={','.join(parts)}; expected layers (1 to 8) and a "
        "magnitude (0 to 10), such as --randaugment=2,9."
    )


def on_hosts(hosts: int, num_gpus: int | None, log_dir: str | None = None) -> list[str]:
    """Returns the start of a command line that starts hosts; "-m", a module... follow.

    Args:
        hosts: Number of hosts, all on this machine.
        num_gpus: Number of GPUs of each host, if given.
        log_dir: Folder for the output of hosts other than the first.
    """
    command = [sys.executable, "-m", "towers.launch", f"--hosts={hosts}"]
    if num_gpus is not None:
        command.append(f"--num_gpus={num_gpus}")
    if log_dir is not None:
        command.append(f"--log_dir={log_dir}")
    return [*command, "--"]


def check_plot(path: str | None, *examples: str) -> None:
    """Checks the value of --plot.

    Args:
        path: File to write; None for no chart.
        examples: File names of each supported format, such as "a.png".

    Raises:
        ValueError: The format is not supported, or the file cannot be written.
    """
    if path is None:
        return
    kinds = [os.path.splitext(example)[1] for example in examples]
    folder = os.path.dirname(os.path.abspath(path))
    if not path.endswith(tuple(kinds)) or not os.path.isdir(folder):
        names = " or ".join(kind[1:].upper() for kind in kinds)
        raise ValueError(
            f"Received --plot={path}; expected a {names} file in a folder that exists, "
            f"such as --plot={examples[-1]}."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"Received --plot={path}, but matplotlib, which draws it, is not "
            f"installed; {install_command('plots')}, or leave out --plot."
        )


def check_folder(name: str, path: str, option: str, new: bool = False) -> None:
    """Checks that a folder can be created and written to; leaves nothing behind.

    Args:
        name: Name of the folder in error messages.
        path: The folder, in any file system; only local ones are checked.
        option: The option that names another folder, such as "--model_dir".
        new: Whether an existing folder need not be writable.

    Raises:
        ValueError: The folder cannot be written to, or is a file.
    """
    if "://" in path:
        return
    path = existing = os.path.abspath(os.path.expanduser(path))
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if new and os.path.isdir(path):
        return
    try:
        # Only a write is conclusive: permissions ignore root, /proc and full disks.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise ValueError(
            f"Cannot write to the {name} {path}: no file can be made in {existing} "
            f"({error.strerror}); choose another {option}."
        ) from error


def check_data_service(address: str | None) -> None:
    """Checks that the service of --data_service runs.

    TensorFlow would wait for it forever.

    Raises:
        ValueError: The address is malformed, or no dispatcher or no worker answers.
    """
    if address is None:
        return
    if not re.fullmatch(r"grpc://[^:/]+:\d+", address):
        raise ValueError(
            f"Received --data_service={address}; expected the address of a dispatcher, "
            "such as grpc://localhost:5050."
        )
    import grpc

    try:
        with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
            # TensorFlow has no Python API for this; an empty message asks for all.
            ask = channel.unary_unary("/tensorflow.data.DispatcherService/GetWorkers")
            answer = ask(b"", timeout=_SECONDS)
    except grpc.RpcError as error:
        raise ValueError(
            f"Received --data_service={address}, where no dispatcher answers "
            f"({error.details()}); start one there: python -m "
            "towers.input_pipeline.service dispatcher."
        ) from error
    workers = [worker.decode() for worker in re.findall(rb"[\w.-]+:\d+", answer)]
    if not any(map(_answers, workers)):
        raise ValueError(
            f"Received --data_service={address}, whose workers do not answer "
            f"({', '.join(workers) or 'there are none'}); start one: python -m "
            "towers.input_pipeline.service worker, with an --address that is known "
            "here."
        )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


def fail(reason: object, program: str) -> int:
    """Prints a line that says why a program ends, and returns its exit code."""
    # Keras colors the messages of errors in layers.
    message = re.sub(r"\x1b\[[\d;]*m", "", str(reason))
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return 1


def quieten() -> None:
    """Hides TFDS's messages for its own authors, and its bars without a terminal."""
    logging.use_absl_handler()
    verbosity = flags.FLAGS["verbosity"]
    if not verbosity.present:
        logging.set_verbosity(logging.WARNING)
        logging.get_absl_logger().addFilter(
            lambda record: "FeatureConnector.dtype" not in record.getMessage()
        )
    if not sys.stderr.isatty():
        # tqdm reads this when it is first imported.
        os.environ.setdefault("TQDM_DISABLE", "1")

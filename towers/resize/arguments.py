"""The arguments of towers.resize."""

import dataclasses
import re
from collections.abc import Sequence

from towers.elastic.requests import Request
from towers.program.flags import command_line
from towers.program.flags.table import argument, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizeOptions:
    """The arguments and flags of towers.resize."""

    model_dir: str = argument("Folder of a run that trains.")
    num_gpus: int | None = flag(
        None,
        "Flags",
        "Number of GPUs to go on with, of those that the run has set up.",
        at_least=1,
    )
    gpu_indices: str | None = flag(
        None,
        "Flags",
        "Their numbers instead, such as 0,2, as of towers train; without a GPU, those "
        "of logical CPUs.",
    )
    split_ratios: str | None = flag(
        None,
        "Flags",
        "Relative size of each tower's part of a batch, such as 2,3. Default: equal "
        "parts.",
    )
    wait_seconds: float = flag(
        60.0, "Flags", "Number of seconds to wait for the run's answer.", above=0
    )


def read(argv: Sequence[str], doc: str) -> tuple[ResizeOptions, Request]:
    """Reads the arguments.

    Args:
        argv: The program's name and its arguments.
        doc: Description of the program.

    Returns:
        The options, and what they ask of the run.

    Raises:
        ValueError: An argument is missing or unknown, or has a bad value.
    """
    options = command_line.read(ResizeOptions, argv, doc)
    return options, _request(options)


def _request(options: ResizeOptions) -> Request:
    indices = _numbers("gpu_indices", options.gpu_indices, 0)
    ratios = _numbers("split_ratios", options.split_ratios, 1)
    count = options.num_gpus
    if (count is None) == (not indices):
        received = "both --num_gpus and" if indices else "neither --num_gpus nor"
        raise ValueError(
            f"Received {received} --gpu_indices; expected one of them, such as "
            "--num_gpus=3."
        )
    if len({*indices}) < len(indices):
        raise ValueError(
            f"Received --gpu_indices={options.gpu_indices}; expected each GPU once."
        )
    return Request.new(num_gpus=count, gpu_indices=indices, split_ratios=ratios)


def _numbers(name: str, text: str | None, least: int) -> tuple[int, ...]:
    if text is None:
        return ()
    if (
        not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text)
        or min(map(int, text.split(","))) < least
    ):
        raise ValueError(
            f"Received --{name}={text}; expected numbers from {least}, such as "
            f"--{name}={least},{least + 1}."
        )
    return tuple(map(int, text.split(",")))

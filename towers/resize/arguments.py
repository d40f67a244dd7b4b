"""The arguments of towers.resize."""

import argparse
import re
from collections.abc import Sequence

from towers._deprecated import rename_flags
from towers.elastic.requests import Request
from towers.program.flags.arguments import Parser
from towers.program.voice import warn

_KNOWN = "num_gpus", "gpu_indices", "split_ratios", "wait_seconds"


def read(argv: Sequence[str], doc: str) -> argparse.Namespace:
    """Reads the arguments, without the program's name.

    Returns:
        `model_dir`, `wait_seconds` and `request`.

    Raises:
        ValueError: One is missing or unknown, or has a bad value.
    """
    argv, notes = rename_flags(argv, _KNOWN)
    for note in notes:
        warn(note)
    parser = Parser("towers.resize", doc)
    parser.add_argument("model_dir", help="Folder of a run that trains.")
    parser.add_argument(
        "--num_gpus",
        metavar="N",
        type=int,
        help="Number of GPUs to go on with, of those that the run has set up.",
    )
    parser.add_argument(
        "--gpu_indices",
        metavar="N,N",
        help="Their numbers instead, as of towers train; without a GPU, those of "
        "logical CPUs.",
    )
    parser.add_argument(
        "--split_ratios",
        metavar="N,N",
        help="Relative size of each tower's part of a batch. Default: equal parts.",
    )
    parser.add_argument(
        "--wait_seconds",
        metavar="S",
        type=float,
        default=60.0,
        help="Number of seconds to wait for the run's answer. Default: 60.",
    )
    options = parser.parse_args(argv)
    if not options.model_dir:
        raise ValueError(
            "Received an empty model_dir; expected the folder of a run that trains."
        )
    options.request = _request(options)
    if not options.wait_seconds > 0:
        raise ValueError(
            f"Received --wait_seconds={options.wait_seconds:g}; expected a positive "
            "number of seconds."
        )
    return options


def _request(options: argparse.Namespace) -> Request:
    indices = _numbers("gpu_indices", options.gpu_indices, 0)
    ratios = _numbers("split_ratios", options.split_ratios, 1)
    count = options.num_gpus
    if (count is None) == (not indices):
        received = "both --num_gpus and" if indices else "neither --num_gpus nor"
        raise ValueError(
            f"Received {received} --gpu_indices; expected one of them, such as "
            "--num_gpus=3."
        )
    if count is not None and count < 1:
        raise ValueError(f"Received --num_gpus={count}; expected at least 1.")
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

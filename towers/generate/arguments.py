"""The arguments of towers.generate."""

import argparse
import math
from collections.abc import Sequence

from towers.predict.arguments import add_model, check_model, preprocessing_of
from towers.program.flags.arguments import Parser


def read(argv: Sequence[str], doc: str) -> argparse.Namespace:
    """Reads the arguments, without the program's name.

    Raises:
        ValueError: If one is missing, unknown or bad.
    """
    parser = Parser("towers.generate", doc)
    add_model(parser)
    parser.add_argument(
        "--prompt",
        default="",
        metavar="TEXT",
        help="Text to continue. Default: none, which starts a new document.",
    )
    parser.add_argument(
        "--max_tokens",
        type=int,
        default=200,
        metavar="N",
        help="Largest number of tokens to write. The end of a document comes "
        "earlier. Default: 200.",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="Divides the logits: low values give likely text, high values varied. 0 "
        "always takes the likeliest token. Default: 0.8.",
    )
    parser.add_argument(
        "--top_k",
        type=int,
        metavar="N",
        help="Draw from the N likeliest tokens only. Default: from all.",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Seed of the random choices. Default: 0.",
    )
    options = parser.parse_args(argv)
    check_model(options)
    _check_numbers(options)
    _check_task(options.model_dir)
    return options


def _check_numbers(options):
    for name, least, most in (
        ("max_tokens", 1, math.inf),
        ("temperature", 0, math.inf),
        ("top_k", 1, math.inf),
        ("seed", 0, 2**32),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value < most:
            expected = "at least" if most == math.inf else f"less than {most}, at least"
            raise ValueError(f"Received --{name}={value}; expected {expected} {least}.")


def _check_task(model_dir):
    """Checks that it is a language model's run; what cannot be read is said later."""
    task = preprocessing_of(model_dir).get("task", "language_model")
    if task != "language_model":
        raise ValueError(
            f"Received {model_dir}, a run with --task={task}; expected one with "
            "--task=language_model, such as of --dataset=text:python."
        )

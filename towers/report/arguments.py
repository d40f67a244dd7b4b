"""The arguments of towers.report."""

import argparse
import importlib.util
from collections.abc import Sequence

from towers.program.extras import install_command
from towers.program.flags.arguments import Parser

# What the page needs beyond what a run needs.
_LIBRARIES = ("jinja2", "matplotlib")


def read(argv: Sequence[str], doc: str) -> argparse.Namespace:
    """Reads the arguments, without the program's name.

    Raises:
        ValueError: If one is missing or unknown, or a library is not installed.
    """
    # Not absl's flags: theirs do not know arguments without a name.
    parser = Parser("towers.report", doc)
    parser.add_argument("model_dir", help="Folder of a run of towers train.")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="File to write the page to. Default: report.html in model_dir.",
    )
    options = parser.parse_args(argv)
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"The report is made with {' and '.join(missing)}, which are not "
            f"installed; run: {install_command('report')}"
        )
    return options

"""The arguments of towers.report."""

import dataclasses
import importlib.util
from collections.abc import Sequence

from towers.program.extras import install_command
from towers.program.flags import command_line
from towers.program.flags.table import argument, flag

# What the page needs beyond what a run needs.
_LIBRARIES = ("jinja2", "matplotlib")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The arguments and flags of towers.report."""

    model_dir: str = argument("Folder of a run of towers train.")
    output: str | None = flag(
        None,
        "Flags",
        "File to write the page to. Default: report.html in model_dir.",
    )


def read(argv: Sequence[str], doc: str) -> ReportOptions:
    """Reads the arguments.

    Args:
        argv: The program's name and its arguments.
        doc: Description of the program.

    Raises:
        ValueError: An argument is missing or unknown, or a library is not installed.
    """
    options = command_line.read(ReportOptions, argv, doc)
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"The report is made with {' and '.join(missing)}, which are not "
            f"installed; run: {install_command('report')}"
        )
    return options

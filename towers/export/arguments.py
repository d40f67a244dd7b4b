"""The arguments of towers.export."""

import dataclasses
import os
from collections.abc import Sequence

from towers.predict import arguments
from towers.program.commands import check_folder
from towers.program.flags import command_line
from towers.program.flags.table import argument


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(arguments.ModelOptions):
    """The arguments and flags of towers.export."""

    # It stands here again to come before OUTPUT on the command line.
    model_dir: str = argument("Folder of a run of towers train.")
    output: str | None = argument(
        "Folder to write the SavedModel to. Default: exported in model_dir.", None
    )

    @property
    def folder(self) -> str:
        """The folder to write to."""
        return self.output or os.path.join(self.model_dir, "exported")


def read(argv: Sequence[str], doc: str) -> ExportOptions:
    """Reads the arguments.

    Args:
        argv: The program's name and its arguments.
        doc: Description of the program.

    Raises:
        ValueError: An argument is missing or unknown, or there is something in the
            way.
    """
    options = command_line.read(ExportOptions, argv, doc)
    arguments.check_model(options)
    if options.output is None and os.path.islink(options.folder):
        raise ValueError(
            f"{options.folder} is a link, which may lead anywhere; expected a folder, "
            "so remove it, or name OUTPUT."
        )
    own = os.path.join(options.folder, "saved_model.pb")
    if os.path.exists(options.folder) and not os.path.exists(own):
        raise ValueError(
            f"{options.folder} is there already and no SavedModel; expected the name "
            "of a new folder."
        )
    check_folder("folder", options.folder, "OUTPUT")
    return options

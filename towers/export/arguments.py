"""The arguments of towers.export."""

import argparse
import os
from collections.abc import Sequence

from towers.predict import arguments
from towers.program.commands import check_folder
from towers.program.flags.arguments import Parser


def read(argv: Sequence[str], doc: str) -> argparse.Namespace:
    """Reads the arguments, without the program's name.

    Raises:
        ValueError: If one is missing or unknown, or there is something in the way.
    """
    parser = Parser("towers.export", doc)
    arguments.add_model(parser)
    parser.add_argument(
        "output",
        nargs="?",
        help="Folder to write the SavedModel to. Default: exported in model_dir.",
    )
    options = parser.parse_args(argv)
    arguments.check_model(options)
    if options.output is None:
        options.output = os.path.join(options.model_dir, "exported")
        if os.path.islink(options.output):
            raise ValueError(
                f"{options.output} is a link, which may lead anywhere; expected a "
                "folder, so remove it, or name OUTPUT."
            )
    own = os.path.join(options.output, "saved_model.pb")
    if os.path.exists(options.output) and not os.path.exists(own):
        raise ValueError(
            f"{options.output} is there already and no SavedModel; expected the name "
            "of a new folder."
        )
    check_folder("folder", options.output, "OUTPUT")
    return options

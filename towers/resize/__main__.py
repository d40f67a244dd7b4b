"""Gives a run that trains other GPUs, between two of its steps.

    python -m towers.resize runs/digits_cnn --num_gpus=3

The run goes on with the same batches, and the same numbers. It has to have set up these
GPUs as it began; see --max_gpus of towers train.
Exit codes: 0 the run goes on with these GPUs; 1 it does not; 130 stopped by Ctrl-C.
"""

import sys
from collections.abc import Sequence

from towers.elastic import requests
from towers.program import object_store
from towers.program.commands import fail
from towers.resize import arguments

_PROGRAM = "towers.resize"


def main(argv: Sequence[str]) -> int:
    """Asks the run, and says what it answers; returns the exit code."""
    try:
        options, request = arguments.read(argv, __doc__)
        model_dir = object_store.working_folder(options.model_dir)
        if not requests.is_running(model_dir):
            raise ValueError(
                f"Received {options.model_dir}, where no run trains; expected the "
                "model_dir of one that does."
            )
        found = requests.ask(model_dir, request, options.wait_seconds)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        return fail(error, _PROGRAM)
    print(found["done"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

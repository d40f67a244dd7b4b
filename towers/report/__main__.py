"""Writes one HTML page about a run, which opens anywhere.

    python -m towers.report runs/digits_cnn

The page is MODEL_DIR/report.html, or the file that --output names. It needs no network
to open. The run may still be going on.
Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.program import startup
    from towers.report import arguments

    startup.begin("towers.report", lambda argv: arguments.read(argv, __doc__))

import dataclasses
import os
import sys
from collections.abc import Sequence

from towers.program import ending, object_store, whole_file
from towers.program.features import feature
from towers.report import arguments
from towers.report.read import read

_PROGRAM = "towers.report"


def main(argv: Sequence[str]) -> int:
    """Writes the report of a run; returns the exit code."""

    def body():
        options = arguments.read(argv, __doc__)
        path = write(options.model_dir, options.output)
        is_local = not object_store.scheme(path)
        size = f": {os.path.getsize(path) / 1000:,.0f} KB" if is_local else ""
        print(f"{path}{size}")

    return ending.run(_PROGRAM, body)


def write(model_dir: str, output: str | None = None) -> str:
    """Writes the report of a run; by default to report.html in the model_dir.

    Returns:
        Where it is.

    Raises:
        ValueError: If there is no run, or the page cannot be written.
        OSError: If a file of the run cannot be read.
    """
    # Its libraries are no part of the core.
    from towers.report import page

    if object_store.scheme(model_dir):
        copy = feature("lifecycle.remote_run").fetched(model_dir)
        try:
            run = dataclasses.replace(read(copy), model_dir=model_dir)
        except ValueError as error:
            raise ValueError(str(error).replace(copy, model_dir)) from error
    else:
        run = read(model_dir)
    text = page.render(run)
    is_named = output is not None
    output = output or os.path.join(model_dir, "report.html")
    try:
        with whole_file.opened(output, follows_link=is_named, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(
            f"Cannot write {output}: {error.strerror}; choose another --output."
        ) from error
    return output


if __name__ == "__main__":
    sys.exit(main(sys.argv))

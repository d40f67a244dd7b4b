"""Tests and measures Towers on the GPUs of this machine.

    python -m scripts.gpu_truth --output=DIR --minutes=9

Each part is a program with a time limit of its own. What it prints and measures is kept
in DIR, in a folder for each part, and DIR/README.md sums it up. Called again with the
same folder, it runs the parts that are missing or have failed. Without a GPU, logical
CPUs stand in, which tries the parts themselves.
"""

import pathlib
import sys
import time

from absl import app, flags

from . import page, parts, run

FLAGS = flags.FLAGS

flags.DEFINE_string("output", None, "Folder for what is found.", required=True)
flags.DEFINE_float("minutes", 9.0, "Most minutes to take.", lower_bound=0.1)
flags.DEFINE_list("parts", None, "Names of the parts to run. Default: all.")
flags.DEFINE_bool("list", False, "List the parts, and run none.")


def main(argv: list[str]) -> None:
    """Runs what is still to be run, and writes the page."""
    end_s = time.monotonic() + 60 * FLAGS.minutes
    machine = run.machine()
    known = parts.of(machine)
    names = FLAGS.parts or [part.name for part in known]
    unknown = sorted({*argv[1:], *(set(names) - {part.name for part in known})})
    if unknown:
        every = ", ".join(part.name for part in known)
        sys.exit(f"Received {', '.join(unknown)}; expected parts from {every}.")
    if FLAGS.list:
        for part in known:
            print(f"{part.name:<28}{part.limit_s:>5} s  {part.about}")
        return
    folder = pathlib.Path(FLAGS.output)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [
        part for part in known if part.name in names and not run.is_done(folder, part)
    ]
    # Parts that measure no time run side by side, first.
    beside = [part for part in wanted if part.beside_others]
    alone = [[part] for part in wanted if not part.beside_others]
    try:
        for group in [beside, *alone]:
            run.run(folder, group, end_s)
    finally:
        page.write(folder, known, machine)
    print(f"What was found is in {folder / 'README.md'}.")


if __name__ == "__main__":
    app.run(main)

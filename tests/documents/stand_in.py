"""Stands in for a program that a page calls: does what `command.deed` decides.

    python -m tests.documents.stand_in NAME ARGUMENTS...

It says on the standard error what it runs, if this differs from the page.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

from tests.documents.command import PROGRAMS, Deed, deed

# Holds the folders of runs that the page resizes.
RESIZED = "TOWERS_DOCUMENTS_RESIZED"
_LOOK_S = 0.1


def install(folder: pathlib.Path) -> None:
    """Writes the stand-ins into a folder, which has to be the first of PATH."""
    folder.mkdir()
    for name in PROGRAMS:
        start = shlex.join([sys.executable, "-m", "tests.documents.stand_in", name])
        (folder / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (folder / name).chmod(0o755)


def main() -> int:
    """Does what is decided for the command line.

    Returns:
        The exit code.
    """
    resized = tuple(os.environ.get(RESIZED, "").split(os.pathsep))
    try:
        done = deed(sys.argv[1:], resized)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"[{shlex.join(done.words)}]", file=sys.stderr, flush=True)
    if done.until:
        return _serve(done)
    if done.expected:
        return _expect(done)
    # Else `mpirun` would find its stand-in.
    _, *others = os.environ["PATH"].split(os.pathsep)
    if program := shutil.which(done.words[0], path=os.pathsep.join(others)):
        os.execv(program, done.words)
    sys.exit(f"{done.words[0]} is not installed here")


def _serve(done: Deed) -> int:
    """Starts a command that never ends; returns once it has said what is waited for."""
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        server = subprocess.Popen(done.words, stdout=file, stderr=subprocess.STDOUT)
    output = pathlib.Path(file.name)
    while True:
        code = server.poll()
        said = re.search(done.until, output.read_text())
        if said or code is not None:
            break
        time.sleep(_LOOK_S)
    print(output.read_text())
    output.unlink()
    if not said:
        print(f"It has ended, with exit code {code}.", file=sys.stderr)
        return code or 1
    if done.ends:
        with urllib.request.urlopen(said[1]) as answer:
            assert answer.status == 200
        server.terminate()
        server.wait()
    return 0


def _expect(done: Deed) -> int:
    """Runs a command, and looks for what its output has to hold."""
    ran = subprocess.run(done.words, capture_output=True, text=True)
    shown = ran.stdout + ran.stderr
    missing = [
        expression
        for expression in done.expected
        if not re.search(expression, shown, re.MULTILINE)
    ]
    # absl exits with 1 after its help.
    if missing or "Traceback" in shown:
        print(shown, f"Not found: {missing}", sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

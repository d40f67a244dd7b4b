"""Runs the Python blocks of a page, one after another, as one program.

    python -m tests.documents.interpreter ORDERS ANSWERS

Reads lines `FILE<TAB>PAGE` from one descriptor, runs the file as a part of the program,
and writes a line to the other descriptor. An error ends it.
"""

import os
import sys
import types


def main() -> None:
    """Runs what it is told to."""
    orders, answers = map(int, sys.argv[1:])
    # Classes of the program belong to this module, as to one that runs by itself.
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    sys.argv[:] = ["program"]
    with open(orders) as lines:
        for line in lines:
            file, page = line.rstrip("\n").split("\t")
            with open(file) as text:
                # Errors, and AutoGraph, find the lines in the page.
                code = compile(text.read(), page, "exec")
            exec(code, vars(program))
            sys.stdout.flush()
            os.write(answers, b"done\n")


if __name__ == "__main__":
    main()

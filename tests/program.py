"""Runs a program that is given as text, as `python -c` does: for `warm.run`."""

import sys

program = sys.argv.pop(1)
exec(program)

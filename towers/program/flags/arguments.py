"""The command line of programs that do without absl, and so without its flags."""

import argparse
import re

from towers.program.flags.suggestions import unknown_flag

# What argparse calls the functions that read values.
_KINDS = {"int": "a whole number", "float": "a number", "_rank": "a number or auto"}
_BAD_VALUE = re.compile(rf"argument (\S+): invalid ({'|'.join(_KINDS)}) value: '(.*)'")


class Parser(argparse.ArgumentParser):
    """A parser that says in one sentence what is wrong.

    Args:
        program: The program's name, such as "towers.doctor".
        doc: What it is for.
    """

    def __init__(self, program: str, doc: str):
        super().__init__(
            prog=f"python -m {program}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_args(self, args, namespace=None):
        """Reads the arguments; flags that do not exist come first."""
        known = [name[2:] for name in self._option_string_actions if name[2:]]
        for arg in args:
            if found := re.match(r"--([^\s=]+)", arg):
                if found[1] not in known:
                    raise ValueError(unknown_flag(found[1], known))
        return super().parse_args(args, namespace)

    def error(self, message: str) -> None:
        """Raises a ValueError."""
        if found := _BAD_VALUE.fullmatch(message):
            flag, kind, value = found.groups()
            raise ValueError(f"Received {flag}={value}; expected {_KINDS[kind]}.")
        raise ValueError(f"{message}; see --help.")

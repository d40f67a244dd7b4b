"""Reads the flags of a program, and prints its help, before TensorFlow is imported."""

import dataclasses
import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

# Logging defines --verbosity.
from absl import flags, logging  # noqa: F401

from towers._deprecated import rename_flags
from towers.program import voice
from towers.program.flags.arguments import unknown_flag

T = TypeVar("T")
Groups = Mapping[str, Iterable[flags.Flag]]


HOSTS = "Hosts"
"""The heading of the flags that `define_hosts` defines."""


OUTPUT = "Output"
"""The heading of the flags that `define_output` defines."""


class NumberOrAuto(flags.IntegerParser):
    """Parses a whole number, or "auto"."""

    syntactic_help = "a whole number, or auto"

    def parse(self, argument: str | int) -> int | str:
        """Returns the number, or "auto"."""
        return argument if argument == "auto" else super().parse(argument)


NUMBER_OR_AUTO = NumberOrAuto(), flags.ArgumentSerializer()
"""The arguments of `flags.DEFINE` for a whole number or "auto"."""


def define_output() -> None:
    """Defines --plot and --json, for programs that print a table."""
    if "plot" not in flags.FLAGS:
        flags.DEFINE_string(
            "plot",
            None,
            "PNG or SVG file to write a chart to (needs matplotlib).",
            module_name=OUTPUT,
        )
        flags.DEFINE_bool(
            "json",
            False,
            "Print one line of JSON instead of a table.",
            module_name=OUTPUT,
        )


def define_hosts() -> None:
    """Defines --hosts, for programs that start hosts."""
    if "hosts" not in flags.FLAGS:
        flags.DEFINE_integer(
            "hosts",
            None,
            "Number of hosts to start on this machine, whose towers train together. "
            "Default: one.",
            lower_bound=1,
            module_name=HOSTS,
        )


def read(
    argv: Sequence[str],
    doc: str,
    groups: Groups,
    more: Groups | None = None,
    values: flags.FlagValues = flags.FLAGS,
    example: str | None = None,
) -> list[str]:
    """Reads a program's flags, or prints its help and exits.

    Args:
        argv: The program's name and its arguments.
        doc: Description of the program, at the top of the help.
        groups: The flags that --help shows, by heading.
        more: The flags that --helpfull shows, by heading; `groups` by default.
        values: The flags, whose values are set.
        example: A flag, for the error about any other argument; `None` if there may
            be others.

    Returns:
        The program's name, and the arguments that are not flags.

    Raises:
        ValueError: A flag is unknown, or has a malformed value; or there is an argument
            that is not a flag; or a file of flags is not text.
        SystemExit: The help was requested.
    """
    help_flags = {
        arg.lstrip("-") for arg in argv[1:] if re.fullmatch("--?h[a-z]*|-[?]", arg)
    }
    if help_flags & {"helpfull", "help_full"}:
        print(help_text(doc, more or groups))
        sys.exit(0)
    if help_flags & {"h", "?", "help", "helpshort"}:
        print(help_text(doc, groups))
        if more:
            print("\n--helpfull shows all flags.")
        sys.exit(0)
    try:
        arguments = values.read_flags_from_files(argv[1:], force_gnu=False)
        arguments, notes = rename_flags(arguments, values)
        for note in notes:
            voice.say(note)
        rest = values([argv[0], *arguments])
    except UnicodeDecodeError as error:
        raise ValueError(_no_text(argv)) from error
    except flags.UnrecognizedFlagError as error:
        raise ValueError(unknown_flag(error.flagname, list(values))) from error
    except flags.IllegalFlagValueError as error:
        raise ValueError(illegal(error, values)) from error
    except flags.Error as error:
        message = str(error).removeprefix("ERROR:: ").rstrip(".")
        raise ValueError(f"{message}; see --help.") from error
    if example is not None and len(rest) > 1:
        raise ValueError(
            f"Received the argument {rest[1]!r}; expected flags only, such as "
            f"{example} (see --help)."
        )
    return rest


def _no_text(argv):
    """Returns an error message for a file of flags that is not text."""
    files = re.findall(r"^--?flagfile[=\n](.*)$", "\n".join(argv), re.M)
    file = next((path for path in files if not _is_text(path)), None)
    received = f"--flagfile={file}, which is no text"
    if file is None:
        received = f"--flagfile={files[-1]}, which names a file that is no text"
    return f"Received {received}; expected one flag in each line, such as --seed=1."


def _is_text(path):
    try:
        with open(os.path.expanduser(path)) as file:
            for _ in file:
                pass
    except UnicodeDecodeError:
        return False
    except OSError:
        pass
    return True


def settings(kind: type[T], values: flags.FlagValues = flags.FLAGS) -> T:
    """Returns flags as a frozen value: a dataclass whose fields have their names."""
    field_values = {
        field.name: values[field.name].value for field in dataclasses.fields(kind)
    }
    return kind(
        **{n: tuple(v) if isinstance(v, list) else v for n, v in field_values.items()}
    )


def below(
    headings: Iterable[str], values: flags.FlagValues = flags.FLAGS
) -> dict[str, list[flags.Flag]]:
    """Returns the flags under some headings of the help."""
    by_module = values.flags_by_module_dict()
    return {heading: by_module[heading] for heading in headings}


_KINDS = {
    NumberOrAuto: "a whole number, or auto",
    flags.IntegerParser: "a whole number",
    flags.FloatParser: "a number",
    flags.BooleanParser: "true or false",
}


def illegal(error: flags.IllegalFlagValueError, values: flags.FlagValues) -> str:
    """Returns an error message for a malformed value, with the expected form."""
    m = re.fullmatch(r"flag --(\w+)=(.*?): (.*)", str(error), re.DOTALL)
    if not m or m[1] not in values:
        return f"{error}; see --help."
    parser = values[m[1]].parser
    expected = next(
        (text for kind, text in _KINDS.items() if isinstance(parser, kind)), ""
    )
    least, most = (getattr(parser, f"{end}_bound", None) for end in ("lower", "upper"))
    if least is not None:
        expected += f" of at least {least}" if most is None else f", {least} to {most}"
    if isinstance(parser, flags.EnumParser):
        expected = f"one of {', '.join(parser.enum_values)}"
        near = difflib.get_close_matches(m[2], parser.enum_values, n=1)
        expected += f" (did you mean {near[0]}?)" if near else ""
    return f"Received --{m[1]}={m[2]}; expected {expected or m[3]}; see --help."


def help_text(doc: str, groups: Groups) -> str:
    """Describes a program and its flags, in lines of 80 characters."""
    lines = [doc.strip()]
    for title, members in groups.items():
        lines += ["", f"{title}:"]
        for flag in members:
            lines += _help_lines(flag)
    return "\n".join(lines)


def _help_lines(flag: flags.Flag) -> list[str]:
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    default, description = flag.default, flag.help
    if isinstance(flag.parser, flags.EnumParser):
        values = flag.parser.enum_values
        description = description.removeprefix(f"<{'|'.join(values)}>: ")  # absl's
        description = f"{', '.join(values)}: {description}"
    if flag.boolean:
        default = "yes" if default else None
    if default not in (None, ""):
        description += f" Default: {default}."
    column = 24
    text = textwrap.wrap(description, 80 - column, break_on_hyphens=False)
    first = f"  {name}"
    if len(first) < column:
        return [
            f"{first:{column}}{text[0]}",
            *(" " * column + line for line in text[1:]),
        ]
    return [first, *(" " * column + line for line in text)]

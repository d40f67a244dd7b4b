"""Reads the flags of a program, and prints its help, before TensorFlow is imported."""

import dataclasses
import difflib
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TypeVar

# Logging defines --verbosity.
from absl import flags, logging  # noqa: F401

from towers.program import voice
from towers.program.flags import old_flags, table
from towers.program.flags.suggestions import unknown_flag
from towers.program.flags.table import About, flag

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFlags:
    """Flags of programs that print a table."""

    plot: str | None = flag(
        None,
        "Output",
        "PNG or SVG file to write a chart to (needs matplotlib).",
        about=About.MAIN,
    )
    json: bool = flag(
        False,
        "Output",
        "Print one line of JSON instead of a table.",
        about=About.MAIN,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostsFlag:
    """The flag of programs that start hosts."""

    hosts: int | None = flag(
        None,
        "Hosts",
        "Number of hosts to start on this machine, whose towers train together. "
        "Default: one.",
        about=About.MAIN,
        at_least=1,
    )


def read(kind: type[T], argv: Sequence[str], doc: str = "") -> T:
    """Reads a program's flags and arguments, or prints its help and exits.

    Args:
        kind: A frozen dataclass, whose fields are made by `flag` and `argument`.
        argv: The program's name and its arguments.
        doc: Description of the program, at the top of the help.

    Returns:
        What was given, with all numbers in their bounds.

    Raises:
        ValueError: A flag is unknown, or has a malformed value; an argument is missing
            or unknown; or a file of flags is not text.
        SystemExit: The help was requested.
    """
    return read_given(kind, argv, doc)[0]


def read_given(
    kind: type[T], argv: Sequence[str], doc: str = "", quiet: bool = False
) -> tuple[T, dict[str, str]]:
    """Reads flags as `read` does; also returns those that were given, by name.

    They are as they were given last, old ones too, and in that order.

    Args:
        kind: See `read`.
        argv: See `read`.
        doc: See `read`.
        quiet: Whether to say nothing of old flags, and to leave --verbosity, which all
            of the process has, as it is.
    """
    values = table.define(kind)
    if not quiet:
        flags.FLAGS["verbosity"].unparse()
        values["verbosity"] = flags.FLAGS["verbosity"]
    _help(kind, argv, doc, values)
    old = old_flags.define(values)
    values.set_gnu_getopt(True)
    try:
        arguments = values.read_flags_from_files([*argv[1:]], force_gnu=False)
        rest = values([argv[0], *arguments])
    except UnicodeDecodeError as error:
        raise ValueError(_no_text(argv)) from error
    except flags.UnrecognizedFlagError as error:
        raise ValueError(unknown_flag(error.flagname, {*values} - {*old})) from error
    except flags.IllegalFlagValueError as error:
        raise ValueError(illegal(error, values)) from error
    except flags.Error as error:
        message = str(error).removeprefix("ERROR:: ").rstrip(".")
        raise ValueError(f"{message}; see --help.") from error
    places = old_flags.order(arguments, values)
    given = {name: values[name].serialize() for name in sorted(places, key=places.get)}
    note = old_flags.move(values, old, arguments)
    if note and not quiet:
        voice.say(note)
    # absl's own logging reads its flag only there.
    flags.FLAGS.mark_as_parsed()
    options = table.value(kind, values, rest[1:])
    table.check_bounds(options)
    return options, given


def _help(kind, argv, doc, values):
    """Prints the help and ends the program, if that is asked for."""
    before = itertools.takewhile(lambda arg: arg != "--", argv[1:])
    asked = {arg.lstrip("-") for arg in before if re.fullmatch("--?h[a-z_]*|-[?]", arg)}
    every = bool(asked & {"helpfull", "help_full"})
    if every or asked & {"h", "?", "help", "helpshort"}:
        print(help_text(doc, kind, values, every))
        sys.exit(0)


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


_KINDS = {
    table.NumberOrAuto: "a whole number, or auto",
    flags.IntegerParser: "a whole number",
    flags.FloatParser: "a number",
    flags.BooleanParser: "true or false",
    flags.ListParser: "values with commas between them, and quotes in pairs",
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
    if isinstance(parser, flags.EnumParser):
        expected = f"one of {', '.join(parser.enum_values)}"
        near = difflib.get_close_matches(m[2], parser.enum_values, n=1)
        expected += f" (did you mean {near[0]}?)" if near else ""
    return f"Received --{m[1]}={m[2]}; expected {expected or m[3]}; see --help."


def help_text(doc: str, kind: type, values: flags.FlagValues, every: bool) -> str:
    """Describes a program and its flags, in lines of 80 characters.

    Args:
        doc: Description of the program.
        kind: The dataclass of its flags.
        values: The flags of `table.define`, and any that all programs have.
        every: Whether to describe all flags. Otherwise, these are the flags about
            `MAIN` of a dataclass with the attribute `has_long_help`, or all of
            another one.
    """
    every = every or not getattr(kind, "has_long_help", False)
    lines = [doc.strip()]
    rows = table.rows(kind)
    if arguments := [name for name, row in rows.items() if not row.heading]:
        lines += ["", "Arguments:"]
        for name in arguments:
            lines += _in_columns(name.upper(), rows[name].text)
    chosen = {
        name: row.heading
        for name, row in rows.items()
        if row.heading and (every or About.MAIN in row.about)
    }
    for title in dict.fromkeys(chosen.values()):
        lines += ["", f"{title}:"]
        for name in [name for name in chosen if chosen[name] == title]:
            lines += _help_lines(values[name])
    if every:
        lines += ["", "Every program:", *_help_lines(values["verbosity"])]
    else:
        lines += ["", "--helpfull shows all flags."]
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
    return _in_columns(name, description)


def _in_columns(name: str, description: str) -> list[str]:
    column = 24
    text = textwrap.wrap(description, 80 - column, break_on_hyphens=False)
    first = f"  {name}"
    if len(first) < column:
        return [
            f"{first:{column}}{text[0]}",
            *(" " * column + line for line in text[1:]),
        ]
    return [first, *(" " * column + line for line in text)]

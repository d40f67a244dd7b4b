"""The flags of a program as fields of a frozen dataclass.

A field says all that is known of a flag: its type, default, bounds and help, and what
the flag is about. The command line, the help, the checks, the documents and whatever
treats many flags alike read these fields, in place of lists of names.
"""

import dataclasses
import enum
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from absl import flags

T = TypeVar("T")
_KEY = "flag"


class About(enum.Flag):
    """What a flag is about; a flag may be about several things, or about none."""

    NOTHING = 0
    MAIN = enum.auto()
    """Most users need it, so --help shows it; --helpfull shows all flags."""
    HOST = enum.auto()
    """Each host may have its own value; all other flags are the same on all hosts."""
    START = enum.auto()
    """What a program does now, which does not describe the run."""
    RUN = enum.auto()
    """How a whole run ends, saves, evaluates and is watched."""
    EXAMPLES = enum.auto()
    """How examples are read, which says nothing where none are read."""
    PATH = enum.auto()
    """Its value is a path of a file or folder."""
    COMPARED = enum.auto()
    """A hyper-parameter by which runs are compared."""


@dataclasses.dataclass(frozen=True)
class FlagInfo:
    """What is known of a flag besides its name, type and default.

    Attributes:
        heading: The heading of the help below which the flag stands; empty for an
            argument without a name.
        text: The help.
        about: What the flag is about.
        at_least: The smallest number that the flag may be; `None` for no bound.
        at_most: The largest number.
        above: A number that the flag must be larger than.
        below: A number that the flag must be smaller than.
        defined_by: Names by which the user's file may define what this flag says.
        repeated: Whether the flag may be given several times, each time with a text.
    """

    heading: str
    text: str
    about: About = About.NOTHING
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    defined_by: tuple[str, ...] = ()
    repeated: bool = False

    def expected(self) -> str:
        """Returns the bounds in words; empty if there are none."""
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least} to {self.at_most}"
        ends = {
            "at least": self.at_least,
            "more than": self.above,
            "less than": self.below,
            "at most": self.at_most,
        }
        return " and ".join(f"{w} {end}" for w, end in ends.items() if end is not None)

    def allows(self, number: float) -> bool:
        """Returns whether a number is finite and within the bounds."""
        return (
            math.isfinite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.at_most is None or number <= self.at_most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


def flag(default: Any, heading: str, text: str, **row: Any) -> Any:
    """Makes a field of a dataclass that is a flag.

    Args:
        default: The flag's default.
        heading: See `FlagInfo`.
        text: See `FlagInfo`.
        **row: Other attributes of `FlagInfo`.
    """
    metadata = {_KEY: FlagInfo(heading, text, **row)}
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


def argument(text: str, default: Any = dataclasses.MISSING) -> Any:
    """Makes a field that takes an argument without a name.

    A field whose type is a tuple takes all arguments that are left.

    Args:
        text: The help.
        default: The value if the argument is left out; without one, it is required.
    """
    metadata = {_KEY: FlagInfo("", text)}
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


def fields(kind: type) -> dict[str, dataclasses.Field]:
    """Returns the flags and arguments of a dataclass by name, those of bases last."""
    by_name = {
        field.name: field
        for field in dataclasses.fields(kind)
        if _KEY in field.metadata
    }
    order = (name for part in kind.__mro__ for name in inspect.get_annotations(part))
    return {name: by_name[name] for name in order if name in by_name}


def rows(kind: type) -> dict[str, FlagInfo]:
    """Returns the rows of a dataclass's flags and arguments, by name."""
    return {name: field.metadata[_KEY] for name, field in fields(kind).items()}


def names(kind: type, about: About) -> tuple[str, ...]:
    """Returns the names of the flags that are about something."""
    return tuple(name for name, row in rows(kind).items() if about in row.about)


def check_bounds(options: Any) -> None:
    """Checks that the numbers among the flags are within their bounds.

    Raises:
        ValueError: One is not.
    """
    for name, row in rows(type(options)).items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        expected = row.expected()
        if expected and not row.allows(value):
            expected = "a number that is finite" if value == math.inf else expected
            raise ValueError(f"Received --{name}={value}; expected {expected}.")


class NumberOrAuto(flags.IntegerParser):
    """Parses a whole number, or "auto"."""

    syntactic_help = "a whole number, or auto"

    def parse(self, argument: str | int) -> int | str:
        """Returns the number, or "auto"."""
        return argument if argument == "auto" else super().parse(argument)


_DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    tuple: flags.DEFINE_list,
}


def define(kind: type) -> flags.FlagValues:
    """Returns absl's flags for the flags of a dataclass, not yet parsed."""
    values = flags.FlagValues()
    for field in fields(kind).values():
        row = field.metadata[_KEY]
        if row.heading:
            _define(field, row.text, {"flag_values": values, "module_name": "towers"})
    return values


def _define(field: dataclasses.Field, text: str, where: Mapping[str, Any]) -> None:
    parts = [part for part in typing.get_args(field.type) if part is not type(None)]
    is_union = typing.get_origin(field.type) in (types.UnionType, typing.Union)
    kind = parts[0] if is_union else field.type
    default = [*field.default] if isinstance(field.default, tuple) else field.default
    if is_union and parts[1:] == [Literal["auto"]]:
        serializer = flags.ArgumentSerializer()
        flags.DEFINE(
            *(NumberOrAuto(), field.name, default, text),
            serializer=serializer,
            **where,
        )
    elif typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        flags.DEFINE_enum(field.name, default, choices, text, **where)
    elif field.metadata[_KEY].repeated:
        flags.DEFINE_multi_string(field.name, default, text, **where)
    else:
        define_one = _DEFINE[typing.get_origin(kind) or kind]
        define_one(field.name, default, text, **where)


def value(kind: type[T], given: flags.FlagValues, arguments: Sequence[str]) -> T:
    """Returns what was parsed as a value of the dataclass.

    Args:
        kind: The dataclass.
        given: The flags of `define`, parsed.
        arguments: The arguments that are no flags, without the program's name.

    Raises:
        ValueError: An argument is missing, or there are too many.
    """
    parsed: dict[str, Any] = {}
    left = [*arguments]
    for name, field in fields(kind).items():
        if field.metadata[_KEY].heading:
            parsed[name] = given[name].value
        elif typing.get_origin(field.type) is tuple:
            parsed[name], left = tuple(left), []
        elif left:
            parsed[name] = left.pop(0)
        missing = field.default is dataclasses.MISSING and not parsed.get(name)
        if missing:
            raise ValueError(
                f"Received no {name.upper()}; expected it: {field.metadata[_KEY].text} "
                "See --help."
            )
    if left:
        raise ValueError(
            f"Received the argument {left[0]!r}; expected {_expected(kind)}; see "
            "--help."
        )
    return kind(
        **{
            name: tuple(one) if isinstance(one, list) else one
            for name, one in parsed.items()
        }
    )


def _expected(kind: type) -> str:
    taken = [name.upper() for name, row in rows(kind).items() if not row.heading]
    return f"flags and {', '.join(taken)} only" if taken else "flags only"


def part_of(kind: type, chosen: Sequence[str]) -> type:
    """Returns a dataclass with some of the flags of another one, to inherit from."""
    every = fields(kind)
    copied = [
        (
            name,
            every[name].type,
            dataclasses.field(
                default=every[name].default,
                metadata=every[name].metadata,
                kw_only=True,
            ),
        )
        for name in chosen
    ]
    return dataclasses.make_dataclass(f"PartOf{kind.__name__}", copied, frozen=True)

"""Formats text for the user: counts, sizes, lists, tables, signals and errors."""

import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterable, Sequence

# Lines of TensorFlow's errors without information, and prefixes of such lines.
_NOISE = "Graph execution error", "Detected at node", "<stack traces", "[[", "File "
# Patterns that TensorFlow adds to error messages.
_MARKS = r"\x1b\[\d*m|\{\{function_node .*?\}\} | \[Op:\w+\]( name:)?"
_NO_BREAK = "\xa0"
_HEADING = r"\x1b\[\d*m|^\(\d+\) \w+:\s*|^\{\{.*?\}\} |graph __inference\S+ "

# From here on, digits are no longer counted: an exponent says how large a number is.
_MANY_DIGITS = 1e12

WIDTH = 100
"""The most characters of a line that a run prints to a file."""


def line_width() -> int:
    """Returns the most characters of a line of standard output.

    A terminal breaks longer lines within words, so its width counts if it is smaller.
    """
    if not sys.stdout.isatty():
        return WIDTH
    return min(shutil.get_terminal_size().columns, WIDTH)


def wrapped(text: str, width: int | None = None) -> str:
    """Wraps each line that is too long, and indents what follows by two more columns.

    A line with an absolute path stays whole, so that it can be copied and searched for.

    Args:
        text: One line, or several.
        width: The most characters of a line; by default those of standard output.
    """
    width = width or line_width()
    return "\n".join(_wrapped(line, width) for line in text.splitlines())


def _wrapped(line, width):
    if len(line) <= width or re.search(r" /(?!device:)", line):
        return line
    indent = line[: len(line) - len(line.lstrip())]
    lines = textwrap.wrap(
        # What is beside a number stays there: its name, and its unit.
        re.sub(r"(?<=\d) |(?<![,;:]) (?=\d)", _NO_BREAK, line),
        width,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_NO_BREAK, " ")


def duration(seconds: float) -> str:
    """Formats a duration, such as "48 s" or "1:05:20"."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    minutes, seconds = divmod(rounded, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def figure(value: float) -> str:
    """Formats a measured value by four significant digits, such as "0.812"."""
    if 1000 <= abs(value) < _MANY_DIGITS:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def rate(a_second: float, noun: str = "examples") -> str:
    """Formats a rate, such as "3,210 examples/sec"."""
    return f"{a_second:,.{0 if a_second >= 10 else 1}f} {noun}/sec"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Formats a count with its noun, such as "1 epoch" or "1,437 examples".

    Args:
        number: The count.
        noun: The noun in the singular.
        plural: The noun in the plural; by default with an "s".
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def counted(number: int | None, noun: str) -> str:
    """Formats a count with its noun, or says that the count is unknown."""
    return f"an unknown number of {noun}s" if number is None else count(number, noun)


def listed(names: Iterable[str], most: int = 10) -> str:
    """Joins names, only the first ones of many, such as "a, b and 9,998 more"."""
    names = [*names]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def all_of(names: Iterable[str], most: int = 8) -> str:
    """Joins names as in a sentence, such as "a, b and c"; only the first of many."""
    names = [*names]
    if len(names) > most:
        names[most - 1 :] = [f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def size(number: float) -> str:
    """Formats a number of bytes, such as "12.5 KB" or "1,024.0 MB"."""
    if number < 2**10:
        return count(int(number), "byte")
    if number < 2**20:
        return f"{number / 2**10:,.1f} KB"
    return f"{number / 2**20:,.1f} MB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows as a Markdown table, aligned to the right; the first is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *rest = [[*map(str.rjust, row, widths)] for row in rows]
    rule = ["-" * (width - 1) + ":" for width in widths]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rest)]


def error_line(error: BaseException, telling: Sequence[str] = ()) -> str:
    """Returns the most informative line of an error; its type if there is none.

    Args:
        error: The error, for example one of TensorFlow.
        telling: Words; a line with one of them is preferred.
    """
    lines = [re.sub(_HEADING, "", line.strip()) for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(_NOISE)]
    preferred = [line for line in lines if any(word in line for word in telling)]
    return next(iter([*preferred, *lines]), type(error).__name__)


def error_sentence(error: BaseException) -> str:
    """Returns the first sentence of an error of Keras, and the call that raised it."""
    lines = re.sub(_MARKS, "", str(error)).splitlines()
    first, *rest = [line.strip() for line in lines if line.strip()] or [repr(error)]
    call = re.match(r"Exception encountered when calling (.+?)\.?$", first)
    sentence = rest[0] if call and rest else first
    sentence = sentence.partition(". ")[0].rstrip(".")
    return f"{call[1]}: {sentence}" if call else sentence


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGTERM, or its number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""Words for the user: numbers with their nouns, signals, and what an error says."""

import re
import signal
from collections.abc import Iterable, Sequence

# Lines of TensorFlow's that say nothing of what is wrong, and beginnings of others.
_NOISE = "Graph execution error", "Detected at node", "<stack traces", "[[", "File "
# What TensorFlow writes around what is wrong.
_MARKS = r"\x1b\[\d*m|\{\{function_node .*?\}\} | \[Op:\w+\]( name:)?"
_HEADING = r"\x1b\[\d*m|^\(\d+\) \w+:\s*|^\{\{.*?\}\} |graph __inference\S+ "


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Says how many there are, such as "1 epoch" or "1,437 examples".

    Args:
        number: How many.
        noun: Of what, for one.
        plural: The same for more; by default with an "s".
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def counted(number: int | None, noun: str) -> str:
    """Says how many there are, or that this is unknown."""
    return f"an unknown number of {noun}s" if number is None else count(number, noun)


def listed(names: Iterable[str], most: int = 10) -> str:
    """Lists names, of many the first ones, such as "a, b and 9,998 more"."""
    names = [*names]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def all_of(names: Iterable[str], most: int = 8) -> str:
    """Lists names as a sentence does, such as "a, b and c"; of many the first ones."""
    names = [*names]
    if len(names) > most:
        names[most - 1 :] = [f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def size(number: float) -> str:
    """Says how many bytes that is, such as "12.5 KB" or "1,024.0 MB"."""
    if number < 2**10:
        return count(int(number), "byte")
    if number < 2**20:
        return f"{number / 2**10:,.1f} KB"
    return f"{number / 2**20:,.1f} MB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Sets rows out in a table in Markdown, to the right; the first is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *rest = [[*map(str.rjust, row, widths)] for row in rows]
    rule = ["-" * (width - 1) + ":" for width in widths]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rest)]


def error_line(error: BaseException, telling: Sequence[str] = ()) -> str:
    """Returns the line of an error that tells most; its type if it has none.

    Args:
        error: Of TensorFlow's, perhaps.
        telling: A line with one of these words comes before all others.
    """
    lines = [re.sub(_HEADING, "", line.strip()) for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(_NOISE)]
    told = [line for line in lines if any(word in line for word in telling)]
    return next(iter([*told, *lines]), type(error).__name__)


def error_sentence(error: BaseException) -> str:
    """Returns the first sentence of an error of Keras's, and the call it came from."""
    lines = re.sub(_MARKS, "", str(error)).splitlines()
    first, *rest = [line.strip() for line in lines if line.strip()] or [repr(error)]
    call = re.match(r"Exception encountered when calling (.+?)\.?$", first)
    said = rest[0] if call and rest else first
    said = said.partition(". ")[0].rstrip(".")
    return f"{call[1]}: {said}" if call else said


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGTERM; others have none but a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

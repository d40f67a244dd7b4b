"""What a check has found; nothing that it raises, or waits for, stops the others."""

import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

OK, NOTE, WRONG = "ok", "note", "wrong"


class Finding(NamedTuple):
    """A verdict and its reasons.

    Attributes:
        verdict: OK, NOTE (worth to know) or WRONG (training fails, or will).
        text: What was found; unless it is OK, what was expected and what to do.
        figures: The same as numbers and names, for the JSON.
        table: Lines to be printed below.
    """

    verdict: str
    text: str
    figures: dict[str, Any]
    table: str = ""


Check = Callable[[], Finding]


def ok(text: str, **figures: Any) -> Finding:
    """All is as it should be."""
    return Finding(OK, text, figures)


def note(text: str, **figures: Any) -> Finding:
    """Training works, but for what the text says."""
    return Finding(NOTE, text, figures)


def wrong(text: str, **figures: Any) -> Finding:
    """Training fails, or will."""
    return Finding(WRONG, text, figures)


def examine(check: Check, limit_s: float = 60.0) -> Finding:
    """Makes a check; a failure of the check itself is a finding, too.

    Args:
        check: The check.
        limit_s: How long it may take; a network's disk that is gone hangs for ever.

    Returns:
        What it has found.
    """
    found = [wrong(f"the check gives nothing within {limit_s:g} s")]

    def work():
        try:
            found.append(check())
        except Exception as error:
            found.append(wrong(f"the check fails: {in_a_line(error)}"))

    # A daemon, since Python waits for others as it ends.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[-1]


def in_a_line(error: BaseException) -> str:
    """An exception's type and the first line of what it says."""
    first, *_ = str(error).strip().splitlines() or [""]
    if first.startswith("Traceback") and error.__context__:
        # As TensorFlow says that a library of its own is missing.
        return in_a_line(error.__context__)
    # The name of TensorFlow's operation, in its own words.
    first = re.sub(r"^\{\{.*?\}\} ", "", first)
    return f"{type(error).__name__}: {first}" if first else type(error).__name__

"""How far something is, is shown once it takes long; of what is soon over, nothing."""

import os
import sys
import threading

import pytest

from tests.terminal import read_all
from towers.program import progress, voice
from towers.program.progress import Progress


class _Time:
    """A clock that goes on as somebody waits, until the end of the work.

    Attributes:
        now: Seconds.
        pauses: How long was waited, each time.
    """

    def __init__(self, *work):
        """Takes what is done after each wait; the last one ends the work."""
        self.now, self.pauses, self._work = 100.0, [], [*work]
        self.done = threading.Event()

    def clock(self):
        return self.now

    def wait(self, event, seconds):
        if not self._work:
            self.done.set()
            return event.wait()
        self.pauses.append(seconds)
        self.now += seconds
        self._work.pop(0)()
        return False


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch):
    monkeypatch.setenv(progress.SWITCH, "1")


def _shown(work, what="Reading labels", total=1000, **options):
    """Has a progress show itself while that much is added after each wait."""
    shown = []
    time = _Time(*(lambda n=n: shown[0].add(n) for n in work))
    shown.append(Progress(what, total, clock=time.clock, wait=time.wait, **options))
    with shown[0]:
        time.done.wait()
    return time


def test_of_what_is_soon_over_nothing_is_said(capsys):
    time = _shown([])
    assert time.pauses == []
    assert capsys.readouterr().err == ""


def test_before_the_first_line_of_a_program_little_time_passes():
    assert _shown([1, 1], silent_s=progress.EARLY_S).pauses == [1, 10]


def test_lines_elsewhere_than_on_a_terminal(capsys):
    time = _shown([250, 500, 250])
    assert time.pauses == [5, 10, 10]
    assert capsys.readouterr().err.splitlines() == [
        "towers: Reading labels: 250 of 1,000 rows, 50 a second, 15 s left.",
        "towers: Reading labels: 750 of 1,000 rows, 50 a second, 5 s left.",
        "towers: Reading labels: 1,000 of 1,000 rows, 40 a second.",
    ]


@pytest.mark.parametrize(
    ("work", "total", "line"),
    [
        ([0], None, "Saving ..."),
        ([0], 1000, "Saving: 0 of 1,000 rows."),
        ([250], None, "Saving: 250 rows, 50 a second."),
        ([1], None, "Saving: 1 rows, 0.2 a second."),
        ([5], 100_000, "Saving: 5 of 100,000 rows, 1.0 a second, 27:46:35 left."),
        ([5], 405, "Saving: 5 of 405 rows, 1.0 a second, 6:40 left."),
    ],
)
def test_what_is_not_known_is_left_out(work, total, line, capsys):
    _shown(work, "Saving", total)
    assert capsys.readouterr().err == f"towers: {line}\n"


def test_a_bar_on_a_terminal_is_drawn_over_itself(monkeypatch):
    reader, writer = os.openpty()
    monkeypatch.setenv("COLUMNS", "70")
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        _shown([250, 750])
        voice.say("Something else.")
    first, second, last = read_all(reader).split("\r\x1b[K")[1:]
    assert (
        first
        == "Reading labels [=====...............] 250 of 1,000 rows, 50 a second, "[:69]
    )
    assert second.startswith("Reading labels [====================] 1,000 of 1,000")
    assert last == f"{second}\r\ntowers: Something else.\r\n"


def test_a_line_takes_the_place_of_a_bar(monkeypatch):
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        voice.draw("a bar")
        voice.say("A line.")
        voice.draw("a bar")
        voice.end_drawn()
        voice.end_drawn()
    assert read_all(reader) == (
        "\r\x1b[Ka bar\r\x1b[Ktowers: A line.\r\n\r\x1b[Ka bar\r\n"
    )


def test_threads_add():
    total = Progress("Reading")
    threads = [threading.Thread(target=_add_thousand, args=[total]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total.done == 8000


def _add_thousand(total):
    for _ in range(1000):
        total.add()


def test_an_error_ends_it():
    with pytest.raises(ValueError, match="bad"), Progress("Reading") as shown:
        raise ValueError("bad")
    assert not shown._thread.is_alive()


def test_what_is_iterated_over():
    assert [*progress.over(iter("abc"), "Reading", 3, "letters")] == ["a", "b", "c"]


def test_the_environment_can_switch_it_off(monkeypatch, capsys):
    monkeypatch.setenv(progress.SWITCH, "0")
    asked = []
    with Progress("Reading", wait=lambda *_: asked.append("a while")) as shown:
        shown.add(3)
    assert shown.done == 3 and not asked
    assert not capsys.readouterr().err

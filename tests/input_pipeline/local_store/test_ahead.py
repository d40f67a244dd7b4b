"""What is announced is fetched before it is asked for, within a bound."""

import concurrent.futures
import threading

import pytest

from tests.limits import HANG_S
from towers.input_pipeline.local_store.ahead import Ahead, Group

A, B = Group("a"), Group("b")


class Fetch:
    """Fetches items of 10 bytes; one that is held waits until it is let go."""

    def __init__(self, *held):
        self.begun, self.done = [], threading.Semaphore(0)
        self.go = {item: threading.Event() for item in held}

    def __call__(self, item):
        self.begun.append(item)
        if item in self.go:
            assert self.go[item].wait(HANG_S)
        self.done.release()
        return str(item).encode().ljust(10)


@pytest.fixture
def ahead():
    made = []

    def make(fetch, most_bytes=1000, threads=4):
        made.append(Ahead(fetch, most_bytes, threads))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait_for(fetch, count):
    for _ in range(count):
        assert fetch.done.acquire(timeout=HANG_S)


def test_fetches_each_once_and_in_order(ahead):
    fetch = Fetch()
    made = ahead(fetch, threads=1)
    for item in range(20):
        made.announce(item, A)
    for item in range(20):
        assert made.get(item) == made.get(item) == str(item).encode().ljust(10)
        made.drop(item)
    assert sorted(fetch.begun) == [*range(20)]


def test_many_at_once(ahead):
    fetch = Fetch(*range(4))
    made = ahead(fetch)
    for item in range(8):
        made.announce(item, A)
    for item in reversed(range(4)):  # all four are under way
        fetch.go[item].set()
        made.get(item)
    wait_for(fetch, 8)


def test_keeps_within_the_bound(ahead):
    fetch = Fetch()
    made = ahead(fetch, most_bytes=50, threads=1)
    made.announce(0, A)
    wait_for(fetch, 1)
    made.get(0)  # what one takes is known now
    for item in range(1, 20):
        made.announce(item, A)
    wait_for(fetch, 4)
    assert len(fetch.begun) == 5
    made.drop(0)
    wait_for(fetch, 1)
    assert len(fetch.begun) == 6


def test_what_is_asked_for_does_not_wait_for_others(ahead):
    fetch = Fetch(0)
    made = ahead(fetch, threads=1)
    for item in range(3):
        made.announce(item, A)
    assert made.get(2) == b"2".ljust(10)
    fetch.go[0].set()
    for item in range(2):
        made.get(item)
    assert fetch.begun.count(2) == 1


def test_an_error_goes_to_who_asks_and_is_forgotten(ahead):
    tries = []

    def fetch(item):
        tries.append(item)
        if len(tries) == 1:
            raise ValueError("gone")
        return b"there"

    made = ahead(fetch)
    with pytest.raises(ValueError, match="gone"):
        made.get(1)
    assert made.get(1) == b"there"


def test_what_nobody_takes_makes_room(ahead):
    """An iterator that was left has announced items that it does not ask for."""
    fetch = Fetch()
    made = ahead(fetch, most_bytes=50, threads=1)
    for item in range(100, 140):
        made.announce(item, A)
    made.announce(0, A)
    for item in range(40):
        made.announce(item + 1, A)
        assert made.get(item)
        made.drop(item)
    assert fetch.begun.count(0) == 1


def test_groups_do_not_take_one_anothers_room(ahead):
    fetch = Fetch()
    made = ahead(fetch, most_bytes=50, threads=1)
    for item in range(5):
        made.announce(item, A)
    wait_for(fetch, 5)
    for item in range(100, 120):
        made.announce(item, B)
    for item in range(100, 120):
        made.get(item)
        made.drop(item)
    for item in range(5):
        made.get(item)
    assert [fetch.begun.count(item) for item in range(5)] == [1] * 5


def epochs_announce(made, *orders):
    for number, items in enumerate(orders):
        for item in items:
            made.announce(item, Group("a", number))


def test_an_epoch_that_began_later_comes_later(ahead):
    fetch = Fetch("held")
    made = ahead(fetch, threads=1)
    made.announce("held", None)
    epochs_announce(made, range(5), range(10, 15))
    made.announce(5, Group("a", 0))
    fetch.go["held"].set()
    wait_for(fetch, 12)
    assert fetch.begun[1:] == [*range(6), *range(10, 15)]


def test_an_item_of_two_epochs_is_at_hand_in_both(ahead):
    fetch = Fetch()
    made = ahead(fetch, threads=1)
    epochs_announce(made, range(5), reversed(range(5)))
    wait_for(fetch, 10)
    for item in range(5):
        made.get(item)
        made.drop(item)
    for item in reversed(range(5)):
        made.get(item)
        made.drop(item)
    assert len(fetch.begun) == 10


def test_epochs_that_were_left_make_room(ahead):
    fetch = Fetch()
    made = ahead(fetch, most_bytes=60, threads=1)
    for epoch in range(5):
        for place in range(9):
            made.announce((epoch, place), Group("a", epoch))
        while [item[0] for item in fetch.begun].count(epoch) < 2:
            wait_for(fetch, 1)


def test_a_later_epoch_takes_what_the_first_one_leaves(ahead):
    fetch = Fetch("held")
    made = ahead(fetch, most_bytes=90, threads=1)
    made.get("size")
    made.drop("size")
    made.announce("held", None)
    epochs_announce(made, range(7), range(10, 20), range(20, 30))
    fetch.go["held"].set()
    # Seven of nine, and a third of them for each epoch behind.
    wait_for(fetch, 2 + 7 + 3 + 3)
    assert fetch.begun[2:] == [*range(7), *range(10, 13), *range(20, 23)]


def test_who_waits_while_it_is_closed_is_answered(ahead):
    """Also behind items of an epoch that was left, which are still being fetched."""
    fetch = Fetch((0, 0), (0, 1))
    made = ahead(fetch, threads=2)
    epochs_announce(made, *([(epoch, 0), (epoch, 1)] for epoch in range(4)))
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waits = threads.submit(made.get, (1, 0))
        while (1, 0) not in fetch.begun:
            wait_for(fetch, 1)
        closes = threads.submit(made.close)
        with pytest.raises(concurrent.futures.TimeoutError):
            closes.result(0.2)
        for go in fetch.go.values():
            go.set()
        closes.result(HANG_S)
        assert waits.result(HANG_S) == b"(1, 0)".ljust(10)


def test_who_comes_when_it_is_closed_is_told(ahead):
    made = ahead(Fetch())
    made.close()
    made.announce(0, A)
    with pytest.raises(ValueError, match="the local store is closed"):
        made.get(0)
    made.drop(0)


def test_one_asks_on_when_threads_can_have_no_more(ahead):
    """As where Python ends, which they are told first."""
    fetch = Fetch("held")
    made = ahead(fetch, threads=1)
    made.announce("held", None)
    made.announce(0, A)
    made._threads.shutdown(wait=False)
    fetch.go["held"].set()
    assert [made.get("held"), made.get(0)] == [b"held".ljust(10), b"0".ljust(10)]


def test_a_fetch_of_an_epoch_that_was_left_takes_a_thread(ahead):
    """Whoever asks for an item fetches it, and does not queue up behind the others."""
    fetch = Fetch("held 0", "held 1")
    made = ahead(fetch, threads=2)
    for item in fetch.go:
        made.announce(item, Group("a", 0))
    for epoch in range(1, 4):
        made.announce(epoch, Group("a", epoch))
    assert made.get(1) == b"1".ljust(10)
    for go in fetch.go.values():
        go.set()

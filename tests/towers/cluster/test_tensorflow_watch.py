"""The news of hosts; a dict stands in for TensorFlow's coordination service."""

import json
import threading
import time

import pytest
import tensorflow as tf

from tests.limits import HANG_S
from towers.cluster import tensorflow_watch
from towers.cluster.tensorflow_watch import SILENT_S, HostWatch, difference, lost_by
from towers.hosts.group import HostFailedError, HostsDifferError

NAMES = ["host 0", "host 1", "host 2"]


class _Values:
    """What `keras_adapter.cluster` has of the coordination service."""

    ERRORS = (tf.errors.UnavailableError, tf.errors.AbortedError)

    def __init__(self):
        self.values, self.reports, self.is_lost = {}, [], False
        self.silent, self.answers = [], threading.Event()
        self.answers.set()
        self.changed = threading.Condition()

    def write(self, key, value):
        self.answers.wait()
        with self.changed:
            if key in self.values:
                return False
            self.values[key] = value
            self.changed.notify_all()
            return True

    def read(self, key, seconds):
        with self.changed:
            self.changed.wait_for(lambda: self.is_lost or key in self.values, seconds)
            if self.is_lost:
                raise tf.errors.UnavailableError(None, None, "Socket closed")
            return self.values.get(key)

    def report(self, message):
        self.reports.append(message)

    def lost(self, tasks):
        assert tasks == len(NAMES)
        return self.silent


@pytest.fixture
def values(monkeypatch):
    made = _Values()
    monkeypatch.setattr(tensorflow_watch, "cluster", made)
    monkeypatch.setattr(tensorflow_watch, "_LOOK_S", 0.02)
    monkeypatch.setattr(tensorflow_watch, "_SILENT_LOOKS", 10**9)
    return made


@pytest.fixture
def hosts(values):
    watches = [HostWatch(rank, NAMES) for rank in range(3)]
    for watch in watches:
        watch.start()
    yield watches
    for watch in watches:
        watch.close()


@pytest.fixture
def ended(monkeypatch):
    """Returns how processes have ended themselves, instead of ending this one."""
    ends = []
    monkeypatch.setattr(tensorflow_watch, "_end", lambda *how: ends.append(how))
    return ends


def wait_until(condition):
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def closed(rank):
    text = f"Socket closed\nfrom remote target /job:worker/replica:0/task:{rank} while"
    return tf.errors.UnavailableError(None, None, text)


@pytest.mark.parametrize(
    ("text", "rank", "words"),
    [
        (str(closed(2)), 2, "has ended, or is cut off"),
        (
            "The following tasks are unhealthy (stopped sending heartbeats):\n"
            "/job:worker/replica:0/task:1\nThe tasks have crashed.",
            1,
            f"has not been heard for {SILENT_S:.0f} s",
        ),
        (
            "Deadline Exceeded\nRPC: /tensorflow.CoordinationService/Heartbeat",
            0,
            f"{SILENT_S:.0f} s",
        ),
    ],
)
def test_errors_of_tensorflow_name_the_lost_host(text, rank, words):
    lost = lost_by(text)
    assert lost[0] == rank and words in lost[1]


def test_other_errors_name_no_host():
    assert lost_by("Incompatible shapes: [2] vs. [3]") is None


def test_all_hear_who_has_failed_first(hosts, values):
    failure = hosts[1].explain(closed(2))
    assert failure == "host 2 has ended, or is cut off from the others"
    wait_until(lambda: all(watch.failure for watch in hosts))
    # What a host notices later changes nothing.
    assert hosts[0].explain(closed(1)) == failure
    assert {watch.failure for watch in hosts} == {failure}
    assert {*map(lost_by, values.reports)} == {
        (2, "has ended, or is cut off from the others")
    }
    assert all(isinstance(watch.broken, HostFailedError) for watch in hosts)


def test_an_error_of_the_user_has_no_other_cause(hosts):
    assert hosts[0].explain(ValueError("mine")) is None
    assert hosts[0].explain(tf.errors.UnavailableError(None, None, "a file")) is None
    assert hosts[0].failure is None


def test_the_end_of_the_first_host(hosts, values):
    values.is_lost = True
    wait_until(lambda: hosts[1].failure and hosts[2].failure)
    assert hosts[1].failure == "host 0 has ended, or is cut off from the others"
    assert hosts[0].failure is None


def test_a_silent_host_is_noticed_without_a_collective(hosts, values):
    values.silent = [2]
    wait_until(lambda: hosts[0].failure and hosts[1].failure)
    assert hosts[1].failure.startswith(
        f"host 2 has not been heard for {SILENT_S:.0f} s"
    )


def test_a_program_that_has_ended_may_be_silent(hosts, values):
    assert not hosts[2].finish(0.01)
    assert len(hosts[0].ask(HANG_S)) == 3  # all have heard of it
    values.silent = [2]
    assert len(hosts[0].ask(HANG_S)) == 3
    assert hosts[0].failure is None


def test_a_first_host_that_answers_nothing_is_noticed(hosts, values, monkeypatch):
    """TensorFlow would wait for it for ever."""
    monkeypatch.setattr(tensorflow_watch, "_SILENT_LOOKS", 3)
    values.answers.clear()
    try:
        wait_until(lambda: hosts[1].failure and hosts[2].failure)
    finally:
        values.answers.set()
    assert hosts[2].failure.startswith(
        f"host 0 has not been heard for {SILENT_S:.0f} s"
    )
    assert hosts[0].failure is None and values.reports == []


def test_whoever_waits_for_a_host_that_has_left_hears_why(hosts, monkeypatch):
    monkeypatch.setattr(tensorflow_watch, "_LEFT_S", 0.1)
    for watch in hosts:
        watch.enter()
    hosts[2].leave(ValueError("no data"))
    wait_until(lambda: hosts[0].failure and hosts[1].failure)
    why = "host 2 has left what the others are in: ValueError: no data"
    assert hosts[0].failure == why


def test_all_may_leave_by_an_error_and_go_on(hosts, monkeypatch):
    monkeypatch.setattr(tensorflow_watch, "_LEFT_S", 0.1)
    for _ in range(2):
        for watch in hosts:
            watch.enter()
        for watch in hosts:
            watch.leave(ValueError("no data"))
    for watch in hosts:
        watch.enter()
        watch.leave(None)
    # All hear of what is told last, after all that was told before.
    assert all(len(watch.ask(HANG_S)) == 3 for watch in hosts)
    assert not any(watch.failure for watch in hosts)


def test_programs_that_end_together_are_no_failure(hosts):
    ends = [threading.Thread(target=watch.finish, args=[HANG_S]) for watch in hosts[1:]]
    for end in ends:
        end.start()
    assert hosts[0].finish(HANG_S)
    for end in ends:
        end.join()
    assert not any(watch.failure for watch in hosts)


def test_a_program_that_ends_while_others_train(hosts, monkeypatch):
    monkeypatch.setattr(tensorflow_watch, "_LEFT_S", 0.1)
    hosts[0].enter()
    assert not hosts[1].finish(0.01)
    wait_until(lambda: hosts[0].failure)
    assert "its program has ended" in hosts[0].failure


def test_a_program_that_fails_between_calls_ends_who_waits_for_it(hosts, monkeypatch):
    """As where one host finds no data before it makes its model."""
    monkeypatch.setattr(tensorflow_watch, "_LEFT_S", 0.1)
    error = FileNotFoundError("no data")
    monkeypatch.setattr(tensorflow_watch.sys, "last_value", error, raising=False)
    hosts[0].begin("the variables")
    assert not hosts[1].finish(0.01)
    wait_until(lambda: hosts[0].failure)
    assert hosts[0].failure.endswith("FileNotFoundError: no data")


def test_an_error_of_an_earlier_call_is_not_why_a_program_has_ended(hosts, monkeypatch):
    monkeypatch.setattr(tensorflow_watch, "_LEFT_S", 0.1)
    hosts[1].enter()
    hosts[1].leave(ValueError("of the first call"))
    for _ in range(2):
        hosts[0].enter()
    assert not hosts[1].finish(0.01)
    wait_until(lambda: hosts[0].failure)
    assert hosts[0].failure.endswith("its program has ended")


def test_the_end_of_a_program_waits_for_no_lost_first_host(
    hosts, values, ended, monkeypatch
):
    """As where the first host is stopped by SIGSTOP."""
    monkeypatch.setattr(tensorflow_watch, "_SILENT_LOOKS", 3)
    values.answers.clear()
    try:
        wait_until(lambda: hosts[1].failure and hosts[2].failure)
        assert not hosts[1].finish(HANG_S)
    finally:
        values.answers.set()


def test_a_first_host_that_stops_while_a_program_ends(values, ended, monkeypatch):
    monkeypatch.setattr(tensorflow_watch, "_SILENT_LOOKS", 3)
    monkeypatch.setattr(tensorflow_watch, "_END_S", 0.05)
    host = HostWatch(1, NAMES)
    host.start()
    values.answers.clear()
    finishing = threading.Thread(target=host.finish, args=[HANG_S])
    finishing.start()
    try:
        wait_until(lambda: ended)
    finally:
        values.answers.set()
    finishing.join()
    host.close()
    assert ended == [(f"{host.failure}; this host ends.", 75)]


def test_a_program_that_ends_while_others_wait_between_calls(hosts, monkeypatch):
    """Such as for a value that all hosts exchange before `fit`."""
    monkeypatch.setattr(tensorflow_watch, "_LEFT_S", 0.1)
    assert not hosts[1].finish(0.01)
    hosts[0].begin("what each host tells")
    wait_until(lambda: hosts[0].failure)
    assert "its program has ended" in hosts[0].failure


def test_news_come_even_if_there_is_nothing_new(hosts, values, monkeypatch):
    """TensorFlow keeps all that reads in vain have left until there is a value."""
    monkeypatch.setattr(tensorflow_watch, "_NOTHING_NEW_S", 0.01)
    wait_until(lambda: "news/3" in values.values)
    assert not any(watch.failure for watch in hosts)


def test_an_answer_is_of_one_call(values):
    """The program goes on while a thread answers."""

    class GoesOn(HostWatch):
        @property
        def doing(self):
            self._count += 1
            return f"call {self._count}", 0.0, self._count

        @doing.setter
        def doing(self, value):
            self._count = 0

    host = GoesOn(0, NAMES)
    host._starts = True
    host._hear({"host": 1, "ask": True})
    answer = json.loads(values.values["news/0"])
    assert answer["purpose"] == f"call {answer['count']}"


def test_hosts_say_what_they_do(hosts):
    for rank, watch in enumerate(hosts):
        watch.describe = lambda rank=rank: ["train", f"step {rank}"]
    answers = hosts[1].ask(HANG_S)
    assert answers == {rank: ["train", f"step {rank}"] for rank in range(3)}


def test_a_host_that_waits_long_finds_who_is_elsewhere(hosts, ended, monkeypatch):
    monkeypatch.setattr(tensorflow_watch, "_LEFT_S", 0.1)
    hosts[0].begin("the train step")
    hosts[1].begin("the test step")
    wait_until(lambda: ended)
    text, code = ended[0]
    assert "exchanges the t" in text and "has to run" not in text and code == 1
    broken = [watch.broken for watch in hosts[:2] if watch.broken]
    assert all(isinstance(error, HostsDifferError) for error in broken)
    assert hosts[2].broken is None


def test_a_collective_inside_of_a_call_leaves_the_host_in_the_call(hosts):
    """As the first step is made, hosts exchange values."""
    assert hosts[0].begin("the train step") is None
    call = hosts[0].doing
    hosts[0].end(hosts[0].begin("the variables"))
    assert hosts[0].doing == call
    hosts[0].end()
    assert hosts[0].doing is None


def answer(*collectives, count=None, purpose=None):
    return {"collectives": collectives, "count": count, "purpose": purpose}


@pytest.mark.parametrize(
    ("own", "other", "pair"),
    [
        (answer("a", "b"), answer("a", "b"), None),
        # One of them has not yet come so far.
        (answer("a", "b"), answer("a"), None),
        (answer("a", "b"), answer("a", "c"), ("b", "c")),
        (answer(count=3, purpose="train"), answer(count=2, purpose="test"), None),
        (
            answer(count=3, purpose="train"),
            answer(count=3, purpose="test"),
            ("train", "test"),
        ),
        (answer(count=3, purpose="train"), answer(), None),
    ],
)
def test_hosts_differ_in_the_first_collective_that_is_not_the_same(own, other, pair):
    assert difference(own, other) == pair


def test_who_does_not_end_is_ended(values, ended, monkeypatch):
    monkeypatch.setattr(tensorflow_watch, "_END_S", 0.05)
    host = HostWatch(0, NAMES)
    host.enter()
    host.explain(closed(1))
    wait_until(lambda: ended)
    assert ended == [(f"{host.failure}; this host ends.", 75)]

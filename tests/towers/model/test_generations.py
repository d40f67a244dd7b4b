"""Fitting in one generation of hosts after another: what is taken for a lost host."""

import contextlib
from unittest import mock

import pytest

from towers.cluster import process_group
from towers.hosts import group
from towers.hosts.group import HostsChange, HostsDifferError, Membership
from towers.model import generations


class Update:
    """Stands in for a `Program`."""

    model = None

    def __init__(self):
        self.why, self.state_lost = [], False
        self.builder = mock.Mock()
        parts = self.builder.pieces.store.hosts_parts
        parts.lose.return_value, parts.take_home.return_value = True, False

    def is_of_hosts(self, membership):
        return False

    def follow_hosts(self, why, functions):
        self.why.append(why)
        return functions


@pytest.fixture
def hosts(monkeypatch):
    """Returns what may be set: whether the present hosts cannot go on together."""
    state = {"broken": False, "joins": 0, "others": {}}

    def join_next(steps):
        state["joins"] += 1
        state["broken"] = False

    def joined():
        pids = [1, *state["others"].get(state["joins"], [])]
        names = tuple(f"host {rank} (n, pid {pid})" for rank, pid in enumerate(pids))
        return Membership(0, ("a:1",) * len(pids), names) if state["joins"] else None

    for name, value in (
        ("joined", joined),
        ("change", lambda: None),
        ("is_broken", lambda: state["broken"]),
        ("together", contextlib.nullcontext),
    ):
        monkeypatch.setattr(group, name, value)
    monkeypatch.setattr(process_group, "join_next", join_next)
    monkeypatch.setattr(generations, "steps_done", lambda model: 0)
    return state


def fit(update, *errors):
    """Fits; each call raises one of the errors, or makes it, but for the last one."""
    left = [*errors]

    def run():
        if left:
            error = left.pop(0)
            raise error() if callable(error) else error
        return "history"

    return generations.fit(update, lambda change: change({}), run, lambda: None)


def test_a_host_is_lost(hosts):
    def broken():
        hosts["broken"] = True
        return ConnectionError("host 1 has gone")

    update = Update()
    assert fit(update, broken) == "history"
    assert hosts["joins"] == 2
    assert update.why == ["", "host 1 has gone"]
    update.builder.pieces.store.hosts_parts.lose.assert_called_once_with()


def test_hosts_agree_on_a_change(hosts):
    update = Update()
    assert fit(update, HostsChange()) == "history"
    assert update.why[1] == "another host has heard of a change"


def test_the_users_own_connections_are_no_hosts(hosts):
    with pytest.raises(ConnectionError, match="the monitoring server"):
        fit(Update(), ConnectionError("the monitoring server"))
    assert hosts["joins"] == 1


DIFFER = HostsDifferError("Host 1 was given epochs=3.")


def test_who_comes_with_something_else_ends_and_the_others_go_on(hosts):
    # They come one after another, and the last one is as the others are.
    hosts["others"] = {2: [7], 4: [8], 5: [9]}
    update = Update()
    errors = HostsChange(), DIFFER, HostsChange(), DIFFER
    assert fit(update, *errors) == "history"
    assert hosts["joins"] == 5
    assert update.why[2] == update.why[4] == str(DIFFER)


def test_hosts_that_differ_as_they_begin_end(hosts):
    hosts["others"] = {1: [7]}
    with pytest.raises(HostsDifferError):
        fit(Update(), DIFFER)


def test_hosts_that_differ_though_nobody_has_come_end(hosts):
    hosts["others"] = {1: [7, 8], 2: [8]}
    with pytest.raises(HostsDifferError):
        fit(Update(), HostsChange(), DIFFER)

"""Which host holds up the others, as hosts tell one another with each batch."""

import numpy as np
import pytest
import tensorflow as tf

from towers.collectives.world import Alone
from towers.loop.host_times import TOLD, HostTimes, HostTotals
from towers.loop.timers import StepTimers, Totals
from towers.monitoring.bottleneck import hosts
from towers.monitoring.step_time import Split

PARTS = HostTotals._fields


class Hosts(Alone):
    count, names = 3, ("host 0", "host 1 (b)", "host 2")
    communicator = type("Communicator", (), {})()


def told(**ms):
    """What a host tells of a step: milliseconds of its parts; the others are 1."""
    row = {name: 0.001 for name in PARTS[:TOLD]} | {"steps": 1.0, "share": 0.25}
    return [*(row | {f"{name}_s": each / 1000 for name, each in ms.items()}).values()]


def heard(*steps):
    times = HostTimes(Hosts(), 0.25)
    for rows in steps:
        times.hear(tf.constant(rows, tf.float32))
    times.bytes = 2**21
    return times


def test_a_host_that_is_late_is_named_with_its_reason():
    late = told(input=31, sum=2)
    others = told(input=1, sum=32)
    times = heard([others, late, others], [others, late, others])
    said = hosts.finding(times, times.totals()).text
    assert said == (
        "hosts: host 1 (b) holds up the others for 30.0 ms of a step of 36.0: it "
        "waits for input 30.0 ms longer than the others; adding 2.0 MB over 3 hosts "
        "takes 2.0 ms (1,000 MB/s)"
    )
    for part, why in (("compute", "computes"), ("copy", "copies to its towers")):
        times = heard([told(**{part: 50, "sum": 3}), *[told(sum=52)] * 2])
        assert (
            f"host 0 holds up the others for 49.0 ms of a step of 56.0: it {why}"
            in (hosts.finding(times, times.totals()).text)
        )


def test_hosts_that_are_late_in_turn():
    late, other = told(compute=30, sum=2), told(compute=1, sum=31)
    steps = [[late, other, other], [other, late, other], [other, other, late]]
    times = heard(*steps)
    said = hosts.finding(times, times.totals()).text
    assert "each holds up the others in turn, for 29.0 ms of a step of 35" in said
    times = heard([told(sum=2)] * 3)
    said = hosts.finding(times, times.totals()).text
    assert "none holds up the others in a step of 6.0 ms" in said
    assert hosts.finding(times, []) is None
    assert hosts.finding(times, HostTimes(Hosts(), 1.0).totals()) is None


def test_lines_and_scalars_of_each_host(monkeypatch):
    times = heard([told(sum=2), told(sum=5), told(sum=5)])
    first, second, _ = hosts.lines(times, times.totals(), rate=1000.0)
    assert first.startswith("host 0: 250 examples/sec, waits for others 0.0 ms of a")
    assert "waits for others 3.0 ms" in second
    found = hosts.scalars(times, times.totals())
    assert found["step_ms/host_1/waits_for_others"] == pytest.approx(3.0)
    assert found["step_ms/host_0/holds_up_others"] == pytest.approx(3.0)
    assert found["hosts/mb_per_sec"] == pytest.approx(1000.0)
    # One that has told nothing yet has no line.
    _, *others = times.totals()
    silent = HostTotals(*[0.0] * len(PARTS))
    assert len(hosts.lines(times, [silent, *others], rate=None)) == 2
    monkeypatch.setattr(HostTimes, "latency_s", 0.0005)
    assert (
        "(1,000 MB/s; 16 bytes take 0.5)" in hosts.finding(times, times.totals()).text
    )


def test_the_parts_of_a_step_with_hosts_add_up_to_it():
    rows = [told(sum=12), told(sum=4), told(sum=10)]
    times = heard(rows)
    totals = Totals(1, 0.001, 0.002, 0.003, 0.015, (0.003,))
    parts = Split(totals, 0.025, times.totals(), 0).parts_ms
    assert parts["network"] == pytest.approx(4, rel=1e-3)
    assert parts["hosts"] == pytest.approx(8, rel=1e-3)
    assert parts["reduce"] == pytest.approx(3, rel=1e-3)
    assert sum(parts.values()) == pytest.approx(25)
    # Of one host, they are as ever.
    parts = Split(totals, 0.025).parts_ms
    assert [*parts] == ["input", "copy", "compute", "reduce", "python"]


def test_a_step_is_noted_and_told():
    times = HostTimes(Hosts(), 0.5)
    timers = StepTimers(1, times)

    @tf.function
    def step(x):
        fetched = tf.zeros([1, 3], tf.float64)
        with timers.step(x, [x], ["/device:CPU:0"], fetched) as (local,):
            gradient = [local * 2]
            timers.computed([gradient])
            begun, total = timers.begin_sum(gradient), gradient[0] + 1
            timers.end_sum(begun, [total])
            return total

    for _ in range(2):
        step(tf.ones([4]))
    row = times.latest().numpy()
    assert row.shape == (TOLD,) and row[0] == 1 and row[-1] == 0.5
    assert np.all(row[1:-1] >= 0) and np.all(row[1:-1] < 10)
    assert times.bytes == 16

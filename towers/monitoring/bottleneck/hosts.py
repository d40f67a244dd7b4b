"""Reports which of several hosts holds up the others, why, and the cost of adding."""

from collections.abc import Sequence

from towers.loop.host_times import HostTimes, HostTotals
from towers.monitoring.bottleneck.verdict import SpeedFinding
from towers.program import words

# As a fraction of a step: a host that is this much later holds up the others.
_LATE = 0.05
# As a fraction of the time that any host is late: below, hosts are late in turn.
_MOSTLY = 0.6
# For each part of `HostTotals`, what a late host does.
_WHY = {
    "input_s": "waits for input",
    "copy_s": "copies to its towers",
    "compute_s": "computes",
    "reduce_s": "adds its own gradients and updates",
    "between_s": "is between steps (callbacks, evaluation, checkpoints)",
}
_TAGS = {
    "input": "input_s",
    "copy": "copy_s",
    "compute": "compute_s",
    "reduce": "reduce_s",
    "between": "between_s",
}


def finding(times: HostTimes, hosts: Sequence[HostTotals]) -> SpeedFinding | None:
    """Reports which host holds up the others, and what adding over hosts costs.

    Args:
        times: The `HostTimes` of a builder.
        hosts: The totals of each host over some steps; without any, returns `None`.
    """
    if not hosts or not min(host.steps for host in hosts):
        return None
    step_ms = max(map(_step_ms, hosts))
    late = [_ms(host, "late_s") for host in hosts]
    latest = max(range(len(hosts)), key=late.__getitem__)
    if sum(late) < _LATE * step_ms:
        clause = f"none holds up the others in a step of {step_ms:,.1f} ms"
    elif late[latest] < _MOSTLY * sum(late):
        clause = (
            f"each holds up the others in turn, for {sum(late):,.1f} ms of a step of "
            f"{step_ms:,.1f}"
        )
    else:
        clause = (
            f"{times.names[latest]} holds up the others for {late[latest]:,.1f} ms of "
            f"a step of {step_ms:,.1f}: {_why(hosts, latest)}"
        )
    return SpeedFinding(f"hosts: {clause}; {_of_network(times, hosts)}")


def _why(hosts, latest):
    """Explains what a host does for longer than the others, and by how much."""

    def others_ms(part):
        times_ms = [_ms(host, part) for k, host in enumerate(hosts) if k != latest]
        return sum(times_ms) / len(times_ms)

    longer = {part: _ms(hosts[latest], part) - others_ms(part) for part in _WHY}
    part = max(longer, key=longer.__getitem__)
    others = "the other" if len(hosts) == 2 else "the others"
    return f"it {_WHY[part]} {longer[part]:,.1f} ms longer than {others}"


def _of_network(times, hosts):
    network_ms = _ms(hosts[0], "network_s")
    size = words.size(times.bytes) if times.bytes else "gradients"
    notes = []
    if times.bytes and network_ms:
        notes.append(f"{1000 * times.bytes / network_ms / 2**20:,.0f} MB/s")
    if times.latency_s:
        notes.append(f"16 bytes take {1000 * times.latency_s:,.1f}")
    noted = f" ({'; '.join(notes)})" if notes else ""
    return f"adding {size} over {len(hosts)} hosts takes {network_ms:,.1f} ms{noted}"


def lines(
    times: HostTimes, hosts: Sequence[HostTotals], rate: float | None
) -> list[str]:
    """Describes what each host does, in a line each.

    Args:
        times: The `HostTimes` of a builder.
        hosts: The totals of each host.
        rate: Examples per second of all hosts, if known.
    """
    texts = []
    for name, host in zip(times.names, hosts, strict=True):
        if not host.steps:
            continue
        parts = []
        if rate is not None:
            parts.append(words.rate(rate * host.share / host.steps))
        waits = _ms(host, "sum_s") - _ms(host, "network_s")
        parts.append(f"waits for others {waits:,.1f} ms of a step")
        parts += [f"{why} {_ms(host, part):,.1f}" for part, why in _WHY.items()]
        texts.append(f"{name}: {', '.join(parts)}")
    return texts


def scalars(times: HostTimes, hosts: Sequence[HostTotals]) -> dict[str, float]:
    """Returns the times of hosts in a step, by tag, for TensorBoard."""
    values = {}
    if not hosts or not min(host.steps for host in hosts):
        return values
    for k, host in enumerate(hosts):
        for tag, part in _TAGS.items():
            values[f"step_ms/host_{k}/{tag}"] = _ms(host, part)
        waits = _ms(host, "sum_s") - _ms(host, "network_s")
        values[f"step_ms/host_{k}/waits_for_others"] = waits
        values[f"step_ms/host_{k}/holds_up_others"] = _ms(host, "late_s")
    network_ms = _ms(hosts[0], "network_s")
    values["hosts/latency_ms"] = 1000 * times.latency_s
    if network_ms:
        values["hosts/mb_per_sec"] = 1000 * times.bytes / network_ms / 2**20
    return values


def _ms(host, part):
    return 1000 * getattr(host, part) / host.steps


def _step_ms(host):
    """Returns a step's time from its batch on, as an evaluation may run in between."""
    parts = [part for part in (*_WHY, "sum_s") if part != "between_s"]
    return sum(_ms(host, part) for part in parts)

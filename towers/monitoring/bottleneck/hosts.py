"""Says which of several hosts holds up the others, why, and what adding costs."""

from collections.abc import Sequence

from towers.loop.host_times import HostTimes, HostTotals
from towers.program import words

# Of a step: who is so much later than the others holds them up.
_LATE = 0.05
# Of the time that any host is late: below, they are so in turn.
_MOSTLY = 0.6
# What makes a host late, in words; parts of `HostTotals`.
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


def sentence(times: HostTimes, hosts: Sequence[HostTotals]) -> str | None:
    """Says who holds up the others, and what adding over hosts costs.

    Args:
        times: Those of a builder.
        hosts: What they have told of some steps; none of them, `None` is returned.
    """
    if not hosts or not min(each.steps for each in hosts):
        return None
    step_ms = max(map(_step_ms, hosts))
    late = [_ms(each, "late_s") for each in hosts]
    latest = max(range(len(hosts)), key=late.__getitem__)
    if sum(late) < _LATE * step_ms:
        said = f"none holds up the others in a step of {step_ms:,.1f} ms"
    elif late[latest] < _MOSTLY * sum(late):
        said = (
            f"each holds up the others in turn, for {sum(late):,.1f} ms of a step of "
            f"{step_ms:,.1f}"
        )
    else:
        said = (
            f"{times.names[latest]} holds up the others for {late[latest]:,.1f} ms of "
            f"a step of {step_ms:,.1f}: {_why(hosts, latest)}"
        )
    return f"hosts: {said}; {_of_network(times, hosts)}"


def _why(hosts, latest):
    """What a host does for longer than the others, and how much longer."""

    def others_ms(part):
        found = [_ms(each, part) for k, each in enumerate(hosts) if k != latest]
        return sum(found) / len(found)

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
    """Says what each host does, a line each.

    Args:
        times: Those of a builder.
        hosts: What they have told.
        rate: Examples per second in all, if it is known.
    """
    found = []
    for name, each in zip(times.names, hosts, strict=True):
        if not each.steps:
            continue
        said = []
        if rate is not None:
            said.append(f"examples/sec: {rate * each.share / each.steps:,.1f}")
        waits = _ms(each, "sum_s") - _ms(each, "network_s")
        said.append(f"waits for others {waits:,.1f} ms of a step")
        said += [f"{why} {_ms(each, part):,.1f}" for part, why in _WHY.items()]
        found.append(f"{name}: {', '.join(said)}")
    return found


def scalars(times: HostTimes, hosts: Sequence[HostTotals]) -> dict[str, float]:
    """Returns what hosts do in a step, by tag, for TensorBoard."""
    found = {}
    if not hosts or not min(each.steps for each in hosts):
        return found
    for k, each in enumerate(hosts):
        for tag, part in _TAGS.items():
            found[f"step_ms/host_{k}/{tag}"] = _ms(each, part)
        waits = _ms(each, "sum_s") - _ms(each, "network_s")
        found[f"step_ms/host_{k}/waits_for_others"] = waits
        found[f"step_ms/host_{k}/holds_up_others"] = _ms(each, "late_s")
    network_ms = _ms(hosts[0], "network_s")
    found["hosts/latency_ms"] = 1000 * times.latency_s
    if network_ms:
        found["hosts/mb_per_sec"] = 1000 * times.bytes / network_ms / 2**20
    return found


def _ms(host, part):
    return 1000 * getattr(host, part) / host.steps


def _step_ms(host):
    """A step from its batch on: between steps, there may be an evaluation."""
    parts = [part for part in (*_WHY, "sum_s") if part != "between_s"]
    return sum(_ms(host, part) for part in parts)

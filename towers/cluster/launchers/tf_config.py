"""Reads `TF_CONFIG`, by which TensorFlow and its launchers name the hosts of a run."""

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

from towers.cluster.addresses import is_address

_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
# An evaluator stands beside the cluster.
OUTSIDE = "evaluator"


def read(text: str) -> tuple[dict[str, list[str]], str, int]:
    """Reads the variable's value.

    Args:
        text: JSON.

    Returns:
        The addresses of each type of task; type and index of this process's task.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"not JSON ({error}): {_short(text)}; expected such as {_EXAMPLE}"
        ) from error
    cluster = value.get("cluster") if isinstance(value, dict) else None
    if not isinstance(cluster, dict) or not cluster:
        raise ValueError(
            f"no cluster in {_short(text)}; expected such as {_EXAMPLE}, or unset it"
        )
    cluster = {kind: _listed(kind, hosts) for kind, hosts in cluster.items()}
    _check_unique(cluster)
    return cluster, *_task(value.get("task"), cluster)


def _listed(kind: str, hosts: Any) -> list[str]:
    """A type's addresses, each of which is one."""
    hosts = [hosts] if isinstance(hosts, str) else hosts
    if not isinstance(hosts, list) or not hosts:
        raise ValueError(
            f"the cluster's {kind!r} is {_short(json.dumps(hosts))}; expected a list "
            "of addresses, such as host1:2222"
        )
    for host in hosts:
        if not is_address(host):
            raise ValueError(
                f"the cluster's {kind!r} has the address {_short(json.dumps(host))}; "
                "expected HOST:PORT, such as host1:2222"
            )
    return hosts


def _check_unique(cluster):
    counts = collections.Counter(each for hosts in cluster.values() for each in hosts)
    twice = [address for address, count in counts.items() if count > 1]
    if twice:
        raise ValueError(
            f"the address {twice[0]} is there {counts[twice[0]]} times; expected one "
            "for each task, so give those on one host ports of their own"
        )


def _task(task: Any, cluster: Mapping[str, Sequence[str]]) -> tuple[str, int]:
    kind = task.get("type") if isinstance(task, dict) else None
    if not isinstance(kind, str) or kind not in {*cluster, OUTSIDE}:
        raise ValueError(
            f"the task is {_short(json.dumps(task))}, whose type the cluster has not; "
            f"expected one of {', '.join(cluster)}"
        )
    count = 1 if kind == OUTSIDE else len(cluster[kind])
    index = str(task.get("index"))
    if not index.isdecimal() or int(index) >= count:
        raise ValueError(
            f"the task is {_short(json.dumps(task))}, but the cluster has {count} of "
            f"type {kind}; expected an index from 0 to {count - 1}"
        )
    return kind, int(index)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."

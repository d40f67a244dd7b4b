"""A host that sums arrays with others, one generation after another: a process.

    python -m tests.towers.cluster.summing

Reads lines of JSON: a membership to join, or "leave". All leave after the same sum.
Prints a line of JSON once some sums are right, and one when it has left.
"""

import json
import os
import queue
import sys
import threading

import numpy as np

from towers.cluster import process_group
from towers.hosts import group
from towers.hosts.group import Membership

SIZE, SUMS = 50_000, 5


def say(**message):
    print(json.dumps(message), flush=True)


def open_things():
    """How many threads and descriptors this process has."""
    return [threading.active_count(), len(os.listdir("/proc/self/fd"))]


def summed(membership, wants_to_leave):
    """Sums until one host wants to leave; the others hear of it in the sum."""
    count = membership.count
    for number in range(10**9):
        mine = np.full(SIZE, membership.rank + number, np.float32)
        mine[0] = wants_to_leave()
        total = group.communicator().all_reduce(mine, f"sum {number}")
        expected = count * number + sum(range(count))
        np.testing.assert_array_equal(total[1:], np.full(SIZE - 1, expected))
        if total[0]:
            return
        if number == SUMS:
            say(summed=membership.generation, count=count, open=open_things())


def main():
    orders = queue.SimpleQueue()

    def read():
        for line in sys.stdin:
            orders.put(json.loads(line))
        orders.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (order := orders.get()) is not None:
        if order == "leave":
            continue
        process_group.join(Membership(**order), seeds=False)
        with group.together():
            why = None
            try:
                summed(group.joined(), lambda: not orders.empty())
            except ConnectionError as error:
                why = str(error)
            process_group.leave()
        assert group.joined() is None and "tensorflow" not in sys.modules
        say(left=order["generation"], why=why, open=open_things())


if __name__ == "__main__":
    main()

"""A host that counts with others, whoever comes and goes: a process.

    python -m tests.towers.cluster.elastic.counting GOAL

In each step, all add 1 to a counter, which the first host of a generation tells those
that come. Prints a line of JSON once some steps of a generation are done, and one at
the end.
"""

import json
import os
import signal
import sys
import threading

import numpy as np

from towers.cluster import process_group
from towers.hosts import group
from towers.program.ending import ANOTHER_FAILED

STEPS = 20


def say(**message):
    print(json.dumps(message), flush=True)


def count_together(member, at, goal):
    """Counts until the generation ends; returns whether that was by agreement."""
    comm, membership = group.communicator(), group.joined()
    first = np.array([at["steps"], at["counter"]], np.int64)
    comm.broadcast(memoryview(first).cast("B"), "where we are")
    at["steps"], at["counter"] = first.tolist()
    begun = {**at, "place": [membership.rank, membership.count]}
    while at["steps"] < goal:
        # A change that one has heard of is all the others', too, after this step.
        mine = np.array([1, member.change is not None], np.int64)
        added, ends = comm.all_reduce(mine, "step").tolist()
        at["steps"], at["counter"] = at["steps"] + 1, at["counter"] + added
        if at["steps"] == begun["steps"] + STEPS:
            files = len(os.listdir("/proc/self/fd"))
            say(**begun, open=[threading.active_count(), files])
        if ends:
            return True
    return False


def main(goal):
    member, left = group.member(), []

    def leave(number, frame):
        left.append(number)
        member.leave("SIGTERM")

    signal.signal(signal.SIGTERM, leave)
    at = {"steps": 0, "counter": 0}
    while at["steps"] < goal:
        try:
            process_group.join_next(at["steps"], seeds=False)
            count_together(member, at, goal)
        except OSError as error:
            if isinstance(error, ConnectionError):
                continue  # another host is lost
            say(error=str(error), **at)
            return 128 + left[0] if left else ANOTHER_FAILED
    process_group.leave()
    member.close(done=True)
    assert "tensorflow" not in sys.modules
    say(done=True, change=member.change, **at)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

"""A host that counts with others, as a launcher starts it: a process.

    python -m tests.towers.launch.elastic_host FOLDER [GOAL]

Adds lines of JSON to FOLDER/said, as it starts and once some steps of a generation are
done. If there is FOLDER/fails-SLOT, it ends at once with the code that stands there.
Without a goal, it counts until there is FOLDER/done.
"""

import json
import os
import sys
from pathlib import Path

from tests.towers.cluster.elastic import counting
from towers.hosts import group


class File:
    """A file, as a goal."""

    def __init__(self, path):
        self._path = path

    def __gt__(self, steps):
        return not self._path.exists()


def main(folder, goal=None):
    """Counts until the goal is reached."""
    folder, slot = Path(folder), int(os.environ["TOWERS_SLOT"])

    def say(**message):
        about = {"slot": slot, "pid": os.getpid()}
        about["restarted"] = group.restarted()
        with open(folder / "said", "a") as file:
            file.write(json.dumps(about | message) + "\n")

    say(starts=True)
    if (fails := folder / f"fails-{slot}").exists():
        return int(fails.read_text())
    counting.say = say
    return counting.main(int(goal) if goal else File(folder / "done"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

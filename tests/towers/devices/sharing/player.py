"""A run in a process of its own, which does what it is told, a line each.

    python player.py FOLDER PLACES MINIMUM LIMIT

It answers each line with what the registry does, as JSON.
"""

import json
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT))
# In place of the package, which imports TensorFlow, and that takes seconds.
_package = types.ModuleType("towers.devices")
_package.__path__ = [str(ROOT / "towers" / "devices")]

import towers  # noqa: E402, F401

sys.modules["towers.devices"] = _package

from towers.devices.sharing import Registry, RegistryError  # noqa: E402


def main(folder, places, minimum, limit):
    run = Registry(places.split(","), int(minimum), int(limit), folder, name="player")
    for line in sys.stdin:
        command, *words = line.split()
        try:
            print(json.dumps(_do(run, folder, command, words)), flush=True)
        except RegistryError as error:
            print(json.dumps(str(error)), flush=True)


def _do(run, folder, command, words):
    if command == "join":
        return run.join(60, say=lambda line: None)
    if command == "hold":
        return run.hold(words)
    if command == "play":
        return _play(run, os.path.join(folder, "used"))
    return getattr(run, command)()


def _play(run, folder):
    """Joins, looks, holds and leaves many times; fails if another uses its places."""
    moved = 0
    for _ in range(4):
        used = set()
        target = run.join(60, say=lambda line: None)
        for _ in range(60):
            for place in {*target} - used:
                os.mkdir(os.path.join(folder, place))
            for place in used - {*target}:
                os.rmdir(os.path.join(folder, place))
            moved += used != {*target}
            used = {*target}
            run.hold(target)
            target = run.look()
        for place in used:
            os.rmdir(os.path.join(folder, place))
        run.leave()
    return moved


if __name__ == "__main__":
    main(*sys.argv[1:])

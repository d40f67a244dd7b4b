"""Copies the checkpoints of a run at random instants; each copy must be of use.

python -m scripts.faults.snapshot --copies=200
"""

import contextlib
import os
import pathlib
import shutil
import time

from scripts.faults import run
from towers.lifecycle.checkpoints import store


def main() -> None:
    """Copies, reads the copies and says what was found."""
    with run.at_random(__doc__, "copies", 200) as (args, draw, folder):
        source = folder / "run/checkpoints"
        process = run.start(folder / "run", "--save_every=1", "--train_epochs=1000")
        while not store.find(str(source)):
            time.sleep(0.001)
        for number in range(args.copies):
            time.sleep(draw.uniform(0, 0.1))
            _copy(source, folder / f"copies/{number}")
        process.kill()
        run.end(process)
        newest, unfinished, useless = 0, 0, []
        for copy in sorted((folder / "copies").iterdir()):
            found = store.find(str(copy))
            unfinished += (copy / ".unfinished").exists()
            good = [path for path in found if _is_good(path)]
            newest += bool(good) and good[0] == found[0]
            if not good:
                useless.append(copy.name)
    print(f"{args.copies} copies, {unfinished} of them during a save:")
    print(f"{newest} have a good newest checkpoint, {len(useless)} have no good one.")


def _copy(source, target):
    """As a snapshot of the disk would; what vanishes meanwhile is left out."""
    for folder, _, names in os.walk(source):
        for name in names:
            path = pathlib.Path(folder) / name
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path, copy)


def _is_good(path):
    try:
        store.load(path)
    except store.DamagedError:
        return False
    return True


if __name__ == "__main__":
    main()

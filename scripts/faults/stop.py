"""Stops runs by SIGTERM and Ctrl-C at random instants; each must save first.

python -m scripts.faults.stop --stops=20
"""

import re
import signal
import time

from scripts.faults import run
from towers.lifecycle.checkpoints import store


def main() -> None:
    """Stops, continues and says what was found."""
    with run.at_random(__doc__, "stops", 20) as (args, draw, folder):
        code, said = run.finish(folder / "whole", "--save_every=1000000")
        assert code == 0, said
        whole = run.result(folder / "whole")
        stops = right = runs = same = 0
        while stops < args.stops:
            model_dir = folder / f"run-{runs}"
            runs += 1
            code = None
            while code != 0:
                # Nothing is saved but what the signal saves, and each epoch.
                process = run.start(model_dir, "--save_every=1000000")
                number = (signal.SIGTERM, signal.SIGINT)[stops % 2]
                if stops < args.stops:
                    time.sleep(draw.uniform(0, 1.5))
                    process.send_signal(number)
                code, said = run.end(process)
                if code == 0:
                    break
                stops += 1
                good = code == 128 + number and _saved(said)
                right += good
                print(f"stop {stops} by {number.name}: exit code {code}, {said}")
            same += run.equal(run.result(model_dir), whole)
    print(f"{right} of {stops} stops saved and had the right exit code;")
    print(f"{same} of {runs} runs ended with the bits and history of the whole run.")


def _saved(said):
    found = re.search(r"the last checkpoint is (\S+);", said)
    return bool(found) and bool(store.load(found[1]).about["step"])


if __name__ == "__main__":
    main()

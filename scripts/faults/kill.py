"""Kills runs at random instants, and compares their ends with one left alone.

A third of the kills comes at any time, a third soon after the start (several within one
epoch), a third while a checkpoint is written. Each run goes on until it has ended.

    python -m scripts.faults.kill --kills=40
"""

import time

from scripts.faults import run

WAYS = ("at any time", "soon after the start", "while saving")


def main() -> None:
    """Kills, compares and says what was found."""
    with run.at_random(__doc__, "kills", 40) as (args, draw, folder):
        begun_s = time.monotonic()
        process = run.start(folder / "whole")
        trains_s = time.monotonic()
        code, said = run.end(process)
        assert code == 0, said
        seconds = time.monotonic() - trains_s
        whole = run.result(folder / "whole")
        print(f"A run trains {seconds:.1f} s of {time.monotonic() - begun_s:.1f} s.")
        kills = failed = runs = same = 0
        surplus = []
        while kills < args.kills:
            model_dir = folder / f"run-{runs}"
            runs += 1
            while True:
                way = WAYS[kills % 3]
                process = run.start(model_dir)
                killed = kills < args.kills and _kill(
                    process, way, model_dir, seconds, draw
                )
                code, said = run.end(process)
                if killed and code == -9:
                    kills += 1
                    print(f"kill {kills}, {way}: {_latest(model_dir)}", flush=True)
                    continue
                if code:
                    failed += 1
                    print(f"exit code {code}: {said}")
                break
            if not code:
                found = run.result(model_dir)
                same += run.equal(found, whole)
                surplus.append(found["step"] - whole["step"])
    print(f"{kills} kills in {runs} runs: {failed} restarts failed,")
    print(f"updates more or fewer than {whole['step']}: {surplus},")
    print(f"{same} of {runs} ended with the bits and the history of the whole run.")


def _kill(process, way, model_dir, seconds, draw):
    """Waits for the instant; tells whether the run was still there."""
    delay_s = draw.uniform(0, seconds if way == "at any time" else 0.3)
    end_s = time.monotonic() + delay_s
    while time.monotonic() < end_s and process.poll() is None:
        time.sleep(0.001)
    if way == "while saving":
        while process.poll() is None:
            if (model_dir / "checkpoints/.unfinished").exists():
                break
    if process.poll() is not None:
        return False
    process.kill()
    return True


def _latest(model_dir):
    names = [path.name for path in model_dir.glob("checkpoints/*ckpt-*")]
    left = (model_dir / "checkpoints/.unfinished").exists()
    numbers = sorted(tuple(map(int, name.split("-")[1:])) for name in names)
    last = "-".join(map(str, numbers[-1])) if numbers else "none"
    return f"last {last}{', one unfinished' if left else ''}"


if __name__ == "__main__":
    main()

"""Times first steps: from the start of building a model to the end of its first step.

Contenders are those of `bench_towers.py`. Each measurement is a process of its own, and
they take turns, so a drift of the machine's speed meets all of them. A contender with
/before at its end runs from the checkout of --before, so that another commit is
measured in the same way. Reported are medians of the seconds and of the peak memory.
TensorFlow is imported before the clock starts. Nothing else may run meanwhile.

    python scripts/bench_first_step.py
    git clone . /tmp/before && git -C /tmp/before checkout bf6a3260
    python scripts/bench_first_step.py --before=/tmp/before
        --contenders=towers:parameter_server,towers:parameter_server/before
"""

import json
import os
import pathlib
import statistics
import sys

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts import race
from scripts.bench import contenders
from scripts.bench.worker import Job
from scripts.bench.works import WORKS

FLAGS = flags.FLAGS
_BEFORE = "/before"
_COLUMNS = ["work", "towers", "who", "first step, s", "each, s", "peak MB"]

flags.DEFINE_list("work", ["resnet50", "transformer_lm"], "What to train.")
flags.DEFINE_list("towers", ["1", "2", "8"], "Numbers of towers, or replicas.")
flags.DEFINE_list(
    "contenders",
    ["towers:parameter_server", "one_device", "mirrored"],
    "Who trains; see above.",
)
flags.DEFINE_string("before", None, "Checkout of the contenders with /before.")
flags.DEFINE_integer("rounds", 3, "Starts of each contender.", lower_bound=1)
flags.DEFINE_string("json", None, "File to append a JSON line for each result to.")


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    del argv
    try:
        _check()
    except ValueError as error:
        sys.exit(str(error))
    print(f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", sep="\n")
    for work in FLAGS.work:
        for towers in map(int, FLAGS.towers):
            compare(work, towers)


def _check():
    """Raises `ValueError` if a flag is wrong, before anything starts."""
    if unknown := [work for work in FLAGS.work if work not in WORKS]:
        raise ValueError(f"--work has to be of {', '.join(WORKS)}, not {unknown[0]!r}.")
    if not all(count.isdecimal() and int(count) for count in FLAGS.towers):
        raise ValueError(
            "--towers has to be numbers of towers, such as 1,2,8; it is "
            f"{','.join(FLAGS.towers)!r}."
        )
    for name in FLAGS.contenders:
        contenders.parse(name.removesuffix(_BEFORE))
        if name.endswith(_BEFORE) and not FLAGS.before:
            raise ValueError(f"{name} runs from another checkout; give it by --before.")


def compare(work: str, towers: int) -> None:
    """Starts all contenders in turn on one kind of work, and prints their medians."""
    runs = race.alternate(
        lambda name: first_step(name, work, towers), FLAGS.contenders, FLAGS.rounds
    )
    for name, answers in runs.items():
        seconds = [answer["first_step_s"] for answer in answers]
        memory = statistics.median(answer["host_mb"] for answer in answers)
        cells = [work, towers, name, f"{statistics.median(seconds):.2f}"]
        cells += [", ".join(f"{s:.2f}" for s in sorted(seconds)), f"{memory:,.0f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if FLAGS.json:
            result = {"work": work, "towers": towers, "contender": name}
            with open(FLAGS.json, "a") as file:
                file.write(json.dumps(result | {"starts": answers}) + "\n")


def first_step(name: str, work: str, towers: int) -> dict[str, float]:
    """Starts a contender, and returns the seconds of its first step and its memory."""
    root = pathlib.Path(FLAGS.before) if name.endswith(_BEFORE) else race.ROOT
    job = Job(name.removesuffix(_BEFORE), work, towers, warmup=0, steps=1)
    # Python keeps what it has compiled of a checkout, as pip does of a package.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    runner = race.Runner("scripts.bench", job, False, environ, root=root.resolve())
    runner.close()
    return runner.start


if __name__ == "__main__":
    app.run(main)

"""Writes PARITY.md: each exact case on towers, and under MirroredStrategy.

What towers do is read from what tests/towers/test_exact_cases.py has written. With
`--mirrored`, all cases first run under `tf.distribute.MirroredStrategy`, with as many
logical CPUs for replicas: built and compiled in its scope, then plain `fit`.

    make parity-report
    python -m scripts.parity_report --mirrored
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import pathlib
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

from tests.exact import oracle
from tests.exact.cases import CASES, Case

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLAGS = flags.FLAGS

flags.DEFINE_bool("mirrored", False, "Run the cases under MirroredStrategy.")
flags.DEFINE_integer("jobs", 2, "Processes that run them.", lower_bound=1)
flags.DEFINE_integer("timeout_s", 180, "Seconds after which a case hangs.")
flags.DEFINE_string("towers_file", f"{ROOT}/.exact/towers.jsonl", "Towers' records.")
flags.DEFINE_string("mirrored_file", f"{ROOT}/.exact/mirrored.jsonl", "The others.")
flags.DEFINE_string("output", f"{ROOT}/PARITY.md", "The report.")
flags.DEFINE_list("worker", None, "Internal: the indices of the cases to run.")

GOOD = "equal", "rule"
HEAD = """# Parity: towers, and MirroredStrategy, against one device

Each case trains, evaluates and predicts, and is compared with plain Keras on one
device: losses, metrics, predictions, each variable of the model and of its optimizer. A
number is the largest difference in any of these arrays, relative to the largest value
in that array; up to 1e-5 (1e-2 where 16 bits compute) it is rounding. "Clear error" is
an error in one sentence. The cases are [tests/exact/cases.py](tests/exact/cases.py).
Most have batches that do not divide; where MirroredStrategy fails, "even" tells what it
does with batches cut to a multiple of its replicas.

{versions}; {date}. Written by `make parity-report`.

{summary}
"""


def main(_) -> None:
    """Runs what is asked for, and writes the report."""
    if FLAGS.worker:
        return _work([CASES[int(index)] for index in FLAGS.worker])
    if FLAGS.mirrored:
        _run_mirrored(pathlib.Path(FLAGS.mirrored_file))
    towers, mirrored = _read(FLAGS.towers_file), _read(FLAGS.mirrored_file)
    text = _head(towers, mirrored) + "\n".join(_table(towers, mirrored)) + "\n"
    pathlib.Path(FLAGS.output).write_text(text)
    print(f"{FLAGS.output}: {len(CASES)} cases")


def _work(cases):
    """Runs cases in this process; prints a line for each."""
    tf.config.set_visible_devices([], "GPU")
    cpus = [tf.config.LogicalDeviceConfiguration() for _ in range(4)]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], cpus
    )
    for case in cases:
        strategy = tf.distribute.MirroredStrategy(
            [f"CPU:{k}" for k in range(case.towers)]
        )
        with contextlib.redirect_stdout(sys.stderr):
            found = oracle.outcome(case, scope=strategy.scope)
            even = _even(case)
            if even and found["verdict"] not in GOOD:
                found["even"] = oracle.outcome(even, scope=strategy.scope)
        print(json.dumps(found), flush=True)


def _even(case: Case) -> Case | None:
    """Returns the case with batches cut to multiples of the replicas, if it can be."""
    batches = []
    for batch in case.batches():
        arrays = keras.tree.flatten(batch)
        if not all(isinstance(a, np.ndarray) for a in arrays):
            return None
        n = len(arrays[0]) // case.towers * case.towers
        batches.append(keras.tree.map_structure(lambda a: a[:n], batch))  # noqa: B023
    batches = [batch for batch in batches if len(keras.tree.flatten(batch)[0])]
    return dataclasses.replace(case, batches=lambda: batches) if batches else None


def _run_mirrored(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [range(job, len(CASES), FLAGS.jobs) for job in range(FLAGS.jobs)]
    with futures.ThreadPoolExecutor(FLAGS.jobs) as pool, path.open("w") as file:
        for records in pool.map(lambda part: list(_records(part)), parts):
            file.writelines(f"{json.dumps(record)}\n" for record in records)


def _records(indices: Sequence[int]) -> Iterator[dict]:
    """Runs cases in a process, and in a new one after each that ends or hangs it."""
    left = list(indices)
    while left:
        worker = subprocess.Popen(
            [
                *(sys.executable, "-m", "scripts.parity_report"),
                f"--worker={','.join(map(str, left))}",
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        line = "begin"
        while left and line:
            hung = threading.Event()
            timer = threading.Timer(
                FLAGS.timeout_s, lambda e=hung, w=worker: (e.set(), w.kill())
            )
            timer.start()
            line = worker.stdout.readline()
            timer.cancel()
            case = CASES[left.pop(0)]
            verdict = "hangs" if hung.is_set() else "ends the process"
            unknown = {"group": case.group, "case": case.name, "verdict": verdict}
            yield json.loads(line) if line else unknown
        worker.wait()


def _read(path: str) -> dict[str, list[dict]]:
    """Returns the records of each case."""
    found = {}
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        for line in file:
            record = json.loads(line)
            name = f"{record['group']}/{record['case']}"
            found.setdefault(name, []).append(record)
    return found


def _table(towers, mirrored) -> Iterator[str]:
    yield "| group | case | towers | towers: difference | MirroredStrategy |"
    yield "|---|---|---|---|---|"
    for case in CASES:
        ours, theirs = _worst(towers, case), _worst(mirrored, case)
        cells = [case.group, case.name, case.towers, _said(ours), _said(theirs)]
        if "even" in theirs:
            cells[-1] += f"; even: {_said(theirs['even'])}"
        yield _row(cells)
        for name, difference in ours.get("metrics", {}).items():
            other = theirs.get("metrics", {}).get(name)
            cells = ["", f"- {name}", "", f"{difference:.1e}"]
            yield _row([*cells, "" if other is None else f"{other:.1e}"])


def _row(cells):
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _worst(records, case) -> dict:
    """Returns the worst record of a case: of several builders, or none."""
    order = ["equal", "rule", "clear error", "differs"]

    def badness(record):
        verdict = record["verdict"]
        rank = order.index(verdict) if verdict in order else len(order)
        return rank, record.get("difference", 0)

    found = records.get(str(case), [{"verdict": "not run"}])
    return max(found, key=badness)


def _said(record) -> str:
    """Returns a record in a few words."""
    verdict = record["verdict"]
    number = f"{record.get('difference', math.nan):.1e}"
    message = record.get("message", "").split(": ")
    return {
        "equal": number if record.get("difference") else "0",
        "rule": f"{number} (where the rule says equal)",
        "differs": f"**differs** by {number} ({record.get('where')})",
        "clear error": "clear error",
        "raises": f"**raises** {': '.join(message)[:110]}",
    }.get(verdict, f"**{verdict}**")


def _count(records) -> str:
    verdicts = [record["verdict"] for record in records]
    equal, differs = sum(map(verdicts.count, GOOD)), verdicts.count("differs")
    fails = len(verdicts) - equal - differs - verdicts.count("not run")
    return f"equal in {equal}, differs in {differs}, fails in {fails}"


def _head(towers, mirrored) -> str:
    ours = {case: _worst(towers, case) for case in CASES}
    theirs = [_worst(mirrored, case) for case in CASES]
    even = [record.get("even", record) for record in theirs]

    def largest(wide):
        return max(
            (
                record["difference"]
                for case, record in ours.items()
                if "difference" in record and (case.policy == "float32") == wide
            ),
            default=math.nan,
        )

    wrong = [
        f"{c} {r['verdict']}" for c, r in ours.items() if r["verdict"] != c.verdict
    ]
    errors = sum(case.verdict == "clear error" for case in CASES)
    summary = (
        f"**{len(CASES)} cases. Towers: largest difference {largest(True):.1e} in "
        f"float32, {largest(False):.1e} in 16 bits; {errors} clear errors; "
        f"{len(wrong)} go wrong. MirroredStrategy: {_count(theirs)}; with even "
        f"batches, {_count(even)}.**"
    )
    if wrong:
        summary += f"\n\nWrong on towers: {'; '.join(wrong)}."
    names = "tensorflow", "keras", "numpy"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    versions += [f"Python {platform.python_version()}", platform.machine()]
    return HEAD.format(
        versions=", ".join(versions),
        date=datetime.date.today(),
        summary=summary + "\n",
    )


if __name__ == "__main__":
    app.run(main)

"""Writes how exact cases end on towers, and under MirroredStrategy.

PARITY.md gets the counts, .exact/table.md each case, both from the same records. What
towers do is read from what tests/exact/test_exact.py has written. With
`--mirrored`, all cases but combinations, which would take half an hour more, first run
under `tf.distribute.MirroredStrategy`, with as many logical CPUs for replicas. They are
built and compiled in its scope; then comes plain `fit`.

    make parity-report
    python -m scripts.parity_report --mirrored
"""

import contextlib
import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import pathlib
import platform
from collections.abc import Iterator
from concurrent import futures

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

from tests.exact import combinations, oracle, preprocessed, table
from tests.exact.case import Case
from towers.keras_adapter.versions import installed

CASES = [*table.OF_KERAS_STEPS, *combinations.CASES]
# MirroredStrategy has no `preprocess`.
MIRRORED = [
    index
    for index, case in enumerate(table.OF_KERAS_STEPS)
    if case.group != preprocessed.GROUP
]
ROOT = pathlib.Path(__file__).resolve().parents[1]
FLAGS = flags.FLAGS

flags.DEFINE_bool("mirrored", False, "Run the cases under MirroredStrategy.")
flags.DEFINE_integer("jobs", 2, "Processes that run them.", lower_bound=1)
flags.DEFINE_integer("timeout_s", 180, "Seconds after which a case hangs.")
flags.DEFINE_string("towers_file", f"{ROOT}/.exact/towers.jsonl", "Towers' records.")
flags.DEFINE_string("mirrored_file", f"{ROOT}/.exact/mirrored.jsonl", "The others.")
flags.DEFINE_string("table", f"{ROOT}/.exact/table.md", "The table of all cases.")
flags.DEFINE_string("output", f"{ROOT}/PARITY.md", "The summary.")

GOOD = "equal", "rule"
SUMMARY = """# Parity: towers, and MirroredStrategy, against one device

Each case trains, evaluates and predicts, and is compared with Keras on one device.
[*Equal*]({details}) is a relative difference of at most
1e-5 in float32, 1e-2 in 16 bits, 1e-14 in float64. *Refused* is a clear error, *fails*
another one. Of several ways to update variables, the worst counts. MirroredStrategy ran
no combinations or `preprocess`. *Even batches* divide by the number of its replicas.

{versions}. Towers: {towers_date};
MirroredStrategy: {mirrored_date}. `make parity-report` measures this anew,
and writes the table of all cases, `.exact/table.md`.

| group | cases | Towers: equal | refused | differs | fails | MirroredStrategy: equal \
| differs | fails | even batches: equal | differs | fails |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
{groups}

Where towers are equal, the largest difference is {wide:.1e}; in 16 bits {narrow:.1e}.
"""
TABLE = """# All parity cases

A number is the largest difference in any array, relative to the largest value in that
array. One device runs eagerly, but for batches, metrics and several outputs. All
builders run each case, and the worst counts: `asynchronous` on one tower, where it has
to equal one device, and without the groups shares and batches, which are about several.
Cases of ranks, masks, metrics of tokens and pixels, tasks, and combinations run with
one builder each. Evaluation is the same code for all and runs once. "Clear error" is an
error in one sentence. The cases are in tests/exact. Combinations were drawn at random
(tests/exact/combinations.txt). Tasks are what the command line trains: model, loss,
metrics and optimizer of each `--task`. Where MirroredStrategy fails, "even" tells what
it does with batches cut to a multiple of its replicas. Where towers differ, the row
also tells by how much plain Keras on one device differs from itself in the same array:
compiled as the case asks, and with float32 in place of 16 bits.

"""


def main(_) -> None:
    """Runs what is asked for, and writes the summary and the table."""
    if FLAGS.mirrored:
        _run_mirrored(pathlib.Path(FLAGS.mirrored_file))
    towers, mirrored = _read(FLAGS.towers_file), _read(FLAGS.mirrored_file)
    lines = "\n".join(_table(towers, mirrored))
    pathlib.Path(FLAGS.table).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(FLAGS.table).write_text(f"{TABLE}{lines}\n")
    dates = map(_written, (FLAGS.towers_file, FLAGS.mirrored_file))
    pathlib.Path(FLAGS.output).write_text(summary(towers, mirrored, *dates))
    print(f"{FLAGS.table}: {len(CASES)} cases; {FLAGS.output}: their counts")


def _run_mirrored(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    # What fails under MirroredStrategy spoils its process for all that follows. Each
    # case gets one that is forked from one that has imported everything.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.exact.oracle"])

    def record(index):
        found = _isolated(processes, index, False)
        if found["verdict"] not in GOOD and _even(CASES[index]):
            found["even"] = _isolated(processes, index, True)
        return found

    with futures.ThreadPoolExecutor(FLAGS.jobs) as pool, path.open("w") as file:
        for found in pool.map(record, MIRRORED):
            file.write(f"{json.dumps(found)}\n")
            file.flush()


def _isolated(processes, index: int, even: bool) -> dict:
    """Runs a case in a process of its own; even if it hangs or ends it."""
    receive, send = processes.Pipe(duplex=False)
    process = processes.Process(target=_mirrored, args=(send, index, even))
    process.start()
    send.close()
    record = {"group": CASES[index].group, "case": CASES[index].name}
    try:
        if receive.poll(FLAGS.timeout_s):
            return receive.recv()
        return record | {"verdict": "hangs"}
    except EOFError:
        return record | {"verdict": "ends the process"}
    finally:
        process.kill()
        process.join()


def _mirrored(send, index, even):
    """Runs a case under MirroredStrategy, and sends the record."""
    case = _even(CASES[index]) if even else CASES[index]
    tf.config.set_visible_devices([], "GPU")
    cpus = [tf.config.LogicalDeviceConfiguration() for _ in range(case.towers)]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], cpus
    )
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    replicas = [f"CPU:{k}" for k in range(case.towers)]
    strategy = tf.distribute.MirroredStrategy(replicas)
    send.send(oracle.outcome(case, scope=strategy.scope))


def _even(case: Case) -> Case | None:
    """Returns the case with batches cut to multiples of the replicas, if it can be."""
    again = case.again and _cut(case.again(), case.towers)
    batches = _cut(case.batches(), case.towers)
    if not batches:
        return None
    return dataclasses.replace(
        case, batches=lambda: batches, again=again and (lambda: again)
    )


def _cut(batches, replicas):
    """Returns batches of a multiple of the replicas; none if they cannot be cut."""
    cut = []
    for batch in batches:
        arrays = keras.tree.flatten(batch)
        if not all(isinstance(a, np.ndarray) for a in arrays):
            return []
        n = len(arrays[0]) // replicas * replicas
        cut.append(keras.tree.map_structure(lambda a: a[:n], batch))  # noqa: B023
    return [batch for batch in cut if len(keras.tree.flatten(batch)[0])]


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
        if ours["verdict"] == "differs":
            cells[3] += f"; one device {_rounding(case, ours['where'])}"
        if "even" in theirs:
            cells[-1] += f"; even: {_said(theirs['even'])}"
        yield _row(cells)
        for name, difference in ours.get("metrics", {}).items():
            other = theirs.get("metrics", {}).get(name)
            cells = ["", f"- {name}", "", f"{difference:.1e}"]
            yield _row([*cells, "" if other is None else f"{other:.1e}"])


def _rounding(case, where):
    """Says how far one device is from itself; see `oracle.rounding`."""
    found = oracle.rounding(case, where)
    return ", ".join(f"{name} by {value:.1e}" for name, value in found.items())


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
        "not run": "",
        "raises": f"**raises** {': '.join(message)[:110]}",
    }.get(verdict, f"**{verdict}**")


def summary(towers, mirrored, towers_date: str, mirrored_date: str) -> str:
    """Returns the counts of each group, and of all, as Markdown.

    Args:
        towers: The records of each case on towers.
        mirrored: Those under MirroredStrategy.
        towers_date: When towers ran.
        mirrored_date: When MirroredStrategy ran.
    """
    groups, ran = {}, [case for case in CASES if str(case) in towers]
    for case in ran:
        groups.setdefault(case.group, []).append(case)
    groups["all"] = ran

    def largest(wide):
        return max(
            (
                record["difference"]
                for case in ran
                for record in [_worst(towers, case)]
                if record["verdict"] in GOOD and ("16" not in case.policy) == wide
            ),
            default=math.nan,
        )

    rows = []
    for name, cases in groups.items():
        ours = [_worst(towers, case) for case in cases]
        theirs = [_worst(mirrored, case) for case in cases]
        even = [record.get("even", record) for record in theirs]
        equal, differs, fails = _count(ours)
        refused = sum(map(_is_refused, ours))
        cells = [name, len(cases), equal, refused, differs, fails - refused]
        for records in theirs, even:
            cells += _count(records) if _ran(records) else ["", "", ""]
        rows.append(_row(f"**{cell}**" if name == "all" else cell for cell in cells))
    names = "tensorflow", "keras", "numpy"
    versions = [f"{name} {installed(name)}" for name in names]
    versions += [f"Python {platform.python_version()}", platform.machine()]
    return SUMMARY.format(
        details="docs/trust/exactness.md#how-equal-is-measured",
        versions=", ".join(versions),
        towers_date=towers_date,
        mirrored_date=mirrored_date,
        groups="\n".join(rows),
        wide=largest(True),
        narrow=largest(False),
    )


def _count(records) -> tuple[int, int, int]:
    """Returns how many are equal, differ and fail."""
    verdicts = [record["verdict"] for record in records]
    equal, differs = sum(map(verdicts.count, GOOD)), verdicts.count("differs")
    return equal, differs, _ran(records) - equal - differs


def _ran(records) -> int:
    return sum(record["verdict"] != "not run" for record in records)


def _is_refused(record) -> bool:
    """Whether towers ended with a sentence about the model."""
    refusal = record.get("message", "").startswith("ModelError")
    return record["verdict"] == "clear error" or refusal


def _written(path: str) -> str:
    """Returns the day when a file of records was written."""
    with contextlib.suppress(FileNotFoundError):
        return str(datetime.date.fromtimestamp(os.path.getmtime(path)))
    return "not run"


if __name__ == "__main__":
    app.run(main)

"""Times how many rows of a CSV file a pipeline gives in a second, beside others.

Contenders read the same file in batches of 256, shuffled, as float32 with mean 0 and
standard deviation 1:

    towers   open_source, cached and make_dataset of towers.input_pipeline
    slices   pyarrow reads the file as a whole, then from_tensor_slices, shuffle, batch
    arrow    tf.data over batches of rows that pyarrow reads, shuffled by the batch and
             by a buffer

Each is opened anew in each round and read for some epochs, in turn with the others; the
first epoch is timed from before the file is opened. Reported are medians. Nothing else
may run meanwhile.

    python scripts/bench_rows.py --rows=1000000 --rounds=5
"""

import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import tensorflow as tf
from absl import app, flags
from pyarrow import csv

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.race import alternate, ratio
from towers import input_pipeline

FLAGS = flags.FLAGS
BATCH, COLUMNS, BUFFER = 256, 8, 100_000

flags.DEFINE_integer("rows", 1_000_000, "Rows of the file.", lower_bound=1000)
flags.DEFINE_integer("rounds", 5, "Rounds.", lower_bound=1)
flags.DEFINE_integer("epochs", 3, "Epochs of a round.", lower_bound=2)


def towers(path: str) -> tf.data.Dataset:
    """Reads rows as ``towers train`` does."""
    source = input_pipeline.open_source(f"csv:{path}", eval_fraction=0)
    scaling = input_pipeline.measure_scaling(source)
    kept = input_pipeline.cached(source)
    return input_pipeline.make_dataset(kept, "train", BATCH, scaling=scaling)


def slices(path: str) -> tf.data.Dataset:
    """Reads rows into memory, and slices them."""
    table = csv.read_csv(path)
    x, y = _columns(table, None)
    data = tf.data.Dataset.from_tensor_slices((_scaled(x, x), y))
    return data.shuffle(BUFFER, seed=1).batch(BATCH).prefetch(tf.data.AUTOTUNE)


def arrow(path: str) -> tf.data.Dataset:
    """Reads batches of rows by pyarrow in each epoch."""
    first = csv.open_csv(path).read_next_batch()
    sample, _ = _columns(first, None)

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in csv.open_csv(path):
            order = np.random.default_rng(1).permutation(len(batch))
            x, y = _columns(batch, order)
            yield _scaled(x, sample), y

    specs = (
        tf.TensorSpec([None, COLUMNS], tf.float32),
        tf.TensorSpec([None], tf.int64),
    )
    data = tf.data.Dataset.from_generator(read, output_signature=specs)
    return data.unbatch().shuffle(BUFFER, seed=1).batch(BATCH).prefetch(2)


CONTENDERS: dict[str, Callable[[str], tf.data.Dataset]] = {
    "towers": towers,
    "slices": slices,
    "arrow": arrow,
}


def _columns(table, order):
    names = [name for name in table.schema.names if name != "label"]
    x = np.stack([table[name].to_numpy() for name in names], axis=1)
    y = table["label"].to_numpy()
    return (x, y) if order is None else (x[order], y[order])


def _scaled(x, sample):
    return ((x - sample.mean(axis=0)) / sample.std(axis=0)).astype(np.float32)


def write(path: pathlib.Path) -> None:
    """Writes rows of numbers and a label."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[FLAGS.rows, COLUMNS]).round(4)
    label = (x[:, 0] > 0).astype(np.int64)
    columns = {f"x{k}": x[:, k] for k in range(COLUMNS)} | {"label": label}
    csv.write_csv(pa.table(columns), path)


def timed(
    open_rows: Callable[[str], tf.data.Dataset], path: str
) -> tuple[float, float]:
    """Returns rows a second of the first epoch, with opening, and of the later ones."""
    seconds, begin = [], time.perf_counter()
    data = open_rows(path)
    for _ in range(FLAGS.epochs):
        rows = sum(len(y) for _, y in data)
        if rows != FLAGS.rows:
            raise RuntimeError(f"{rows:,} rows came, expected {FLAGS.rows:,}")
        now = time.perf_counter()
        seconds.append(now - begin)
        begin = now
    return FLAGS.rows / seconds[0], FLAGS.rows / statistics.median(seconds[1:])


def main(argv: list[str]) -> None:
    """Times the contenders in turn."""
    del argv
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.csv"
        write(path)
        rounds = alternate(
            lambda name: timed(CONTENDERS[name], str(path)), CONTENDERS, FLAGS.rounds
        )
    print("| who | rows/s, first epoch | rows/s, later | ours / theirs, later |")
    print("|---|---|---|---|")
    _, ours = zip(*rounds["towers"], strict=True)
    for name, some in rounds.items():
        first, later = zip(*some, strict=True)
        medians = [f"{statistics.median(rates):,.0f}" for rates in (first, later)]
        print(f"| {name} | {' | '.join(medians)} | {ratio(ours, later):.2f} |")


if __name__ == "__main__":
    app.run(main)

"""Times how soon a run trains on data of ordinary size, beside Keras's own ways.

Contenders are whole processes, which start in turn on the same machine: ``towers
train``, and a short script as Keras's documents have it, on one device. Both train the
same perceptron in batches of 256. Reported are the medians of the seconds from the
start of the process to its first line, to the end of step 100 and to the end of the
first epoch, and of the peak memory. Nothing else may run meanwhile.

    python scripts/bench_start.py
    python scripts/bench_start.py --data=csv_1m,folder_100k --rounds=3 --epoch

Data are made in --work_dir the first time. Keras reads CSV and Parquet by pyarrow as a
whole and calls ``fit``, folders by ``image_dataset_from_directory``, and TFRecords by
tf.data.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.race import ROOT, alternate

FLAGS = flags.FLAGS
BATCH, COLUMNS, CLASSES, SIZE = 256, 8, 10, 32

flags.DEFINE_list(
    "data",
    ["csv_1m", "csv_3m", "parquet_10m", "folder_100k", "folder_200k", "records_200k"],
    "What to train on: KIND_NUMBER, of the kinds csv, parquet, folder and records; "
    "the number with k or m.",
)
flags.DEFINE_list("contenders", ["towers", "keras"], "Who trains.")
flags.DEFINE_list("towers_flags", [], "Further flags of towers train, without --.")
flags.DEFINE_integer("rounds", 3, "Rounds.", lower_bound=1)
flags.DEFINE_boolean("epoch", False, "Train a whole epoch, rather than 100 steps.")
flags.DEFINE_string("work_dir", str(ROOT / "build" / "bench_start"), "Folder of data.")
flags.DEFINE_string("json", None, "File to append a JSON line for each result to.")
# Of the process that is measured.
flags.DEFINE_string("keras_reads", None, "Train as Keras on this path.")


def main(argv: list[str]) -> None:
    """Times the contenders on each kind of data."""
    del argv
    if FLAGS.keras_reads:
        return train_by_keras(pathlib.Path(FLAGS.keras_reads))
    work = pathlib.Path(FLAGS.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    ends = ["first line, s", "step 100, s", *["end of the epoch, s"] * FLAGS.epoch]
    columns = ["data", "who", *ends, "peak MB"]
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for name in FLAGS.data:
        path = make(work, name)
        runs = alternate(
            lambda name, path=path: timed(command(name, path, work)),
            FLAGS.contenders,
            FLAGS.rounds,
        )
        for contender, some in runs.items():
            result = {key: statistics.median(run[key] for run in some) for key in KEYS}
            cells = [f"{result[key]:.1f}" for key in KEYS[: len(ends)]]
            print(
                f"| {name} | {contender} | {' | '.join(cells)} | {result['mb']:.0f} |"
            )
            sys.stdout.flush()
            if FLAGS.json:
                with open(FLAGS.json, "a") as file:
                    file.write(json.dumps({"data": name, "who": contender} | result))
                    file.write("\n")
    return None


KEYS = ("first_line", "step_100", "end", "mb")


def command(contender: str, path: pathlib.Path, work: pathlib.Path) -> list[str]:
    """Returns the command line of a contender that trains on a path."""
    if contender == "keras":
        epoch = ["--epoch"] * FLAGS.epoch
        return [sys.executable, __file__, f"--keras_reads={path}", *epoch]
    kind = path.name.partition("_")[0]
    spec = {"records": "tfrecord", "folder": "folder"}.get(kind, kind)
    pattern = f"{path}/*" if kind == "records" else path
    pictures = ["--recipe=none", f"--image_size={SIZE}"]
    more = pictures if kind in ("records", "folder") else []
    # Files of records have nothing held out unless their names say so.
    more += ["--eval_fraction=0"] * (kind != "records")
    more += [f"--{flag}" for flag in FLAGS.towers_flags]
    return [
        *(sys.executable, "-m", "towers.train", f"--dataset={spec}:{pattern}"),
        *("--model=mlp", "--variable_update=parameter_server", "--num_gpus=2"),
        *(f"--batch_size={BATCH}", f"--model_dir={work / 'run'}", "--clean"),
        "--train_epochs=1" if FLAGS.epoch else "--max_train_steps=120",
        *more,
    ]


def timed(argv: list[str]) -> dict[str, float]:
    """Runs a process, and returns when its lines came, and its peak memory.

    Raises:
        RuntimeError: The process failed.
    """
    # Python keeps what it has compiled of this checkout, as pip did of Keras.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    begin, times, said = time.perf_counter(), {}, []
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=env,
    )
    for line in process.stdout:
        now = time.perf_counter() - begin
        said.append(line)
        if re.match(r"\d{4}-|[WEI]0000|WARNING|To enable", line) or not line.strip():
            continue  # TensorFlow's own
        times.setdefault("first_line", now)
        if "step 100" in line or "step: 100" in line:
            times.setdefault("step_100", now)
        if re.search(r"epoch 1(/1 done,|:).*loss", line):
            times.setdefault("end", now)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or "step_100" not in times:
        raise RuntimeError(f"{' '.join(argv)} failed:\n{''.join(said[-20:])}")
    times.setdefault("end", times["step_100"])
    return times | {"mb": usage.ru_maxrss / 1024}


def make(work: pathlib.Path, name: str) -> pathlib.Path:
    """Makes data if they are not there, and returns their path."""
    kind, _, number = name.partition("_")
    count = int(number[:-1]) * {"k": 1_000, "m": 1_000_000}[number[-1]]
    path = work / name
    if not path.exists():
        unfinished = work / f"{name}.unfinished"
        MAKERS[kind](unfinished, count)
        unfinished.rename(path)
    return path


def make_csv(path: pathlib.Path, count: int) -> None:
    """Writes rows of numbers and a label."""
    from pyarrow import csv

    csv.write_csv(_table(count, seed=0), path)


def make_parquet(path: pathlib.Path, count: int) -> None:
    """Writes rows of numbers and a label, in groups of 100,000."""
    from pyarrow import parquet

    most = 1_000_000
    with parquet.ParquetWriter(path, _table(1, seed=0).schema) as writer:
        for part in range(-(-count // most)):
            rows = _table(min(most, count - part * most), seed=part)
            writer.write_table(rows, row_group_size=100_000)


def make_folder(path: pathlib.Path, count: int) -> None:
    """Writes small pictures in a folder for each class."""
    for number, encoded in enumerate(_pictures(count)):
        folder = path / f"class_{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:07d}.jpg").write_bytes(encoded)


def make_records(path: pathlib.Path, count: int) -> None:
    """Writes eight TFRecord files of small pictures."""
    import tensorflow as tf

    path.mkdir(parents=True)
    writers = [
        tf.io.TFRecordWriter(str(path / f"train-{k}.tfrecord")) for k in range(8)
    ]
    for number, encoded in enumerate(_pictures(count)):
        image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded]))
        label = tf.train.Int64List(value=[number % CLASSES])
        features = {
            "image/encoded": image,
            "image/class/label": tf.train.Feature(int64_list=label),
        }
        example = tf.train.Example(features=tf.train.Features(feature=features))
        writers[number % 8].write(example.SerializeToString())
    for writer in writers:
        writer.close()


MAKERS: dict[str, Callable[[pathlib.Path, int], None]] = {
    "csv": make_csv,
    "parquet": make_parquet,
    "folder": make_folder,
    "records": make_records,
}


def _table(count, seed):
    import pyarrow as pa

    x = np.random.default_rng(seed).normal(size=[count, COLUMNS]).round(4)
    label = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(np.int64)
    return pa.table({f"x{k}": x[:, k] for k in range(COLUMNS)} | {"label": label})


def _pictures(count):
    """Yields encoded pictures: a few hundred different ones, again and again."""
    import io

    from PIL import Image

    rng, some = np.random.default_rng(0), []
    for _ in range(256):
        small = Image.fromarray(rng.integers(0, 256, [4, 4, 3], np.uint8))
        file = io.BytesIO()
        small.resize([SIZE, SIZE], Image.Resampling.BICUBIC).save(file, "JPEG")
        some.append(file.getvalue())
    for number in range(count):
        yield some[number % len(some)]


def train_by_keras(path: pathlib.Path) -> None:
    """Trains on one device, as Keras's documents have it."""
    import keras

    print("begins", flush=True)
    kind = path.name.partition("_")[0]
    if kind in ("csv", "parquet"):
        x, y = _read_table(path)
        data = {"x": x, "y": y, "batch_size": BATCH}
        shape, classes = x.shape[1:], 2
    else:
        data = {"x": _folder(path) if kind == "folder" else _records(path)}
        shape, classes = (SIZE, SIZE, 3), CLASSES
    model = keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Flatten(),
            *(keras.layers.Dense(512, activation="relu") for _ in range(2)),
            keras.layers.Dense(classes),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, 0.9), loss, metrics=["accuracy"])

    class Says(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 99:
                print(f"step 100: loss {logs['loss']:.3f}", flush=True)
            if batch == 119 and not FLAGS.epoch:
                os._exit(0)

        def on_epoch_end(self, epoch, logs=None):
            print(f"epoch 1: loss {logs['loss']:.3f}", flush=True)

    model.fit(**data, epochs=1, verbose=0, callbacks=[Says()])


def _read_table(path):
    from pyarrow import csv, parquet

    is_csv = path.name.startswith("csv")
    table = csv.read_csv(path) if is_csv else parquet.read_table(path)
    names = [name for name in table.column_names if name != "label"]
    x = np.stack([table[name].to_numpy() for name in names], axis=1)
    x = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
    return x, table["label"].to_numpy()


def _folder(path):
    import keras

    return keras.utils.image_dataset_from_directory(
        path, batch_size=BATCH, image_size=(SIZE, SIZE), verbose=False
    )


def _records(path):
    import tensorflow as tf

    def parse(record):
        fields = {
            "image/encoded": tf.io.FixedLenFeature([], tf.string),
            "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        }
        fields = tf.io.parse_single_example(record, fields)
        image = tf.io.decode_jpeg(fields["image/encoded"], 3)
        image = tf.ensure_shape(image, [SIZE, SIZE, 3])
        return tf.cast(image, tf.float32) / 127.5 - 1, fields["image/class/label"]

    files = sorted(map(str, path.iterdir()))
    records = tf.data.TFRecordDataset(files, num_parallel_reads=8).shuffle(10_000)
    return records.map(parse, tf.data.AUTOTUNE).batch(BATCH).prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    app.run(main)

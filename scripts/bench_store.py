"""How long training waits for data in an object store, with and without a local store.

    python -m scripts.bench_store --latency_ms=30 --mb_per_s=10 --rounds=3

An object store on this machine answers late and shares its bandwidth among all answers;
TensorFlow reads it as `gs://`. The same examples are read, in the same order,

- staged naively: each batch is read and decoded when a step has ended;
- by Towers as it is, in parallel and ahead of use;
- by Towers with --local_store: the first epoch, and later ones;
- the same with a store for half of the data only.

A step is a fixed product of matrices. The arms alternate in each round.
"""

import argparse
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tests import object_store

CLASSES, SHAPE = 4, (96, 96, 3)


class Waiting(NamedTuple):
    """What steps took.

    Attributes:
        wait_s: what they waited for data.
        first_s: of this, for the first batch.
        step_s: what they computed.
        read_bytes: what was read from the object store meanwhile.
        mb_per_s: what its line carries.
    """

    wait_s: float
    first_s: float
    step_s: float
    read_bytes: int
    mb_per_s: float

    def __str__(self) -> str:
        whole_s = self.wait_s + self.step_s
        read = self.read_bytes / 2**20
        line_s = read / self.mb_per_s
        # If nothing but the line held it up, and both worked from the beginning on.
        least = max(line_s - self.step_s, 0) / max(line_s, self.step_s)
        return (
            f"waits {self.wait_s / whole_s:6.1%} of {whole_s:6.2f} s "
            f"({self.first_s:.2f} s for the first batch), reads {read:6.1f} MB, which "
            f"takes {least:6.1%} at least"
        )


def main() -> None:
    """Measures, and prints a line for each arm of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("folder", "tfrecord"), default="folder")
    parser.add_argument("--examples", type=int, default=1024)
    parser.add_argument("--pixels", type=int, default=384, help="of a side of an image")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--shuffle_mb", type=int, default=8, help="of records")
    parser.add_argument("--step_ms", type=float, default=200)
    parser.add_argument("--latency_ms", type=float, default=30)
    parser.add_argument("--mb_per_s", type=float, default=10)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--naive_steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.url is not None:
        return _measure_all(args)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.bench_store", *sys.argv[1:]]
        environ = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ = os.environ | environ
        root = pathlib.Path(folder, "root")
        subprocess.run([*command, f"--url={root}"], env=environ, check=True)
        line = args.latency_ms, args.mb_per_s
        with object_store.serve(root, f"{folder}/keys", *line) as server:
            environ |= server.environ
            # As --local_store has it.
            environ["GCS_READAHEAD_BUFFER_SIZE_BYTES"] = str(4 * 2**20)
            subprocess.run([*command, f"--url={server.url}"], env=environ, check=True)


def _write(args: argparse.Namespace, root: pathlib.Path) -> None:
    """Writes the data set into a bucket, as files or as records."""
    import tensorflow as tf

    random, files = np.random.default_rng(0), root / "bucket" / "pictures"
    for number in range(args.examples):
        folder = files / f"class{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, [args.pixels, args.pixels, 3], np.uint8)
        data = tf.io.encode_jpeg(pixels, quality=70).numpy()
        (folder / f"{number:06d}.jpg").write_bytes(data)
    if args.kind == "tfrecord":
        command = ["towers.input_pipeline.convert", f"folder:{files}"]
        command += [f"tfrecord:{root}/bucket/records", "--shards=8"]
        subprocess.run([sys.executable, "-m", *command], check=True)


def _measure_all(args: argparse.Namespace) -> None:
    if not args.url.startswith("http"):
        return _write(args, pathlib.Path(args.url))
    from towers import input_pipeline

    server = object_store.Server({}, args.url)
    name = {"folder": "pictures", "tfrecord": "records"}[args.kind]
    spec = f"{args.kind}:gs://bucket/{name}"
    step = _calibrated(args.step_ms / 1000)
    plain = input_pipeline.open_source(spec)
    steps = -(-plain.splits["train"] // args.batch_size)
    size, step_s = _bytes_of(plain), _step_s(step)
    print(
        f"{spec}: {size / 2**20:.1f} MB, which the line carries in "
        f"{size / (args.mb_per_s * 2**20):.1f} s; {steps} steps of "
        f"{1000 * step_s:.0f} ms, if nothing else runs."
    )
    measure = functools.partial(_measure, server, args.mb_per_s)
    for number in range(args.rounds):
        print(f"round {number + 1}")
        naive = _naive(plain, args.batch_size)
        (found,) = measure(naive, step, [args.naive_steps])
        print(f"  naive staging, {args.naive_steps} steps    {found}", flush=True)
        batches = iter(_dataset(plain, args.batch_size, args.shuffle_mb))
        (found,) = measure(batches, step, [steps])
        print(f"  no store, first epoch     {found}", flush=True)
        del batches
        for what, share in (("store", 2), ("half a store", 0.5)):
            with tempfile.TemporaryDirectory() as folder:
                limit_gb = share * size / 2**30
                store = input_pipeline.LocalStore(folder, limit_gb, tell=print)
                source = input_pipeline.open_source(spec, local_store=store)
                batches = iter(_dataset(source, args.batch_size, args.shuffle_mb))
                epochs = measure(batches, step, [steps] * args.epochs)
                for epoch, found in enumerate(epochs):
                    label = f"{what}, epoch {epoch + 1}"
                    print(f"  {label:25s} {found}", flush=True)
                del batches
                store.close()


def _bytes_of(source) -> int:
    import tensorflow as tf

    return sum(tf.io.gfile.stat(path).length for path in source.files("train"))


def _calibrated(step_s: float) -> Callable[[], None]:
    """A step of so many products of matrices that it takes a time on this machine."""
    import tensorflow as tf

    x = tf.random.normal([512, 512])

    @tf.function
    def products(count):
        y = x
        for _ in tf.range(count):
            y = tf.linalg.matmul(x, y) / 512.0
        return tf.reduce_sum(y)

    def step(count):
        products(tf.constant(count)).numpy()

    step(1)
    once_s = min(_time(lambda: step(20)) for _ in range(5)) / 20
    count = max(int(step_s / once_s), 1)
    return lambda: step(count)


def _step_s(step: Callable[[], None]) -> float:
    return sorted(_time(step) for _ in range(5))[2]


def _time(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _dataset(source, batch_size: int, shuffle_mb: int):
    from towers import input_pipeline

    return input_pipeline.make_dataset(
        source,
        "train",
        batch_size,
        image_shape=SHAPE,
        shuffle_mb=shuffle_mb,
        repeat=True,
    )


def _naive(source, batch_size: int) -> Iterator:
    """Reads, decodes and joins a batch when it is asked for, and not before."""
    import tensorflow as tf

    if not hasattr(source, "records"):
        seeds = tf.constant([1, 2], tf.int64)
        some = source.batches("train", batch_size, seeds=seeds)
        raws = (raw for _, records in some for raw in records)
    else:
        files = source.files("train")
        raws = (raw for path in files for raw in tf.data.TFRecordDataset(path))
    while True:
        images = []
        for raw in raws:
            image, _ = source.decode(raw)
            images.append(tf.image.resize(image, SHAPE[:2]))
            if len(images) == batch_size:
                break
        yield tf.stack(images)


def _measure(
    server, mb_per_s: float, batches: Iterator, step: Callable, counts: Sequence[int]
) -> list[Waiting]:
    """Takes steps, one batch before each; returns what each count of them took."""
    found = []
    for count in counts:
        before, waits_s, step_s = server.figures()["bytes"], [], 0.0
        for _ in range(count):
            waits_s.append(_time(lambda: next(batches)))
            step_s += _time(step)
        read = server.figures()["bytes"] - before
        waiting = sum(waits_s), waits_s[0]
        found.append(Waiting(*waiting, step_s, read, mb_per_s))
    return found


if __name__ == "__main__":
    main()

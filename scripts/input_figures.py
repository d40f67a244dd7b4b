"""Measures what of the input pipeline is no speed: starting late, memory, waiting.

    python scripts/input_figures.py

Each figure is measured in a process of its own; nothing else may run meanwhile.

    start    time to the first batch at record 1,000,000 of 2,000,000 made-up small
             records, over that of reading there
    memory   growth of the resident memory over 20 epochs of the photographs of
             bench_input.py, after the second, with and without keeping them
    waiting  part of the time that a device waits which takes 1, 1.3, 2 and 4 times what
             the pipeline takes for a batch of them
"""

import multiprocessing
import pathlib
import sys
import time

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.input_bench import data
from scripts.input_bench.works import WORKS
from scripts.race import ROOT

FLAGS = flags.FLAGS

flags.DEFINE_list("figures", ["start", "memory", "waiting"], "What to measure.")
flags.DEFINE_string(
    "data_dir", str(ROOT / "build" / "bench_input"), "Where the photographs are."
)


def main(argv):
    """Measures, and prints."""
    if len(argv) > 1 or not set(FLAGS.figures) <= set(FIGURES):
        sys.exit(f"Expected --figures of {', '.join(FIGURES)}, and nothing else.")
    folder = data.make(FLAGS.data_dir)
    context = multiprocessing.get_context("spawn")
    for name in FLAGS.figures:
        process = context.Process(target=FIGURES[name], args=(folder,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{name} ended with exit code {process.exitcode}.")


def start(_):
    """Prints how long it takes to start late."""
    from towers import input_pipeline

    source = input_pipeline.open_source("synthetic:32x32x3:10:2000000")

    def seconds_to(record, begin):
        dataset = input_pipeline.make_dataset(
            source,
            "train",
            batch_size=256,
            image_shape=(32, 32, 3),
            training=True,
            recipe="cifar",
            start_record=begin,
        )
        started, at = time.perf_counter(), begin
        for _, labels in dataset:
            at += len(labels)
            if at > record:
                return time.perf_counter() - started

    seconds_to(256, 0)  # TensorFlow's own start
    late, reading = seconds_to(1_000_000, 1_000_000), seconds_to(1_000_000, 0)
    print(
        f"start: {late:.3f} s, reading there {reading:.2f} s: 1/{reading / late:.0f}",
        flush=True,
    )


def _photographs(folder, cache="auto", **options):
    from towers import input_pipeline

    source = input_pipeline.open_source(
        f"tfrecord:{folder / 'train-*'}", num_classes=10
    )
    work = WORKS["photos"]
    return input_pipeline.make_dataset(
        input_pipeline.cached(source, cache),
        "train",
        batch_size=work.batch,
        image_shape=work.shape,
        training=True,
        recipe=work.recipe,
        deterministic=False,
        **options,
    )


def memory(folder):
    """Prints by how much resident memory grows."""
    for cache in "auto", "none":
        dataset, sizes_mb = _photographs(folder, cache), []
        for _ in range(20):
            for _ in dataset:
                pass
            status = pathlib.Path("/proc/self/status").read_text()
            sizes_mb.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
        second, last = sizes_mb[1], sizes_mb[-1]
        print(
            f"memory, --cache={cache}: {second:.0f} MB after epoch 2, {last:.0f} MB "
            f"after epoch 20: {last / second - 1:+.1%} (highest {max(sizes_mb):.0f})",
            flush=True,
        )


def waiting(folder):
    """Prints the part of the time that devices wait."""
    iterator = iter(_photographs(folder, repeat=True))

    def read(batches, step_s):
        """Reads, and returns (seconds, those of them that were waited)."""
        waited, started = 0.0, time.perf_counter()
        for _ in range(batches):
            asked = time.perf_counter()
            next(iterator)
            waited += time.perf_counter() - asked
            time.sleep(step_s)  # A busy device costs the host nothing.
        return time.perf_counter() - started, waited

    read(64, 0)
    own_s = read(128, 0)[0] / 128
    print(f"waiting: the pipeline takes {1000 * own_s:.1f} ms for a batch")
    for factor in (1, 1.3, 2, 4):
        read(16, factor * own_s)
        seconds, waited = read(128, factor * own_s)
        print(f"waiting, {factor} times that: {waited / seconds:.1%}", flush=True)


FIGURES = {"start": start, "memory": memory, "waiting": waiting}


if __name__ == "__main__":
    app.run(main)

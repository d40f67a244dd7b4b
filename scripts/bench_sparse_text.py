"""Trains a language model with dense and with block-sparse layers, for as long each.

    python scripts/bench_sparse_text.py
    python scripts/bench_sparse_text.py --width=512 --seconds=600 --plot=sparse.png

Both are `transformer_lm` on `text:python`, with the same width, batches and optimizer;
of the other, `--sparsity` of the feed-forward layers' weights are zero. They train in
turn, a slice of some seconds each, so that a drift of the machine's speed meets both.
After each slice, the same held-out text is read, which does not count. Printed are
tokens a second, parameters, and bits a byte after as long a time of training. Nothing
else may run meanwhile.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

from towers import input_pipeline
from towers.models.text import transformer_lm

_BYTES = 258


class Contender:
    """A model that trains, and what is known of it so far."""

    def __init__(self, name: str, sparsity: float, job: argparse.Namespace):
        """Builds it."""
        self.name = name
        keras.utils.set_random_seed(1)
        self.model = transformer_lm.build(
            _BYTES,
            job.sequence_length,
            layers=job.layers,
            width=job.width,
            heads=job.heads,
            dropout=0.0,
            sparsity=sparsity,
        )
        self.model.compile(
            keras.optimizers.AdamW(job.learning_rate, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        self.parameters = self.model.count_params()
        self.seconds, self.steps, self.durations = 0.0, 0, []
        self.curve: list[tuple[float, float]] = []

    def train(self, batches: Any, seconds: float) -> None:
        """Trains for some seconds."""
        begin = time.perf_counter()
        while (now := time.perf_counter()) - begin < seconds:
            self.model.train_on_batch(*next(batches))
            self.durations.append(time.perf_counter() - now)
            self.steps += 1
        self.seconds += time.perf_counter() - begin

    def evaluate(self, held_out: Sequence[Any]) -> None:
        """Notes the bits a byte of held-out text."""
        losses = [self.model.test_on_batch(*batch) for batch in held_out]
        self.model.reset_metrics()
        # Each result is the mean of all batches so far.
        self.curve.append((self.seconds, float(losses[-1]) / math.log(2)))


def main() -> None:
    """Trains, and prints a table."""
    job = _job()
    source = input_pipeline.open_source(
        "text:python", tokenizer="bytes", sequence_length=job.sequence_length
    )
    source.prepare()
    held_out = input_pipeline.make_dataset(source, "test", job.batch_size)
    held_out = [*held_out.take(job.held_out).as_numpy_iterator()]
    contenders = [
        Contender("dense", 0.0, job),
        Contender("block-sparse", job.sparsity, job),
    ]
    streams = [_batches(source, job) for _ in contenders]
    for contender, batches in zip(contenders, streams, strict=True):
        # To trace is not to train.
        contender.model.train_on_batch(*next(batches))
        contender.evaluate(held_out)
    while contenders[-1].seconds < job.seconds:
        for contender, batches in zip(contenders, streams, strict=True):
            contender.train(batches, job.slice)
            contender.evaluate(held_out)
            seconds, bits = contender.curve[-1]
            print(f"{contender.name:12} {seconds:6.0f} s {bits:.3f} bits/byte")
    _report(contenders, job)


def _job() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in {
        "layers": 4,
        "width": 512,
        "heads": 8,
        "sequence_length": 128,
        "batch_size": 16,
        "held_out": 16,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {
        "sparsity": 0.75,
        "learning_rate": 5e-4,
        "seconds": 240.0,
        "slice": 15.0,
    }.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--plot", help="Writes a picture of both curves.")
    parser.add_argument("--json", help="Writes all figures.")
    return parser.parse_args()


def _batches(source, job):
    data = input_pipeline.make_dataset(source, "train", job.batch_size, seed=1)
    return iter(data.repeat().prefetch(tf.data.AUTOTUNE).as_numpy_iterator())


def _report(contenders: Sequence[Contender], job: argparse.Namespace) -> None:
    tokens = job.batch_size * job.sequence_length
    rows = [
        {
            "name": each.name,
            "parameters": each.parameters,
            "steps": each.steps,
            "tokens_per_s": tokens / statistics.median(each.durations),
            "bits_per_byte": each.curve[-1][1],
            "curve": each.curve,
        }
        for each in contenders
    ]
    print("\n| layers | parameters | steps | tokens/s | bits a byte |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['name']} | {row['parameters']:,} | {row['steps']:,} | "
            f"{row['tokens_per_s']:,.0f} | {row['bits_per_byte']:.3f} |"
        )
    if job.json:
        with open(job.json, "w") as file:
            json.dump({"job": vars(job), "rows": rows}, file)
    if job.plot:
        _plot(rows, job)


def _plot(rows: Sequence[dict[str, Any]], job: argparse.Namespace) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in rows:
        # The first figure is of a model that has not learnt.
        seconds, bits = zip(*row["curve"][1:], strict=True)
        label = f"{row['name']}: {row['tokens_per_s']:,.0f} tokens/s"
        axes.plot(seconds, bits, label=label)
    axes.set(
        xlabel="seconds of training",
        ylabel="bits a byte of held-out text",
        title=f"transformer_lm of width {job.width}, sparsity {job.sparsity}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(job.plot, dpi=120)


if __name__ == "__main__":
    main()

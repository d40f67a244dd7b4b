"""Times `fit` on towers against `fit` of peers, alternately, on the same machine.

Each contender runs in a process of its own, built and warmed up before the first round.
In each round every contender trains in turn, while the others wait; so a drift of the
machine's speed meets all of them. Reported is the median step time of each, and the
median over rounds of the ratio to the first one. Nothing else may run meanwhile.

    python scripts/bench_towers.py
    python scripts/bench_towers.py --work=mlp --towers=4 --rounds=11
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

from absl import app, flags

FLAGS = flags.FLAGS

CONTENDERS = {
    "towers": "Towers, parameter_server",
    "mirrored": "Keras fit, MirroredStrategy",
    "one_device": "Keras fit, one device, whole batch",
}
# Examples a tower, warm-up steps and steps in a round.
WORK = {"mlp": (32, 60, 300), "resnet20": (64, 5, 12), "embedding": (128, 5, 30)}
ROWS = 1_000_000  # of the embedding

flags.DEFINE_list("work", list(WORK), f"What to train: {', '.join(WORK)}.")
flags.DEFINE_list(
    "contenders", ["towers", "mirrored"], f"Who trains: {', '.join(CONTENDERS)}."
)
flags.DEFINE_integer("towers", 2, "Towers, or replicas.", lower_bound=1)
flags.DEFINE_integer("rounds", 9, "Rounds.", lower_bound=1)
flags.DEFINE_integer("steps_per_loop", 1, "Steps in a call; towers only.")
flags.DEFINE_string("json", None, "File to append a JSON line for each result to.")
flags.DEFINE_string("worker", None, "Internal: the contender that this process is.")


def main(argv):
    """Runs the benchmark, or one contender of it."""
    if FLAGS.worker:
        serve(FLAGS.worker, FLAGS.work[0])
        return
    unknown = [n for n in FLAGS.contenders if n not in CONTENDERS]
    unknown += [n for n in FLAGS.work if n not in WORK]
    if unknown or len(argv) > 1:
        app.usage(shorthelp=True, detailed_error=f"unknown: {unknown or argv[1:]}")
        sys.exit(1)
    print(f"{describe_machine()}\n")
    print("| work | contender | ms a step | images/s | peak MB | its time / ours |")
    print("|---|---|---|---|---|---|")
    for work in FLAGS.work:
        for result in compare(work):
            print(
                f"| {work}, {FLAGS.towers} x {WORK[work][0]} "
                f"| {CONTENDERS[result['contender']]} | {result['step_ms']:.2f} "
                f"| {result['images_per_sec']:,.0f} | {result['peak_mb']:,.0f} "
                f"| {result['ratio']:.2f} |",
                flush=True,
            )
            if FLAGS.json:
                with open(FLAGS.json, "a") as file:
                    file.write(json.dumps(result) + "\n")


def describe_machine():
    """Says what this was measured on."""
    from importlib.metadata import version

    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras"))
    today = time.strftime("%Y-%m-%d")
    return f"{today}: {os.cpu_count()} CPUs {platform.machine()}, {versions}"


def compare(work):
    """Times all contenders on one kind of work.

    Returns:
        A dict for each contender; `ratio` is its step time over the first one's, the
        median over rounds.
    """
    processes = {name: start(name, work) for name in FLAGS.contenders}
    try:
        rounds = [
            {name: ask(process) for name, process in processes.items()}
            for _ in range(FLAGS.rounds)
        ]
    finally:
        for process in processes.values():
            process.stdin.close()
            process.wait()
    first = FLAGS.contenders[0]
    examples = WORK[work][0] * FLAGS.towers
    results = []
    for name in FLAGS.contenders:
        times = [answers[name]["step_ms"] for answers in rounds]
        ratios = [
            ms / answers[first]["step_ms"]
            for ms, answers in zip(times, rounds, strict=True)
        ]
        step_ms = statistics.median(times)
        results.append(
            {
                "work": work,
                "towers": FLAGS.towers,
                "contender": name,
                "step_ms": step_ms,
                "images_per_sec": examples / step_ms * 1000,
                "ratio": statistics.median(ratios),
                "peak_mb": rounds[-1][name]["peak_mb"],
                "rounds_ms": times,
            }
        )
    return results


def start(name, work):
    """Starts a contender and waits until it is warm."""
    process = subprocess.Popen(
        [
            sys.executable,
            os.path.abspath(__file__),
            f"--worker={name}",
            f"--work={work}",
            f"--towers={FLAGS.towers}",
            f"--steps_per_loop={FLAGS.steps_per_loop}",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if FLAGS.verbosity > 0 else subprocess.DEVNULL,
        text=True,
    )
    if process.stdout.readline() != "warm\n":
        raise SystemExit(f"{name} could not start; --verbosity=1 shows why.")
    return process


def ask(process):
    """Has a contender run one round.

    Returns:
        Its median `step_ms` and the most host memory it has used, `peak_mb`.
    """
    process.stdin.write("go\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def serve(name, work):
    """Is a contender: trains a round for each line of standard input."""
    # Keras's own prints must not mix with the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    fit = prepare(name, work)
    _, warmup, steps = WORK[work]
    fit(warmup)
    print("warm", file=answers, flush=True)
    for _ in sys.stdin:
        step_ms = 1000 * statistics.median(fit(steps))
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer = {"step_ms": step_ms, "peak_mb": peak_mb}
        print(json.dumps(answer), file=answers, flush=True)


def prepare(name, work):
    """Builds a contender.

    Returns:
        A function that trains so many steps and returns seconds a step, for each call.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import models
    from towers import devices, multi_gpu_model

    placed = devices.configure(FLAGS.towers)
    keras.utils.set_random_seed(0)
    examples = WORK[work][0] * FLAGS.towers
    shape = {"mlp": (784,), "resnet20": (32, 32, 3), "embedding": (20,)}[work]

    def build():
        if work == "embedding":
            return keras.Sequential(
                [
                    keras.Input(shape, dtype="int32"),
                    keras.layers.Embedding(ROWS, 64),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(10),
                ]
            )
        if work == "resnet20":
            return models.build("resnet20", input_shape=shape, num_classes=10, seed=0)
        layers = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
        return keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(10)])

    if name == "mirrored":
        scope = tf.distribute.MirroredStrategy(placed.towers).scope()
    else:
        scope = tf.device(placed.home if name == "towers" else placed.towers[0])
    with scope:
        model = build()
        if name == "towers":
            model = multi_gpu_model(model, gpus=placed.towers)
        model.compile(
            # Momentum would touch each row of an embedding in every step.
            keras.optimizers.SGD(0.01, momentum=0.0 if work == "embedding" else 0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=FLAGS.steps_per_loop if name == "towers" else 1,
        )
    random = np.random.default_rng(0)
    if work == "embedding":
        x = random.integers(0, ROWS, (examples, *shape)).astype("int32")
    else:
        x = random.normal(size=(examples, *shape)).astype("float32")
    batch = x, random.integers(0, 10, examples)
    data = tf.data.Dataset.from_tensors(batch).repeat()
    data = data.prefetch(tf.data.AUTOTUNE)

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.seconds, self.before, self.batch = [], None, -1

        def on_train_batch_end(self, batch, logs=None):
            now = time.perf_counter()
            if self.before is not None:
                self.seconds.append((now - self.before) / (batch - self.batch))
            self.before, self.batch = now, batch

    def fit(steps):
        clock = Clock()
        model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[clock])
        return clock.seconds

    return fit


if __name__ == "__main__":
    app.run(main)

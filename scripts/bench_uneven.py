"""What --split_ratios=auto gains where one tower is half as fast as the others.

    python -m scripts.bench_uneven

The first of two towers on logical CPUs takes twice as long as it computes. A run with
equal parts and one with the ratios that it has found take turns, in one process. Both
are compared with one device. Nothing else may run meanwhile.
"""

import argparse
import statistics
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

import towers
from scripts.slow_tower import slowed
from towers.monitoring.bottleneck.starvation import Starvation

BATCH, STEPS, ROUNDS = 512, 60, 7
# Steps in which the ratios are found.
FIRST_STEPS = 260


def make_model() -> keras.Model:
    """Makes an MLP whose updates are small beside what its towers compute."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(768, "relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    return model


def main() -> None:
    """Measures, and prints a line for each figure."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    # One thread of these is held by the slow tower.
    tf.config.threading.set_inter_op_parallelism_threads(3)
    towers.configure(num_gpus=2)
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * STEPS, 256)).astype("float32")
    y = x[:, :1] - x[:, 1:2]
    fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    models = {name: make_model() for name in ("one device", "equal", "auto")}
    said: list[str] = []
    resize = towers.callbacks.Resize(tempfile.mkdtemp(), balance=True)
    with slowed(0, times=2):
        runs = {name: towers.multi_gpu_model(models[name], gpus=2) for name in models}
        runs["one device"] = models["one device"]
        epochs = FIRST_STEPS // STEPS
        for name, run in runs.items():
            callbacks = {"equal": [Starvation(say=said.append)], "auto": [resize]}
            run.fit(x, y, epochs=epochs, callbacks=callbacks.get(name), **fit)
        print("verdict of equal parts:", said[-1])
        rates = {"equal": [], "auto": []}
        for _ in range(ROUNDS):
            for name in rates:
                begun_s = time.perf_counter()
                runs[name].fit(x, y, **fit)
                rates[name].append(len(x) / (time.perf_counter() - begun_s))
        models["one device"].fit(x, y, epochs=ROUNDS, **fit)
    plan = runs["auto"].builder.plan
    print("ratios found:", ":".join(str(each.ratio) for each in plan.replicas))
    ratios = [a / b for a, b in zip(rates["auto"], rates["equal"], strict=True)]
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):,.0f} examples/s")
    low, high = min(ratios), max(ratios)
    print(f"auto to equal: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")
    whole = models["one device"].get_weights()
    for name in rates:
        pairs = zip(whole, models[name].get_weights(), strict=True)
        most = max(float(np.abs(a - b).max()) for a, b in pairs)
        print(f"{name}: largest difference of a weight to one device {most:.1e}")


if __name__ == "__main__":
    main()

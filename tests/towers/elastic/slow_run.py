"""Trains on two towers, the first of which is said to be slow, and on one device.

    python -m tests.towers.elastic.slow_run FOLDER

It prints JSON.
"""

import json
import sys
from unittest import mock

import keras
import numpy as np

import towers
from towers.loop.timers import StepTimers

# Seconds that each tower is said to need for a batch: this machine may be busy.
BATCH_S = 2.0, 1.0


def model():
    """An MLP."""
    keras.utils.set_random_seed(5)
    layers = [keras.Input((256,))]
    layers += [keras.layers.Dense(512, "relu") for _ in range(3)]
    made = keras.Sequential([*layers, keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(1e-4), "mse")
    return made


def main(folder):
    """Trains both, and prints the ratios, losses and the difference of weights."""
    towers.configure(num_gpus=2)
    random = np.random.default_rng(0)
    x = random.normal(size=(256 * 40, 256)).astype("float32")
    y = x[:, :1] - x[:, 1:2]
    fit = {"batch_size": 256, "epochs": 6, "verbose": 0, "shuffle": False}
    one, many = model(), model()
    whole = one.fit(x, y, **fit)
    parallel = towers.multi_gpu_model(many, gpus=2)
    measured = StepTimers.totals

    def totals(timers):
        replicas = parallel.builder.plan.replicas
        ratios = [tower.ratio for tower in replicas]
        of_steps = measured(timers)
        seconds = [
            of_steps.steps * batch_s * ratio / sum(ratios)
            for batch_s, ratio in zip(BATCH_S, ratios, strict=True)
        ]
        return of_steps._replace(towers_s=tuple(seconds))

    with mock.patch.object(StepTimers, "totals", totals):
        resize = towers.callbacks.Resize(folder, balance=True)
        found = parallel.fit(x, y, callbacks=[resize], **fit)
    pairs = zip(one.get_weights(), many.get_weights(), strict=True)
    result = {
        "ratios": [each.ratio for each in parallel.builder.plan.replicas],
        "losses": found.history["loss"],
        "losses_of_one": whole.history["loss"],
        "difference": max(float(np.abs(a - b).max()) for a, b in pairs),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])

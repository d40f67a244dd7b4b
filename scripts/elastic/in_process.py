"""Resizes of a run within its process: how long, and whether the numbers stay."""

import statistics
import time
from typing import Any

import keras
import numpy as np

import towers

BATCH, STEPS, RESIZES = 24, 200, 20


def build(name: str) -> keras.Model:
    """Returns a model of which no number depends on how many towers there are."""
    keras.utils.set_random_seed(1)
    if name == "mlp":
        layers = [keras.layers.Dense(256, "relu") for _ in range(3)]
        return keras.Sequential([keras.Input([64]), *layers, keras.layers.Dense(10)])
    inputs = hidden = keras.Input([16, 16, 3])
    for filters in (16, 16, 32, 32, 64, 64):
        conv = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)
        hidden = conv(hidden)
        hidden = keras.layers.GroupNormalization(8)(hidden)
        hidden = keras.layers.Activation("relu")(hidden)
    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    return keras.Model(inputs, keras.layers.Dense(10)(hidden))


class Resizes(keras.callbacks.Callback):
    """Takes the time of steps, and resizes before some.

    Attributes:
        losses: The running loss after each step.
        gaps_s: For each change, whether its layout was seen before, and seconds
            without a step: to the end of the next step, less a usual one.
    """

    def __init__(self, layouts: dict[int, Any]):
        super().__init__()
        self.losses, self.gaps_s = [], []
        self._layouts, self._seen = layouts, {(0, 1)}
        self._step, self._ended_s, self._changed = 0, None, None
        self._usual_s = []

    def on_train_batch_begin(self, batch, logs=None):
        """Resizes, if it is time."""
        gpus = self._layouts.get(self._step)
        if gpus is not None and hasattr(self.model, "resize"):
            self._changed = gpus in self._seen
            self._seen.add(gpus)
            self.model.resize(gpus=gpus)

    def on_train_batch_end(self, batch, logs=None):
        """Takes the time."""
        now_s = time.perf_counter()
        if self._changed is not None:
            usual_s = statistics.median(self._usual_s[-20:])
            self.gaps_s.append((self._changed, now_s - self._ended_s - usual_s))
        elif self._ended_s is not None:
            self._usual_s.append(now_s - self._ended_s)
        self._changed, self._ended_s = None, now_s
        self._step += 1
        self.losses.append(logs["loss"])


def layouts(seed: int) -> dict[int, tuple[int, ...]]:
    """Returns random layouts of 1 to 4 towers, by the step before which they begin."""
    random = np.random.default_rng(seed)
    steps = sorted(random.choice(np.arange(5, STEPS), RESIZES, replace=False))
    found, gpus = {}, (0, 1)
    for step in steps:
        before = gpus
        while gpus == before:
            gpus = tuple(range(random.integers(1, 5)))
        found[int(step)] = gpus
    return found


def fit(model: Any, seed: int | None) -> tuple[Resizes, list[np.ndarray]]:
    """Trains for so many steps; returns what was measured, and the weights.

    `seed` chooses the layouts; `None` for no resize.
    """
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Larger steps make much of rounding: two towers, never resized, differ as well.
    model.compile(keras.optimizers.SGD(0.005, momentum=0.9), loss)
    shape = model.input_shape[1:]
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, *shape))
    y = np.random.default_rng(1).integers(0, 10, BATCH * STEPS)
    resizes = Resizes({} if seed is None else layouts(seed))
    model.fit(
        x.astype("float32"), y, BATCH, verbose=0, shuffle=False, callbacks=[resizes]
    )
    return resizes, model.get_weights()


def tracing_s(name: str, gpus: tuple[int, ...]) -> float:
    """Returns what the first step of a new tower model takes, less a usual one."""
    model = towers.multi_gpu_model(build(name), gpus=gpus)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    shape = model.input_shape[1:]
    x, y = np.zeros([BATCH, *shape], "float32"), np.zeros([BATCH])
    model.optimizer.build(model.trainable_variables)
    times_s = []
    for _ in range(6):
        begun_s = time.perf_counter()
        model.fit(x, y, BATCH, verbose=0, shuffle=False)
        times_s.append(time.perf_counter() - begun_s)
    return times_s[0] - statistics.median(times_s[1:])


def _apart(found, expected):
    """The largest difference in each variable, relative to its largest number."""
    return max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(found, expected, strict=True)
    )


def measure(name: str, seed: int) -> dict[str, Any]:
    """Compares a run that is resized with plain Keras on one device."""
    plain, expected = fit(build(name), seed)
    resized, found = fit(towers.multi_gpu_model(build(name), gpus=2), seed)
    losses = np.abs(np.array(resized.losses) / np.array(plain.losses) - 1)
    _, constant = fit(towers.multi_gpu_model(build(name), gpus=3), None)
    seen = [gap for known, gap in resized.gaps_s if known]
    new = [gap for known, gap in resized.gaps_s if not known]
    traced = [tracing_s(name, tuple(range(k))) for k in (1, 3, 4)]
    return {
        "resizes": len(resized.gaps_s),
        "loss of each step, largest relative difference": float(losses.max()),
        "weights, largest relative difference": _apart(found, expected),
        "the same of 3 towers that stay": _apart(constant, expected),
        "layout seen before, s": [statistics.median(seen), max(seen)],
        "new layout, s": [statistics.median(new), max(new)],
        "first step of a new model, s": [statistics.median(traced), max(traced)],
    }

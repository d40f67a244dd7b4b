"""A host that fits a small model with others, as a launcher starts it: a process.

    python -m tests.towers.elastic.fits FOLDER [OPTIONS]

Adds a line of JSON to FOLDER/steps-PID for each step, and writes the history and the
weights to FOLDER/result-PID.npz. Waits behind a step until FOLDER/steps says that there
may be more, or hosts come or go. If there is FOLDER/fails-SLOT, it ends at once with
the code that stands there; if there is FOLDER/raises-SLOT, its next step fails, once;
if there is FOLDER/options-SLOT, it has these options.
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from tests.limits import HANG_S
from tests.valued import valued

EXAMPLES, BATCH, WORDS = 121, 16, 41
# The last one of an epoch is smaller than the others.
STEPS_PER_EPOCH = 8
# The generations of hosts in which the model was traced; `None` for alone.
TRACED_IN = []
_DEFAULTS = {
    "data": "arrays",
    "epochs": 6,
    "gpus": 1,
    "validates": False,
    "steps_per_execution": 1,
    "variable_update": "parameter_server",
    "shard_optimizer_state": None,
    "shard_embeddings": "none",
    "is_built": True,
    "seed": 0,
}
# Of `multi_gpu_model`.
_OF_TOWERS = "variable_update", "shard_optimizer_state", "shard_embeddings"


def with_defaults(options):
    """Completes options."""
    return _DEFAULTS | options


def plain_model(options):
    """A model that begins, as its data, with the same in each process."""
    import keras
    import tensorflow as tf

    from towers.hosts import group

    class Dense(keras.layers.Dense):
        """Notes with whom this process is connected as a step is traced."""

        def call(self, inputs, training=None):
            if tf.is_symbolic_tensor(inputs):
                hosts = group.joined()
                TRACED_IN.append(None if hosts is None else hosts.generation)
            return super().call(inputs, training=training)

    keras.utils.set_random_seed(7)
    layers = [Dense(9, activation="tanh"), keras.layers.Dense(2)]
    if options["shard_embeddings"] != "none":
        layers = [keras.layers.Embedding(WORDS, 3), keras.layers.Flatten(), *layers]
    model = keras.Sequential([keras.Input([5])] * options["is_built"] + layers)
    model.compile(**_compiled(options))
    return model


def _compiled(options):
    import keras

    steps = options["steps_per_execution"]
    return {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": "mse",
        "metrics": ["mae"],
        "steps_per_execution": steps,
    }


def arguments(options):
    """What `fit` is given, besides callbacks."""
    import numpy as np

    rng = np.random.default_rng(options["seed"])
    x = rng.normal(size=[EXAMPLES, 5]).astype("float32")
    if options["shard_embeddings"] != "none":
        x = rng.integers(0, WORDS, size=[EXAMPLES, 5])
    y = rng.normal(size=[EXAMPLES, 2]).astype("float32")
    given = {"epochs": options["epochs"], "verbose": 0}
    if options["validates"]:
        given |= {"validation_data": (x[:40], y[:40]), "validation_batch_size": BATCH}
    return given | _DATA[options["data"]](x, y)


def _arrays(x, y):
    return {"x": x, "y": y, "batch_size": BATCH, "shuffle": True}


def _dataset(x, y):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=5)
    return {"x": data.batch(BATCH).prefetch(2)}


def _pipeline(x, y):
    from towers.input_pipeline import ArraySource, make_dataset

    source = ArraySource(x, y)
    return {"x": make_dataset(source, "train", BATCH, training=True, seed=3)}


_DATA = {"arrays": _arrays, "dataset": _dataset, "pipeline": _pipeline}


def steps_of(write):
    """A callback that tells of each call of training."""
    import keras

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = int(self.model.optimizer.iterations)
            write(step, {name: float(value) for name, value in logs.items()})

    return Steps()


def main(folder, options="{}"):
    """Trains until the end."""
    folder, slot, pid = Path(folder), int(os.environ["TOWERS_SLOT"]), os.getpid()
    if (fails := folder / f"fails-{slot}").exists():
        return int(fails.read_text())

    import numpy as np

    import towers
    from towers.hosts import group

    options = with_defaults(json.loads(options))
    if (others := folder / f"options-{slot}").exists():
        options |= json.loads(others.read_text())
    devices = towers.configure(num_gpus=options["gpus"], hosts="auto")
    parallel = towers.multi_gpu_model(
        plain_model(options),
        gpus=devices.towers,
        **valued(**{name: options[name] for name in _OF_TOWERS}),
    )
    parallel.compile(**_compiled(options))
    raises = folder / f"raises-{slot}"
    launcher = int(os.environ["TOWERS_TEST_LAUNCHER"])

    with open(folder / f"steps-{pid}", "a", buffering=1) as file:

        def write(step, logs):
            hosts = group.joined()
            about = {"pid": pid, "slot": slot, "step": step, "logs": logs}
            about |= {"rank": hosts.rank, "hosts": hosts.count, "time": time.time()}
            about |= {"launcher": launcher, "generation": hosts.generation}
            about |= {"graph": id(parallel.train_function), "traced_in": TRACED_IN}
            file.write(json.dumps(about) + "\n")
            if raises.exists():
                raises.unlink()
                raise RuntimeError("So a test has asked for.")
            _wait(lambda: is_to_stop() or step < _allowed(folder))

        def is_to_stop():
            return group.change() or checkpoint.run._signals.stop

        checkpoint = towers.callbacks.Checkpoint(folder / "run")
        callbacks = [
            steps_of(write),
            checkpoint,
            towers.callbacks.Resize(folder / "run"),
        ]
        history = parallel.fit(**arguments(options), callbacks=callbacks).history
    new = folder / f"new-{pid}.npz"
    np.savez(new, *parallel.get_weights(), **history)
    os.replace(new, folder / f"result-{pid}.npz")
    return 0


def _allowed(folder):
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "steps").read_text())
    return 0


def _wait(holds):
    # A test that has failed no longer says that there may be more steps.
    limit_s = time.monotonic() + HANG_S
    while not holds():
        if time.monotonic() > limit_s:
            raise TimeoutError("Nobody says how many steps there may be.")
        threading.Event().wait(0.005)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

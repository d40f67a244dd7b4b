"""Memory and time of saving: Towers, Keras and TensorFlow, by the size of the state.

    python -m scripts.bench_checkpoint --state_mb=100,1000
    python -m scripts.bench_checkpoint --state_mb=100,1000 --disk_mb_per_s=100

Each contender trains the same model, Adam and dense layers, in a process of its own,
for three epochs, and saves after each. Measured are the peak of its memory (VmHWM, of
which the imports are a part), and how long training stands still between the last step
of an epoch and the next step. After the last epoch, that is until `fit` has returned.

With --disk_mb_per_s, the processes are in a control group that reads and writes no more
of the device of --folder. Version 1 of control groups holds back only what a process
itself writes to the disk (fsync). Keras and TensorFlow leave that to the kernel, so
what they show there is the time to write into memory.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from scripts.control_group import disk

LAYERS, STEPS, EPOCHS = 8, 4, 3
# For a step, and the libraries, beside the state and what a save may add.
ROOM_MB = 2_000


def main() -> None:
    """Runs all contenders with all sizes, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state_mb", default="100,1000", help="Sizes, with commas.")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--disk_mb_per_s", type=int, help="A slower disk.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(_measure(options.worker, int(options.state_mb), options)))
        return
    print(
        "| state, MB | contender | peak, MB | in an epoch's place, s | at the end, s |"
    )
    print(
        "| --------: | --------- | -------: | ---------------------: | ------------: |"
    )
    for state_mb in map(int, options.state_mb.split(",")):
        for name in options.contenders.split(","):
            print(
                f"| {state_mb} | {name} | {_row(name, state_mb, options)} |", flush=True
            )


def _row(name, state_mb, options):
    needed = 4 * state_mb + ROOM_MB
    if (free := _free_mb()) < needed:
        return f"left out: {needed} MB needed, {free} MB free | | "
    command = [sys.executable, "-m", "scripts.bench_checkpoint", f"--worker={name}"]
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        disk(options.disk_mb_per_s, folder) as inside,
    ):
        command += [f"--state_mb={state_mb}", f"--folder={folder}"]
        ended = subprocess.run(
            [*inside, *command], capture_output=True, text=True, check=False
        )
    if ended.returncode:
        return f"failed: {(ended.stderr.splitlines() or [''])[-1]} | | "
    found = json.loads(ended.stdout.splitlines()[-1])
    return f"{found['peak_mb']:,.0f} | {found['pause_s']:.2f} | {found['end_s']:.2f}"


def _free_mb():
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    return (
        int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]) // 1024
    )


def _measure(name, state_mb, options):
    """Trains, in this process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import numpy as np
    import psutil

    keras.utils.set_random_seed(0)
    # Of each parameter, Adam has two more numbers.
    width = round((state_mb * 2**20 / 4 / 3 / LAYERS) ** 0.5)
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input([width]), *layers])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    x = np.random.default_rng(0).normal(size=[STEPS, width]).astype("float32")
    trained, callbacks = CONTENDERS[name](model, pathlib.Path(options.folder))

    class Clock(keras.callbacks.Callback):
        """Notes the pauses between the steps of two epochs."""

        def __init__(self):
            super().__init__()
            self.ended, self.pauses = None, []

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0 and self.ended is not None:
                self.pauses.append(time.perf_counter() - self.ended)

        def on_train_batch_end(self, batch, logs=None):
            self.ended = time.perf_counter()

    clock = Clock()
    history = trained.fit(
        x, x, batch_size=1, epochs=EPOCHS, verbose=0, callbacks=[clock, *callbacks]
    )
    end_s = time.perf_counter() - clock.ended
    assert len(history.epoch) == EPOCHS
    status = pathlib.Path(f"/proc/{psutil.Process().pid}/status").read_text()
    return {
        "peak_mb": int(status.partition("VmHWM:")[2].split()[0]) / 1024,
        "pause_s": statistics.median(clock.pauses),
        "end_s": end_s,
    }


def _towers(saves, background=None):
    def make(model, folder):
        import towers

        parallel = towers.multi_gpu_model(model, gpus=1)
        checkpoint = towers.callbacks.Checkpoint(folder, background=background)
        return parallel, [checkpoint] if saves else []

    return make


def _keras(model, folder):
    return model, []


def _model_checkpoint(model, folder):
    import keras

    return model, [keras.callbacks.ModelCheckpoint(folder / "model.keras")]


def _backup(model, folder):
    import keras

    keeps = {"delete_checkpoint": False}
    return model, [keras.callbacks.BackupAndRestore(folder / "backup", **keeps)]


def _manager(model, folder):
    import keras
    import tensorflow as tf

    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(saved, str(folder), max_to_keep=3)
    save = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: manager.save())
    return model, [save]


CONTENDERS = {
    "towers": _towers(saves=False),
    "towers_checkpoint": _towers(saves=True, background=True),
    "towers_checkpoint_waits": _towers(saves=True, background=False),
    "keras": _keras,
    "keras_model_checkpoint": _model_checkpoint,
    "keras_backup_and_restore": _backup,
    "tf_checkpoint_manager": _manager,
}


if __name__ == "__main__":
    main()

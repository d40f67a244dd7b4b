"""How memory and open files grow over 20,000 steps, saving every 100.

python -m scripts.faults.growth
"""

import os
import tempfile

import keras

import towers
from scripts.faults.training import on_two_towers

STEPS, EVERY = 20_000, 1_000


class Watch(keras.callbacks.Callback):
    """Prints both every so many steps."""

    def __init__(self):
        super().__init__()
        self._step = 0
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        """Counts."""
        self._step += 1
        if self._step % EVERY == 0:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            files = len(os.listdir("/proc/self/fd"))
            self.found.append((megabytes, files))
            print(f"step {self._step}: {megabytes:.1f} MB, {files} files", flush=True)


def main() -> None:
    """Trains, and says what was found."""
    parallel, data = on_two_towers("mlp", (8, 8, 1), 2048, 32, keras.optimizers.Adam)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        parallel.fit(
            data,
            steps_per_epoch=STEPS // 20,
            epochs=20,
            callbacks=[watch, towers.callbacks.Checkpoint(folder, save_steps=100)],
            verbose=0,
        )
    (first, files), (last, files_last) = watch.found[0], watch.found[-1]
    print(f"memory {last / first - 1:+.2%}, open files {files} to {files_last}")


if __name__ == "__main__":
    main()

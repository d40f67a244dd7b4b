"""Python ends while threads of TensorFlow call Python functions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).parents[3]
# Examples on disk, whose rows Python reads; of an iterator that still reads ahead.
READS = """
import sys
import numpy as np
from towers.input_pipeline import ArraySource, make_dataset

np.save(sys.argv[1], np.zeros((640, 64, 64, 3), "uint8"))
images = np.load(sys.argv[1], mmap_mode="r")
source = ArraySource(images, np.zeros(640, "int64"), num_classes=3)
iterator = iter(make_dataset(source, "train", 64, repeat=True))
next(iterator)
raise SystemExit(7)
"""
# A data set that has far more to read ahead than it has time for.
READS_ON = """
import time
import towers

towers.configure(num_gpus=2)
import tensorflow as tf
from towers.program.python_calls import until_exit

def later(number):
    time.sleep(0.002)
    return number

data = tf.data.Dataset.range(100_000)
called = until_exit(later)
data = data.map(lambda number: tf.numpy_function(called, [number], tf.int64))
iterator = iter(data.prefetch(1_000))
next(iterator)
raise SystemExit(7)
"""
# A user's data set, whose batches take a moment; of a fit that ends in the middle.
FITS = """
import time
import towers

towers.configure(num_gpus=2)
import keras
import numpy as np

class Slow(keras.utils.PyDataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)
        return np.zeros((8, 4), "float32"), np.zeros((8, 1), "float32")

def end(batch, logs):
    if batch == 3:
        raise SystemExit(7)

callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
parallel = towers.multi_gpu_model(model)
parallel.compile("sgd", "mse")
parallel.fit(Slow(), verbose=0, callbacks=[callback])
"""
# A user's data set that TensorFlow caches in a file; of a fit that ends in the middle.
CACHES = """
import sys, time
import towers

towers.configure(num_gpus=2)
import keras
import tensorflow as tf

def rows():
    for _ in range(100_000):
        time.sleep(0.002)
        yield tf.zeros([8, 4]).numpy(), tf.zeros([8, 1]).numpy()

def end(batch, logs):
    if batch == 3:
        raise SystemExit(7)

spec = tf.TensorSpec([8, 4]), tf.TensorSpec([8, 1])
data = tf.data.Dataset.from_generator(rows, output_signature=spec)
callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
parallel = towers.multi_gpu_model(model)
parallel.compile("sgd", "mse")
parallel.fit(data.cache(sys.argv[1]).prefetch(50), verbose=0, callbacks=[callback])
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [READS, READS_ON, FITS, CACHES])
def test_python_ends_with_its_exit_code(tmp_path, script):
    command = [sys.executable, "-c", script, str(tmp_path / "images.npy")]
    # What TensorFlow logs is to be seen, whatever the tests' own setting.
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, timeout=HANG_S, capture_output=True
    )
    assert done.returncode == 7, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    # A part of the data is no whole cache.
    assert not [*tmp_path.glob("*.index")]


def _that_call_python():
    replayed = ROOT / "towers/model/program.py"
    for path in [*sorted(ROOT.glob("input_pipeline/**/*.py")), replayed]:
        if "numpy_function(" in (text := path.read_text()) or "py_function(" in text:
            yield pytest.param(text, id=str(path.relative_to(ROOT)))


@pytest.mark.parametrize("text", [*_that_call_python()])
def test_all_that_data_sets_call_is_refused_at_exit(text):
    assert "until_exit" in text

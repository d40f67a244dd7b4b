"""The README's first Python example does what it says."""

import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).parents[1] / "README.md"

_CHECK = """
assert [d[-5:] for d in parallel.builder.devices] == ["CPU:0", "CPU:1"]
loss = keras.models.load_model("quadratic.keras").evaluate(x, y, verbose=0)
assert loss < 0.01, loss
"""


def test_the_first_python_example(tmp_path):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    # Keras draws the seeds of weights from `random`.
    start = "import random; random.seed(1)\n"
    start += "import tensorflow as tf; tf.config.set_visible_devices([], 'GPU')\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code + _CHECK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

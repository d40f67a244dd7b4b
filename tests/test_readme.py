"""The README's first Python example does what it says."""

import pathlib
import re

from tests import warm

README = pathlib.Path(__file__).parents[1] / "README.md"

_CHECK = """
assert [d[-5:] for d in parallel.builder.devices] == ["CPU:0", "CPU:1"]
loss = keras.models.load_model("quadratic.keras").evaluate(x, y, verbose=0)
assert loss < 0.01, loss
"""


def test_the_first_python_example(tmp_path):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    # Keras draws the seeds of weights from `random`.
    start = f"import os, random; os.chdir({str(tmp_path)!r}); random.seed(1)\n"
    program = start + code + _CHECK
    done = warm.run("tests.program", program, timeout_s=300)
    assert done.returncode == 0, done.stderr

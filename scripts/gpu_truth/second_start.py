"""Times how soon a second start trains, with XLA's results of the first at hand.

python -m scripts.gpu_truth.second_start --work=resnet50_224 --output=DIR

Starts are processes, one after another: Towers with its cache, three times; then Keras
on one device with TensorFlow's own, twice. The first of each compiles. Reported are the
seconds from `compile` to the end of the first step, and a digest of the weights, which
has to be the same with the cache and without.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

from absl import app, flags

from ..bench import works

FLAGS = flags.FLAGS
ROOT = pathlib.Path(__file__).resolve().parents[2]

flags.DEFINE_enum("work", "resnet20", [*works.WORKS], "What to train.")
flags.DEFINE_integer("towers", 2, "Towers.")
flags.DEFINE_integer("gpu_memory_limit_mb", 4096, "Memory of a logical GPU, in MB.")
flags.DEFINE_string("output", None, "Folder of figures and caches.", required=True)

STARTS = "towers", "towers", "towers", "keras", "keras"


def main(argv: Sequence[str]) -> None:
    """Starts processes, and writes what they tell."""
    del argv
    output = pathlib.Path(FLAGS.output).resolve()
    lines = []
    for who in STARTS:
        told = _start(who, output)
        lines.append(
            f"{who:<8} {told['first_s']:7.1f} s  weights {told['weights']}  "
            f"{told['results']} results, {told['mb']:.1f} MB"
        )
        print(lines[-1], flush=True)
        (output / "second_start.txt").write_text("\n".join(lines))


def _start(who, output):
    cache = {"XDG_CACHE_HOME": str(output / "cache"), "TOWERS_XLA_CACHE": "true"}
    environ = cache if who == "towers" else {}
    folder = output / "cache" / "towers" / "xla"
    if who == "keras":
        folder = output / "keras"
        environ["TF_XLA_FLAGS"] = f"--tf_xla_persistent_cache_directory={folder}"
    asked = who, FLAGS.work, FLAGS.towers, FLAGS.gpu_memory_limit_mb
    # Within absl's `app.run`, TensorFlow would list its devices as it is imported.
    code = f"from scripts.gpu_truth import second_start as s; s.train{asked}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environ, stdout=subprocess.PIPE, check=True
    )
    sizes = [path.stat().st_size for path in folder.rglob("*.pb*")]
    told = json.loads(done.stdout.splitlines()[-1])
    return told | {"results": len(sizes), "mb": sum(sizes) / 1e6}


def train(who: str, work: str, towers_count: int, gpu_memory_limit_mb: int) -> None:
    """Trains one step, and prints its figures as JSON.

    Args:
        who: "towers" or "keras".
        work: What to train.
        towers_count: Number of towers.
        gpu_memory_limit_mb: Memory of a logical GPU, in MB.
    """
    import numpy as np
    import tensorflow as tf

    import towers

    gpus = tf.config.list_physical_devices("GPU") if who == "keras" else ()
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if who == "towers":
        devices = _configure(towers_count, gpu_memory_limit_mb)
    model = works.build(work)
    examples, labels = works.batch(work, towers_count)
    begun_s = time.perf_counter()
    trained = model
    if who == "towers":
        trained = towers.multi_gpu_model(
            model, devices.towers, variable_update="parameter_server"
        )
    trained.compile(works.optimizer(work), works.loss(), jit_compile=True)
    trained.train_on_batch(examples, labels)
    first_s = time.perf_counter() - begun_s
    weights = b"".join(np.asarray(value).tobytes() for value in model.get_weights())
    digest = hashlib.sha256(weights).hexdigest()[:12]
    print(json.dumps({"first_s": first_s, "weights": digest}))


def _configure(count, memory_mb):
    """Sets up towers: a GPU each, or logical ones of the only GPU."""
    import towers
    from towers.machine import nvml

    # TensorFlow must not list its devices before the cache is set up.
    if count > 1 and nvml.has_gpus() and nvml.gpu(1) is None:
        limit = {"gpu_memory_limit_mb": memory_mb}
        return towers.configure(num_gpus=1, gpu_split=count, **limit)
    return towers.configure(num_gpus=count)


if __name__ == "__main__":
    app.run(main)

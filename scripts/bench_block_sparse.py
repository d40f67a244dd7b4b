"""Times block-sparse products against dense ones, alternately, on the same machine.

Each call computes the outputs and the gradients of the input and of the kernel or its
blocks, without a bias. Each framework is a process of its own, and has a dense product
beside the sparse ones. In each round, and at each sparsity, every contender computes in
turn while the others wait; so a drift of the machine's speed meets all of them. At the
start each is checked at a small size against a dense masked product. Nothing else may
run meanwhile.

    python scripts/bench_block_sparse.py
    python scripts/bench_block_sparse.py --contenders=random,butterfly --sparsities=0.9
    python scripts/bench_block_sparse.py --device=GPU:0 --dtype=bfloat16

Contenders (--contenders); those of PyTorch need pip install -e '.[bench]':

    keras_dense     Keras Dense, the yardstick; it always runs
    block_diagonal, butterfly, monarch, local_strided, random, erdos_renyi,
    barabasi_albert
                    BlockSparseDense with this pattern
    tf_csr          TensorFlow's sparse product, on --pattern
    torch_dense     PyTorch's dense product; it runs if one of the next two does
    torch_bsr       torch.sparse_bsr on --pattern; gradient of the blocks: gathered, a
                    batched product
    torch_bsr_dense the same; gradient of the blocks: a dense product
    numpy_dense     NumPy's dense product; it runs if the next one does
    scipy_bsr       SciPy's BSR on --pattern

Times are medians of rounds, each the median of its calls. Reported are also by how many
times a contender is faster than Keras Dense and than the dense product of its own
framework, medians over rounds of ratios in the same round; the part that the latter is
of the ideal, 1 / (1 - sparsity); bytes of parameters and of Adam's slots; and what a
call takes of memory beyond those in use before it, with what it returns. Below the
table is what frameworks cannot do.
"""

import contextlib
import functools
import importlib.metadata
import os
import pathlib
import re
import sys
import tempfile
import warnings

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.bench import report
from scripts.bench.contenders import check_flags
from scripts.race import take_turns
from scripts.sparse_bench import results
from scripts.sparse_bench.contenders import CONTENDERS, by_module
from scripts.sparse_bench.worker import Job

FLAGS = flags.FLAGS

flags.DEFINE_list("contenders", list(CONTENDERS), "Who multiplies; see above.")
flags.DEFINE_integer("inputs", 4096, "Inputs of the matrix.", lower_bound=1)
flags.DEFINE_integer("outputs", 4096, "Outputs of the matrix.", lower_bound=1)
flags.DEFINE_integer("batch", 256, "Examples.", lower_bound=1)
flags.DEFINE_integer("block_size", 32, "Rows and columns of a block.", lower_bound=1)
flags.DEFINE_list(
    "sparsities", ["0.6", "0.75", "0.9", "0.95"], "Shares of the matrix that are zero."
)
flags.DEFINE_string("pattern", "random", "Pattern of other frameworks.")
flags.DEFINE_integer("rounds", 5, "Rounds.", lower_bound=1)
flags.DEFINE_float(
    "seconds", 0.4, "Least time of the calls of a contender in a round.", lower_bound=0
)
flags.DEFINE_enum(
    "dtype",
    "float32",
    ["float32", "bfloat16", "float16"],
    "What is multiplied. Parameters are float32.",
)
flags.DEFINE_string("device", "CPU", "CPU, or a GPU such as GPU:0.")
flags.DEFINE_bool("tf32", True, "Whether GPUs multiply float32 as TF32.")
flags.DEFINE_bool("jit_compile", False, "Whether TensorFlow compiles with XLA.")
flags.DEFINE_integer("threads", os.cpu_count(), "Threads of a process.", lower_bound=1)
flags.DEFINE_string("json", None, "File to append a JSON line for each result to.")


def main(argv):
    """Runs the benchmark."""
    try:
        check_flags(argv, FLAGS, contenders=CONTENDERS, sparsities=None)
        sparsities = check_sizes()
        masks = patterns(sparsities)
    except ValueError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "masks.npz")
        np.savez(path, **masks)
        times = take_turns(
            jobs(sparsities, path),
            functools.partial(results.start, verbose=FLAGS.verbosity > 0),
            FLAGS.rounds * len(sparsities),
            left_out,
        )
    answers = [each.starts[0] for each in times.values()]
    facts = [fact for each in answers for fact in each["facts"]]
    turns = [turn for each in times.values() for turn in each.rounds]
    rows = [each | settings() for each in results.summaries(facts, turns)]
    found = report.show(rows, results.COLUMNS, results.cells, machine(), FLAGS.json)
    notes = [note for each in answers for note in each["notes"]]
    for each in answers:
        notes += [f"{name}: left out: {why}" for name, why in each["left_out"].items()]
    print("", *(f"- {note}" for note in notes), sep="\n")
    if not found:
        sys.exit("No contender could multiply.")
    wrong = [name for each in answers for name in each["wrong"]]
    if wrong:
        sys.exit(f"Wrong results: {', '.join(wrong)}.")


def left_out(job, reason):
    """Says why a framework does not multiply."""
    print(f"{job.module} is left out: {reason}", file=sys.stderr)


def check_sizes() -> list[float]:
    """Checks the other flags before anything starts.

    Returns:
        The sparsities.

    Raises:
        ValueError: If a flag is wrong.
    """
    for flag in ("inputs", "outputs"):
        if FLAGS[flag].value % FLAGS.block_size:
            raise ValueError(
                f"Received --{flag}={FLAGS[flag].value}; expected a multiple of "
                f"--block_size={FLAGS.block_size}."
            )
    if not re.fullmatch(r"CPU|GPU:\d+", FLAGS.device):
        raise ValueError(
            f"Received --device={FLAGS.device}; expected CPU, or a GPU such as GPU:0."
        )
    try:
        sparsities = [float(each) for each in FLAGS.sparsities]
    except ValueError:
        sparsities = [-1.0]
    if not all(0 <= each < 1 for each in sparsities):
        raise ValueError(
            f"Received --sparsities={','.join(FLAGS.sparsities)}; expected numbers of "
            "at least 0 and less than 1, such as 0.75,0.9."
        )
    return sparsities


def patterns(sparsities) -> dict[str, np.ndarray]:
    """Returns the mask of --pattern for each sparsity.

    Raises:
        ValueError: There is no such pattern of single blocks.
    """
    # It imports TensorFlow, for which wrong flags need not wait.
    from towers.models.block_sparse import patterns as known

    masks = {}
    for sparsity in sparsities:
        with warnings.catch_warnings():
            # The table tells which sparsity a pattern has.
            warnings.simplefilter("ignore")
            layouts = known.layouts(
                FLAGS.pattern, FLAGS.inputs, FLAGS.outputs, FLAGS.block_size, sparsity
            )
        if len(layouts) > 1 or layouts[0].block_shape != (FLAGS.block_size,) * 2:
            raise ValueError(
                f"Received --pattern={FLAGS.pattern}; expected a pattern of single "
                "blocks, such as random."
            )
        masks[str(sparsity)] = layouts[0].mask
    return masks


def jobs(sparsities, masks):
    """Returns the job of each framework's process."""
    return [
        Job(
            module=module,
            contenders=contenders,
            sparsities=tuple(sparsities),
            masks=masks,
            **settings(),
        )
        for module, contenders in by_module(FLAGS.contenders).items()
    ]


def settings():
    """Returns the flags that each process and each JSON line has."""
    names = (
        *("inputs", "outputs", "batch", "block_size", "dtype", "device", "threads"),
        *("seconds", "jit_compile", "tf32"),
    )
    return {name: FLAGS[name].value for name in names}


def machine():
    """Says in lines what was measured, and on what."""
    versions = [report.machine()]
    for name in ("numpy", "scipy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    size = (
        f"{FLAGS.inputs} x {FLAGS.outputs}, batch {FLAGS.batch}, blocks of "
        f"{FLAGS.block_size}, {FLAGS.dtype}, {FLAGS.device}, {FLAGS.threads} threads"
    )
    if FLAGS.device != "CPU":
        size += f", TF32 {'on' if FLAGS.tf32 else 'off'}"
    size += ", XLA" if FLAGS.jit_compile else ""
    return f"{', '.join(versions)}\n\n{size}, {FLAGS.rounds} rounds"


if __name__ == "__main__":
    app.run(main)

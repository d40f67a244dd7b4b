"""The benchmark of block-sparse products: its results, times and ratios."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from scripts.sparse_bench import case as cases
from scripts.sparse_bench import keras_layers, results, scipy_bsr, worker
from scripts.sparse_bench.contenders import CONTENDERS, YARDSTICK, by_module
from scripts.sparse_bench.worker import Job
from tests.limits import HANG_S
from tests.variants import slow

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "bench_block_sparse.py"
SMALL = (
    *("--inputs=64", "--outputs=32", "--batch=4", "--block_size=8"),
    *("--rounds=2", "--seconds=0", "--threads=1"),
)
OURS = [name for name, each in CONTENDERS.items() if each.module == "keras_layers"]


def _run(*flags):
    # What TensorFlow says at its import is no message of the benchmark.
    return subprocess.run(
        [sys.executable, SCRIPT, *flags],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def _job(module, contenders=(), **other):
    given = {
        "module": module,
        "contenders": contenders,
        "inputs": 96,
        "outputs": 64,
        "batch": 16,
        "block_size": 8,
        "sparsities": (0.75,),
        "masks": "",
        "dtype": "float32",
        "device": "CPU",
        "threads": 1,
        "seconds": 0.0,
        "jit_compile": False,
        "tf32": False,
    }
    return Job(**given | other)


def _check(module, name, **other):
    job = _job(module.__name__.rpartition(".")[2], (name,), **other)
    built = module.build(name, cases.small(8), job)
    cases.check(built.results(), job.precision)
    return built


@pytest.mark.quick_one_in(2)
@pytest.mark.filterwarnings("ignore:The pattern .* has a sparsity:UserWarning")
@pytest.mark.parametrize("name", OURS)
def test_tensorflow_is_right(name):
    built = _check(keras_layers, name)
    assert built.parameter_bytes == 4 * built.size
    assert built.slot_bytes == 2 * built.parameter_bytes


@pytest.mark.parametrize("name", ["random", "monarch", slow("butterfly")])
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_mixed_precision_is_right(name, dtype):
    _check(keras_layers, name, dtype=dtype)


@pytest.mark.parametrize("name", ["numpy_dense", "scipy_bsr"])
def test_scipy_is_right(name):
    built = _check(scipy_bsr, name)
    small = cases.small(8)
    assert built.size == (small.kernel if "dense" in name else small.blocks).size


@pytest.mark.parametrize("name", ["torch_dense", "torch_bsr", "torch_bsr_dense"])
def test_torch_is_right(name):
    # In a process of its own, as PyTorch and TensorFlow disturb each other.
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import json, sys\n"
            "from scripts.sparse_bench import case, torch_bsr, worker\n"
            "job = worker.Job(**json.loads(sys.argv[2]))\n"
            "torch_bsr.start(job)\n"
            "built = torch_bsr.build(sys.argv[1], case.small(8), job)\n"
            "case.check(built.results(), 'float32')\n"
            "print(*torch_bsr.notes(job), sep='\\n')",
            name,
            json.dumps(vars(_job("torch_bsr", (name,)))),
        ],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=SCRIPT.parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert ("the product W @ x: yes" in done.stdout) == (name != "torch_dense")


def test_a_wrong_result_is_told():
    small = cases.small(8)
    mask = small.full_mask
    factor = cases.Factor(small.kernel * mask, mask)
    y, of_x, (of_kernel,) = cases.right(small, [factor])
    cases.check(small.compared(y, of_x, of_kernel), "float32")
    of_x[0, 0] += 1
    with pytest.raises(cases.WrongResult, match="gradient of the input"):
        cases.check(small.compared(y, of_x, of_kernel), "float32")
    with pytest.raises(cases.WrongResult, match="output"):
        cases.check(small.compared(y * np.nan, of_x, of_kernel), "float32")


class _Framework:
    """Contenders that are right, wrong, and not there."""

    @staticmethod
    def build(name, case, job):
        del case, job
        if name == "tf_csr":
            raise ValueError("it has none")
        found = np.ones(3) * (2.0 if name == "monarch" else 1.0)
        return cases.Built(
            lambda: None, lambda: [("output", found, np.ones(3))], 1536, 6144, 12288
        )

    @staticmethod
    def wait():
        pass

    @staticmethod
    def peak(call):
        call()


def test_who_is_wrong_is_left_out(tmp_path):
    path = tmp_path / "masks.npz"
    np.savez(path, **{"0.75": np.eye(12, 8, dtype=bool)})
    names = "keras_dense", "monarch", "tf_csr", "random"
    job = _job("keras_layers", names, masks=str(path))
    built, answer = worker.prepare(_Framework, job)
    assert [*built] == [(0.75, "keras_dense"), (0.75, "random")]
    assert [each["has_sparsity"] for each in answer["facts"]] == [0.75, 0.75]
    assert answer["wrong"] == ["monarch"]
    assert answer["left_out"]["tf_csr"] == "it has none"
    assert "wrong output" in answer["left_out"]["monarch"]


def _fact(name, has_sparsity=0.0):
    return {
        "contender": name,
        "sparsity": 0.75,
        "has_sparsity": has_sparsity,
        "parameter_bytes": int(400 * (1 - has_sparsity)),
        "slot_bytes": int(800 * (1 - has_sparsity)),
        "extra_mb": None,
    }


def test_ratios_are_medians_over_rounds():
    facts = [_fact("keras_dense"), _fact("random", 0.75)]
    facts += [_fact("numpy_dense"), _fact("scipy_bsr", 0.75)]
    # The machine was twice as slow in the last round.
    turns = [
        {"sparsity": 0.75, "ms": {"keras_dense": keras, "random": random}}
        for keras, random in ((4.0, 2.0), (4.0, 1.0), (8.0, 2.5))
    ]
    turns += [
        {"sparsity": 0.75, "ms": {"numpy_dense": 6.0, "scipy_bsr": 8.0}}
        for _ in range(3)
    ]
    keras, random, numpy, scipy = results.summaries(facts, turns)
    assert random["ms"] == 2.0
    assert random["rounds_ms"] == [2.0, 1.0, 2.5]
    assert random["times_keras"] == random["times_dense"] == 3.2
    assert random["of_ideal"] == pytest.approx(0.8)
    assert random["parameters_of_dense"] == 0.25
    assert scipy["times_keras"] == 0.5
    assert scipy["times_dense"] == 0.75
    assert keras["times_dense"] == numpy["of_ideal"] == 1
    cells = results.cells(random)
    assert cells[3:8] == ["2.00", "1.00..2.50", "3.20", "3.20", "0.80"]
    assert len(cells) == len(results.COLUMNS)


def test_without_the_yardstick_there_is_no_ratio():
    turns = [{"sparsity": 0.75, "ms": {"scipy_bsr": 8.0}}]
    (scipy,) = results.summaries([_fact("scipy_bsr", 0.75)], turns)
    assert scipy["times_keras"] is scipy["times_dense"] is scipy["of_ideal"] is None
    assert results.cells(scipy)[5:8] == [None] * 3


def test_dense_products_run_beside_sparse_ones():
    assert by_module(["scipy_bsr", "torch_bsr"]) == {
        "keras_layers": (YARDSTICK,),
        "scipy_bsr": ("numpy_dense", "scipy_bsr"),
        "torch_bsr": ("torch_dense", "torch_bsr"),
    }


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--contenders=cusparse", "--contenders has 'cusparse'"),
        ("--contenders=random,random", "none twice"),
        ("--sparsities=0.5,most", "Received --sparsities=0.5,most"),
        ("--sparsities=1", "less than 1"),
        ("--inputs=100", "expected a multiple of --block_size=32"),
        ("--device=TPU", "Received --device=TPU"),
        ("extra", "Received 'extra'"),
    ],
)
def test_a_wrong_flag_is_said_in_a_line(flag, said):
    done = _run(flag)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.mark.slow
def test_a_short_race(tmp_path):
    path = tmp_path / "results.jsonl"
    done = _run(
        *SMALL,
        "--sparsities=0.5,0.75",
        "--contenders=block_diagonal,tf_csr,scipy_bsr",
        f"--json={path}",
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in path.read_text().splitlines()]
    names = ["keras_dense", "block_diagonal", "tf_csr", "numpy_dense", "scipy_bsr"]
    assert [each["contender"] for each in results] == names * 2
    assert [each["sparsity"] for each in results] == [0.5] * 5 + [0.75] * 5
    for result in results:
        assert len(result["rounds_ms"]) == 2
        assert result["ms"] > 0
        assert result["batch"] == 4
        assert result["times_keras"] > 0
        has = 0.0 if "dense" in result["contender"] else result["sparsity"]
        assert result["has_sparsity"] == has
        assert result["parameter_bytes"] == 4 * 64 * 32 * (1 - has)
        assert result["slot_bytes"] == 2 * result["parameter_bytes"]
    assert "- scipy_bsr: its products use one thread" in done.stdout


@pytest.mark.slow
def test_a_short_race_with_torch():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    done = _run(*SMALL, "--sparsities=0.75", "--contenders=torch_bsr,torch_bsr_dense")
    assert done.returncode == 0, done.stderr
    assert "| PyTorch BSR, gathered gradient |" in done.stdout
    assert "left out" not in done.stdout

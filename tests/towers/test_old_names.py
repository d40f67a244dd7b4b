"""Old names, one by one: those of 0.1 are errors, and those of 0.2 still work."""

import warnings

import keras
import numpy as np
import pytest

import towers
from towers.callbacks import Checkpoint, Stall, Starvation, TensorBoard, Throughput
from towers.input_pipeline import open_source
from towers.input_pipeline.benchmark.flags import BenchmarkOptions
from towers.numerics import NotFiniteStep
from towers.program.flags import command_line
from towers.train.settings import Settings

OPTIONS = (
    *("local_parameter_device", "home", "packed", "all_reduce_alg", "choice_file"),
    *("shard_optimizer_state", "max_staleness", "placement", "pipeline_schedule"),
)
MODEL = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
BATCH = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
# What has arguments, the positional ones that it is called with, and old names.
ARGUMENTS = {
    towers.multi_gpu_model: ([MODEL, 2], ["builder", "shares", *OPTIONS]),
    towers.check_parity: ([MODEL, BATCH, 2], ["builder", "shares", "steps", *OPTIONS]),
    open_source: (["digits"], ["test_split"]),
    Checkpoint: (["nowhere"], ["keep"]),
    Stall: ([], ["seconds"]),
    Starvation: ([], ["every_steps"]),
    TensorBoard: (["nowhere"], ["every_steps"]),
}


@pytest.mark.parametrize(
    ("named", "old"),
    [(named, old) for named, (_, names) in ARGUMENTS.items() for old in names],
)
def test_arguments_that_have_ended(named, old):
    MODEL.compile("sgd", "mse")
    with pytest.raises(TypeError, match=f"unexpected (keyword )?argument '{old}'"):
        named(*ARGUMENTS[named][0], **{old: 1})


@pytest.mark.parametrize(
    ("owner", "old"),
    [
        (Throughput(batch_size=4), "images_per_sec"),
        (NotFiniteStep(1, None, "", None), "finding"),
    ],
)
def test_attributes_that_have_ended(owner, old):
    with pytest.raises(AttributeError, match=f"'{type(owner).__name__}'.*'{old}'"):
        getattr(owner, old)


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (Settings, "--tower_shares=2,3", "--split_ratios"),
        (BenchmarkOptions, "--towers=2", "--num_gpus"),
    ],
)
def test_flags_that_have_ended(kind, old, new):
    name = old.partition("=")[0]
    with pytest.raises(ValueError, match=f"Received {name}, but .*did you mean {new}"):
        command_line.read(kind, ["a program", old])


@pytest.mark.parametrize(
    ("old", "new"), [("image_key", "image_column"), ("label_key", "label_column")]
)
def test_arguments_that_end_in_0_4(old, new):
    with pytest.warns(FutureWarning) as warned:
        with pytest.raises(ValueError, match=f"received {new} for 'digits'"):
            open_source("digits", **{old: "x"})
    said = f"{old} is now {new}; the old name works until Towers 0.4."
    assert [str(warning.message) for warning in warned] == [said]
    assert warned[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        with pytest.raises(TypeError, match=f"'{old}'"):
            open_source("digits", **{old: "x", new: "y"})

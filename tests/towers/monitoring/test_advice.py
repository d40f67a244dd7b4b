"""Advice names stages and arguments that exist for whoever wrote the input."""

import dataclasses
import inspect
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.variants import slow
from towers.devices.configuration import Devices
from towers.input_pipeline import (
    ADVICE,
    Pipeline,
    make_dataset,
    open_source,
    stage_advice,
)
from towers.input_pipeline.sources.arrays import RowSource
from towers.input_pipeline.sources.targets import Target
from towers.monitoring.bottleneck import tfdata_stats, verdict
from towers.monitoring.bottleneck.starvation import Starvation
from towers.monitoring.bottleneck.tfdata_stats import Stage
from towers.train.callbacks import make_watch
from towers.train.settings import NAMES

# Methods of tf.data.Dataset, by what tf.data calls their stages.
METHODS = {
    "memory_cache": "cache",
    "file_cache": "cache",
    "data_service": None,
    "finite_repeat": "repeat",
    "finite_take": "take",
}
KINDS = (
    *("map", "batch", "padded_batch", "shuffle", "filter", "flat_map", "interleave"),
    *("scan", "unbatch", "memory_cache", "file_cache", "data_service", "window"),
    *("take_while", "unique", "group_by_window", "rebatch", "finite_repeat", "shard"),
    *("finite_take", "prefetch", "zip", "concatenate", "ignore_errors", "snapshot"),
)


def a_stage(kind, label="", threads=1):
    return Stage(kind, label, 10.0, threads, 1, 0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_advice_names_arguments_that_there_are(kind, threads):
    method = METHODS.get(kind, kind)
    stage = a_stage(kind, threads=threads)
    name, found = verdict.advise(stage, [stage])
    assert name == f"`{kind}`"
    for each in re.findall(r"\.(\w+)\(\)", found):
        assert hasattr(tf.data.Dataset, each)
    # What is passed to the stage itself, and not to one that stands in its place.
    for each in re.findall(r"pass it (\w+)|smaller (\w+_\w+)|out its (\w+)", found):
        (argument,) = filter(None, each)
        assert (
            argument in inspect.signature(getattr(tf.data.Dataset, method)).parameters
        )
    if threads > 1:
        assert "pass it num_parallel_calls" not in found


def test_every_kind_of_advice_is_looked_at():
    known = {kind.removesuffix(" in parallel") for kind in verdict._OF_TF_DATA}
    assert known <= set(KINDS)


def test_what_a_generator_is_wrapped_in_is_not_named():
    wrapper, generator = a_stage("flat_map"), a_stage("Generator", "read")
    name, found = verdict.advise(wrapper, [a_stage("prefetch"), wrapper, generator])
    assert name == "`Generator` (read)"
    assert "keras.utils.PyDataset" in found
    files = a_stage("TFRecord", "read")
    assert verdict.advise(wrapper, [wrapper, files])[0] == "`flat_map`"


@pytest.mark.parametrize("kind", ["Range", "TensorSlice", "FromTensor"])
def test_no_disk_is_blamed_for_what_is_in_memory(kind):
    stage = a_stage(kind, "read")
    assert "disk" not in verdict.advise(stage, [stage])[1]


def found_in(data):
    """The stages of data that has been read for a while."""
    iterator = iter(data)
    for _ in range(4):
        next(iterator)
    return tfdata_stats.read(iterator)


def test_arrays_are_keras_s_to_cut():
    x = np.zeros([64, 2], np.float32)
    adapter = keras.src.trainers.data_adapters.array_data_adapter
    data = adapter.ArrayDataAdapter(x, x, batch_size=4, shuffle=True)
    for stage in (found := found_in(data.get_tf_dataset()).stages()):
        name, what = verdict.advise(stage, found)
        assert name.startswith("Keras's own") and "batch_size" in what
    parameters = inspect.signature(keras.Model.fit).parameters
    assert "batch_size" in parameters


@pytest.fixture
def ours(tmp_path):
    """Makes data sets of ours, of each way to read."""
    (tmp_path / "a.csv").write_text("a,label\n" + "1,0\n" * 100)
    (tmp_path / "images" / "a").mkdir(parents=True)
    for i in range(20):
        image = tf.io.encode_png(np.zeros([4, 4, 3], np.uint8)).numpy()
        (tmp_path / "images" / "a" / f"{i}.png").write_bytes(image)
    specs = f"csv:{tmp_path}/a.csv", f"folder:{tmp_path}/images", "synthetic:4x4x3:2"
    shapes = (1,), (4, 4, 3), (4, 4, 3)
    return lambda repeat: [
        make_dataset(open_source(spec), "train", 4, image_shape=shape, repeat=repeat)
        for spec, shape in zip(specs, shapes, strict=True)
    ]


@pytest.mark.parametrize("repeat", [True, slow(False)])
def test_stages_of_ours_have_words_of_ours(ours, repeat):
    words = set()
    for data in ours(repeat):
        found = found_in(data).stages()
        for stage in found:
            name, what = verdict.advise(stage, found, ADVICE)
            assert what in ADVICE.values()
            words.add(name)
    assert {"`read`", "`map` (parse)", "`map` (decode)", "`map` (augment)"} <= words
    assert words <= {
        *(f"`map` ({each})" for each in ADVICE),
        *(f"`{e}`" for e in ADVICE),
    }


def test_data_of_ours_bring_their_words_along():
    callback = Starvation()
    assert callback._words() is None
    callback._reading = found_in(
        make_dataset(open_source("synthetic:4x4x3:2"), "train", 4)
    )
    assert callback._words() == stage_advice()
    callback._reading = found_in(tf.data.Dataset.range(9))
    assert callback._words() is None


def test_what_is_kept_is_not_to_be_kept_again():
    source = open_source("synthetic:4x4x3:2")
    kept = RowSource(
        "kept",
        np.zeros([8, 4, 4, 3], np.uint8),
        np.zeros(8, np.int64),
        {"train": 8},
        Target("class", 2),
        (4, 4, 3),
        source,
    )
    for each, cures in (source, "keep the data in memory"), (kept, "at hand already"):
        pipeline = make_dataset(each, "train", 4).pipeline
        assert cures in pipeline.advice["read"]
        kept_already = each is kept
        job = types.SimpleNamespace(
            batch_size=4,
            log_steps=1,
            setup=types.SimpleNamespace(
                facts=types.SimpleNamespace(input_kind="image", input_shape=(4, 4, 3))
            ),
            fractions=[1.0],
            data=types.SimpleNamespace(
                examples=8,
                tokens_per_example=0,
                advice=stage_advice(kept_already, flags=True),
            ),
            devices=Devices((), ""),
            parallel=types.SimpleNamespace(
                builder=types.SimpleNamespace(
                    plan=types.SimpleNamespace(towers=[types.SimpleNamespace(index=0)])
                )
            ),
        )
        assert cures in make_watch(job).starvation._words()["read"]


def test_words_of_ours_name_what_there_is():
    texts = {**ADVICE, **stage_advice(kept=True, flags=True)}
    for flag in re.findall(r"--(\w+)", " ".join(texts.values())):
        assert flag in NAMES
    arguments = {field.name for field in dataclasses.fields(Pipeline)}
    arguments |= set(inspect.signature(keras.Model.compile).parameters)
    text = " ".join(stage_advice().values())
    assert "--" not in text
    assert (
        set(re.findall(r"\b[a-z]+_[a-z_]+\b", text)) - {"input_pipeline"} <= arguments
    )

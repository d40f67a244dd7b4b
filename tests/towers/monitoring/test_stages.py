"""What is measured of the stages of towers, and said of it."""

import keras
import pytest
import tensorflow as tf

from towers import Stages, multi_gpu_model
from towers.layers.pipeline import LayerPlacement, Pipeline
from towers.loop.timers import TurnsTaken
from towers.monitoring.bottleneck import stages
from towers.monitoring.step_time import StepTime, check_towers


def pipeline(*of_layers, width=4):
    """Dense layers a, b, ... on these stages."""
    names = "abcdefgh"[: len(of_layers)]
    every = [keras.layers.Dense(width, name=name) for name in names]
    model = keras.Sequential([keras.Input([width]), *every])
    asked = dict(zip(names, of_layers, strict=True))
    count = max(of_layers) + 1
    return Pipeline(count, placement=LayerPlacement(model, count, asked))


def test_a_stage_is_at_work_from_when_it_may_begin():
    # Two stages, two micro-batches: stage 1 waits for stage 0, and for its own turns.
    turns = TurnsTaken(
        ends=[tf.constant(t, tf.float64) for t in (12.0, 15.0, 14.0, 19.0)],
        stages=[0, 1, 0, 1],
        after=[[], [0], [0], [1, 2]],
    )
    found = turns.at_work(tf.constant(10.0, tf.float64), 2)
    assert found.numpy().tolist() == [2 + 2, 3 + 4]


@pytest.mark.parametrize(
    ("of_layers", "busy", "words"),
    [
        ([0, 0, 1, 1], [0.9, 0.5], ["stage 0 is the slowest", "90%", "50%", "b to st"]),
        ([0, 0, 1, 1], [0.4, 0.8], ["stage 1 is the slowest", "move c to stage 0"]),
        ([0, 1, 1, 2], [0.7, 0.9, 0.6], ["stage 1", "60%", "move c to stage 2"]),
        ([0, 1], [0.4, 0.8], ["stage 1 is the slowest"]),
    ],
)
def test_the_slowest_stage_is_named(of_layers, busy, words):
    text, advice = stages.finding(busy, pipeline(*of_layers))
    said = text if advice is None else f"{text}; {advice.text}"
    assert all(word in said for word in words)


def test_nothing_is_said_of_stages_that_are_about_equal():
    assert stages.finding([0.7, 0.75], pipeline(0, 1)) is None
    assert stages.finding([], Pipeline()) is None


@pytest.mark.slow
def test_each_stage_is_measured():
    # Much to compute: on a busy machine, the clock may be looked at some time late.
    model = pipeline(0, 1, width=512).model
    parallel = multi_gpu_model(
        model, gpus=2, stages=Stages(2, {"a": 0, "b": 1}), micro_batches=2
    )
    parallel.compile("sgd", "mse")
    times, x = StepTime(warmup_steps=1), tf.zeros([512, 512])
    parallel.fit(x, x, batch_size=256, epochs=3, verbose=0, callbacks=[times])
    busy = times.split.stages_busy
    assert len(busy) == 2
    assert all(0 < each <= 1 for each in busy)
    assert "stages at work" in times.text()
    assert {"stage_0/busy", "stage_1/busy"} <= times.measured().keys()


def test_steps_without_towers_are_not_measured():
    assert StepTime().split is None
    with pytest.raises(
        ValueError, match="'plain' without towers; expected one of multi"
    ):
        check_towers(keras.Sequential(name="plain"))

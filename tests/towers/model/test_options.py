"""Options of `multi_gpu_model` that only go with one another: values."""

import dataclasses
import pickle

import keras
import pytest

import towers
from towers.model.options import UPDATES, as_stages, as_update


def model():
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])


VALUES = [
    towers.ParameterServer("cpu", merge="gpu", packed=False),
    towers.Replicated("ring", packed=True),
    towers.Replicated(shard_optimizer_state=True),
    towers.Asynchronous(2, device="gpu"),
    towers.Auto("choice.json", device="/device:CPU:1"),
    towers.Stages(2, {"a": 0, ".*": 1}, "gpipe"),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_is_frozen_and_equals_another_one(value):
    assert dataclasses.replace(value) == value == pickle.loads(pickle.dumps(value))
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


def test_strings_and_numbers_are_short_for_values():
    assert as_update("replicated") == towers.Replicated()
    assert as_update("parameter_server") == towers.ParameterServer()
    assert as_update("asynchronous") == towers.Asynchronous()
    assert as_update("auto") == towers.Auto()
    assert as_stages(3) == towers.Stages(3)
    for value in VALUES[:-1]:
        assert as_update(value) is value
        assert UPDATES[value.name] is type(value)
    assert as_stages(VALUES[-1]) is VALUES[-1]


def test_a_placement_stays_as_it_was_given():
    placement = {"a": 0, ".*": 1}
    value = towers.Stages(2, placement)
    placement["a"] = 1
    assert value.placement == {"a": 0, ".*": 1}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: towers.ParameterServer(0), "Received device=0; expected None for"),
        (lambda: towers.ParameterServer(merge="tpu"), "one of ['cpu', 'gpu']"),
        (lambda: towers.ParameterServer(packed=1), "Received packed=1; expected True"),
        (lambda: towers.Asynchronous(device=[]), "Received device=[]; expected None"),
        (lambda: towers.Asynchronous(-1), "Received max_staleness=-1; expected None"),
        (lambda: towers.Auto(3), "Received choice_file=3; expected None, or a file"),
        (lambda: towers.Auto(device=1), "Received device=1; expected None for where"),
        (lambda: towers.Replicated("tree"), "all_reduce='tree'; expected one of"),
        (
            lambda: towers.Replicated(shard_optimizer_state="yes"),
            "Received shard_optimizer_state='yes'; expected True or False.",
        ),
        (
            lambda: towers.Replicated("ring", shard_optimizer_state=True),
            "all_reduce='ring' with shard_optimizer_state=True, where no tower gets",
        ),
        (lambda: towers.Stages(0), "Received stages=0; expected an integer from 1."),
        (lambda: towers.Stages(2, schedule="2f2b"), "one of ['1f1b', 'gpipe']"),
        (lambda: towers.Stages(2, {"a": 2}), "expected a stage from 0 to 1."),
        (lambda: towers.Stages(2, {"[": 0}), "expected a regular expression for names"),
        (lambda: towers.Stages(1, {"a": 0}), "stages=1; expected stages=2 or more, or"),
        (lambda: towers.Stages(2, "even"), "expected 'auto', or stages by regular"),
    ],
)
def test_a_wrong_option_is_a_sentence(make, words):
    with pytest.raises(ValueError) as raised:
        make()
    text = str(raised.value)
    assert words in text and text.startswith("Received ") and text.endswith(".")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"variable_update": "magic"}, "or a value with options, such as towers."),
        ({"variable_update": None}, "Received variable_update=None; expected one of"),
        ({"variable_update": towers.Replicated}, "a value with options, such as"),
        ({"stages": towers.Replicated()}, "expected an integer from 1."),
        (
            {"variable_update": towers.ParameterServer("gpu"), "cpu_relocation": True},
            "cpu_relocation=True with device='gpu', which says where the variables are",
        ),
        (
            {
                "variable_update": towers.ParameterServer(merge="cpu"),
                "cpu_merge": False,
            },
            "cpu_merge=False with merge='cpu', which says where gradients are added",
        ),
    ],
)
def test_a_wrong_argument_is_a_sentence(options, words):
    with pytest.raises(ValueError) as raised:
        towers.multi_gpu_model(model(), 2, **options)
    assert words in str(raised.value)


def test_the_arguments_of_keras_2_say_the_same():
    def places(**options):
        gpus = ["cpu:1", "cpu:2"]
        plan = towers.multi_gpu_model(model(), gpus, **options).builder.plan
        return plan.home, plan.merge

    asked = towers.ParameterServer("cpu", merge="gpu")
    expected = "/device:CPU:0", "/device:CPU:1"
    assert places(variable_update=asked) == expected
    assert places(cpu_relocation=True, cpu_merge=False) == expected
    # One may say what the other does.
    both = places(cpu_relocation=True, cpu_merge=False, variable_update=asked)
    assert both == expected

"""Old public names, one by one: they work, and tell the new ones."""

import functools
import inspect

import keras
import pytest
from absl import flags

import towers
from towers import _deprecated, input_pipeline, numerics
from towers.callbacks import Checkpoint, Stall, Starvation, TensorBoard, Throughput
from towers.model import options as model_options


@pytest.fixture(scope="module")
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def ended(old, new):
    until = "0.4" if new in ("image_column", "label_column") else "0.3"
    return f"{old} is now {new}; the old name works until Towers {until}."


# What each is called with besides, and a value that is refused by the new name.
CALLS = {
    towers.multi_gpu_model: (
        ["model"],
        {"builder": "fast", "shares": (0,)},
    ),
    towers.check_parity: (
        ["model", None],
        {"builder": "fast", "shares": (0,), "steps": 0},
    ),
    input_pipeline.open_source: (
        ["npz:rows.npz"],
        {"test_split": "x", "image_key": "x", "label_key": "x"},
    ),
    Checkpoint: (["nowhere"], {"keep": 0}),
    Stall: ([], {"seconds": 0}),
    Starvation: ([], {"every_steps": 0}),
    TensorBoard: (["nowhere"], {"every_steps": 0}),
}
ARGUMENTS = [(named, old) for named, (_, bad) in CALLS.items() for old in bad]


@pytest.mark.parametrize(("named", "old"), ARGUMENTS)
def test_arguments(named, old, model):
    new = _deprecated.ARGUMENTS[named.__name__][old]
    given, bad = CALLS[named]
    given = [model if each == "model" else each for each in given]
    with pytest.warns(FutureWarning) as told:
        with pytest.raises(ValueError, match=new):
            named(*given, **{old: bad[old]})
    assert [str(each.message) for each in told] == [ended(f"The argument {old}", new)]
    assert told[0].filename == __file__
    with pytest.raises(TypeError, match=f"both {old} and {new}"):
        named(*given, **{old: bad[old], new: bad[old]})
    parameters = inspect.signature(named).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    assert (new in parameters or takes_all) and old not in parameters


def test_all_arguments_are_tried():
    tried = {named.__name__: {*bad} for named, (_, bad) in CALLS.items()}
    assert tried == {name: {*old} for name, old in _deprecated.ARGUMENTS.items()}


# What each option was given as before, and the value that has it now.
OPTIONS = {
    "local_parameter_device": ("cpu:1", towers.ParameterServer(device="cpu:1")),
    "home": ("cpu:1", towers.ParameterServer(device="cpu:1")),
    "packed": (True, towers.ParameterServer(packed=True)),
    "all_reduce_alg": ("ring", towers.Replicated(all_reduce="ring")),
    "shard_optimizer_state": (True, towers.Replicated(shard_optimizer_state=True)),
    "max_staleness": (3, towers.Asynchronous(max_staleness=3)),
    "choice_file": ("choice.json", towers.Auto(choice_file="choice.json")),
    "placement": ({"a": 0, ".*": 1}, towers.Stages(2, {"a": 0, ".*": 1})),
    "pipeline_schedule": ("gpipe", towers.Stages(2, schedule="gpipe")),
}


def of_value(old):
    """The argument that takes the value, its shorthand, and what is said."""
    argument, owner, _ = _deprecated.OPTIONS[old]
    value = OPTIONS[old][1]
    assert type(value) is getattr(towers, owner)
    asked = value.name if argument == "variable_update" else value.count
    return argument, asked, ended(f"The argument {old}", _as_option(old))


def _as_option(old):
    argument, owner, option = _deprecated.OPTIONS[old]
    return f"{argument}=towers.{owner}({option}=...)"


def test_all_options_are_tried():
    assert [*OPTIONS] == [*_deprecated.OPTIONS]


@pytest.mark.parametrize("old", OPTIONS)
def test_options_become_values(old):
    @functools.partial(
        _deprecated.accepts_old_names,
        variable_update=model_options.update_with,
        stages=model_options.stages_with,
    )
    def takes_values(**options):
        return options

    argument, asked, words = of_value(old)
    before, value = OPTIONS[old]
    with pytest.warns(FutureWarning) as warned:
        options = takes_values(**{argument: asked, old: before, "strict": False})
    assert options == {argument: value, "strict": False}
    assert [str(each.message) for each in warned] == [words]
    assert warned[0].filename == __file__


@pytest.mark.parametrize("function", [towers.multi_gpu_model, towers.check_parity])
@pytest.mark.parametrize("old", OPTIONS)
def test_options_are_no_arguments_any_more(function, old):
    assert old not in inspect.signature(function).parameters


@pytest.mark.filterwarnings("ignore:.*the old name works until:FutureWarning")
def test_options_as_they_were_given_before(model):
    def homes(**options):
        return towers.multi_gpu_model(model, 2, **options).builder.plan.homes

    assert homes(local_parameter_device="cpu:1") == ("/device:CPU:1",)
    # Without effect, as before: the defaults of other ways, and the first copy's place.
    homes(all_reduce_alg="auto", shard_optimizer_state=False, max_staleness=None)
    homes(variable_update="replicated", local_parameter_device="gpu")
    homes(variable_update=towers.Replicated(), packed=None)
    for options, words in (
        ({"max_staleness": 1}, "expected it as an option of towers.Asynchronous"),
        ({"all_reduce_alg": "ring"}, "expected it as an option of towers.Replicated"),
        (
            {"variable_update": "replicated", "local_parameter_device": "cpu:1"},
            "towers.Asynchronous or towers.Auto or towers.ParameterServer, so give",
        ),
        (
            {"variable_update": towers.Replicated(), "all_reduce_alg": "ring"},
            "expected it as an option of towers.Replicated",
        ),
        ({"stages": towers.Stages(2), "placement": "auto"}, "an option of that value"),
        ({"variable_update": "magic", "max_staleness": None}, "'magic'; expected one"),
    ):
        with pytest.raises(ValueError, match=words):
            homes(**options)


def test_attributes():
    assert _deprecated.ATTRIBUTES == {
        "NotFiniteStep": {"finding": "origin"},
        "Throughput": {"images_per_sec": "examples_per_sec"},
    }
    throughput = Throughput(batch_size=4)
    message = ended("Throughput.images_per_sec", "Throughput.examples_per_sec")
    with pytest.warns(FutureWarning) as told:
        assert throughput.images_per_sec is throughput.examples_per_sec is None
    assert [str(each.message) for each in told] == [message]


def test_flags_of_a_command_line():
    values = flags.FlagValues()
    flags.DEFINE_list("split_ratios", None, "", flag_values=values)
    found = _deprecated.rename_flags(["--tower_shares=2,3", "-tower_shares"], values)
    notes = [ended("--tower_shares", "--split_ratios")] * 2
    assert found == (["--split_ratios=2,3", "-split_ratios"], notes)
    # Of another program, or not a flag at all.
    for other in ("--towers=2", "tower_shares", "--tower_shares_2", "--"):
        assert _deprecated.rename_flags([other], values) == ([other], [])


def test_a_flag_that_is_still_one():
    values = flags.FlagValues()
    for name in ("num_gpus", "towers"):
        flags.DEFINE_integer(name, None, "", flag_values=values)
    assert _deprecated.rename_flags(["--towers=2"], values) == (["--towers=2"], [])


def test_keys_and_tags():
    old = {"images_per_sec": 3.0, "logs": "runs", "steps": 2}
    new = {"examples_per_sec": 3.0, "model_dir": "runs", "steps": 2}
    assert _deprecated.rename_keys(old) == _deprecated.rename_keys(new) == new
    assert _deprecated.rename_keys([1]) == [1]
    assert _deprecated.with_old_keys(new) == {**old, **new}
    for old, new in {
        "samples_per_sec/tower_0": "examples_per_sec/tower_0",
        "epoch_images_per_sec": "epoch_examples_per_sec",
        "step_ms/input": "step_ms/input",
    }.items():
        assert _deprecated.rename_tag(old) == _deprecated.rename_tag(new) == new


def test_attribute_of_an_error():
    error = numerics.NotFiniteStep(1, numerics.NonFiniteOrigin("loss"), "", None)
    with pytest.warns(FutureWarning, match="NotFiniteStep.finding is now "):
        assert error.finding is error.origin

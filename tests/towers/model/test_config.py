"""Arguments of `multi_gpu_model` in a frozen value, of which hosts compare a part."""

import copy
import dataclasses
import json

import keras
import pytest

import towers
from towers.loop import alike
from towers.model.options import UPDATES, Config

# Each host has its own devices and files, and may copy batches as it likes.
OF_A_HOST = {
    *("cpu_merge", "cpu_relocation", "preprocess", "prefetch"),
    *("device", "merge", "packed", "choice_file"),
}


@pytest.mark.parametrize("way", UPDATES.values())
def test_hosts_compare_every_field_that_is_not_a_hosts_own(way):
    in_stages = way not in (towers.Asynchronous, towers.Sharded)
    stages = towers.Stages(2 if in_stages else 1)
    config = Config(variable_update=way(), stages=stages)
    parts = config, config.variable_update, config.stages
    names = {field.name for part in parts for field in dataclasses.fields(part)}
    # The number of stages is compared as `stages`.
    assert config.given.keys() == names - OF_A_HOST - {"count"}
    assert config.given["variable_update"] == way.name
    assert config.given["stages"] == stages.count
    assert json.loads(json.dumps(config.given)) == config.given


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strict": False}, "Hosts differ in strict of multi_gpu_model(): true on a"),
        (
            {"variable_update": towers.Replicated()},
            'in variable_update of multi_gpu_model(): "parameter_server" on a and',
        ),
        ({"stages": towers.Stages(2)}, "in stages of multi_gpu_model(): 1 on a and 2"),
        (
            {"stages": towers.Stages(2, {"last": 1, ".*": 0})},
            "in stages of multi_gpu_model(): 1 on a and 2 on b, and in",
        ),
    ],
)
def test_what_hosts_differ_in_is_an_argument_or_an_option(options, words):
    configs = Config(), Config(**options)
    given = [{"multi_gpu_model()": config.given} for config in configs]
    assert words in alike.difference(["a", "b"], given)


def test_hosts_may_write_different_files():
    guards = [Config(check_numerics=asked).given for asked in (True, "a.npz", False)]
    assert guards[0] == guards[1] != guards[2]
    files = [Config(variable_update=towers.Auto(file)).given for file in ("a", "b")]
    assert files[0] == files[1]


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().strict = False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": -1}, "Received prefetch=-1; expected None, or a number of"),
        ({"preprocess": 3}, "Received preprocess=3; expected None, or a function"),
        ({"check_numerics": 1}, "Received check_numerics=1; expected True, False, or"),
        ({"gradient_compression": "zip"}, "gradient_compression='zip'; expected one"),
        ({"shard_embeddings": "cells"}, "shard_embeddings='cells'; expected one of"),
        ({"loss_placement": "home"}, "loss_placement='home'; expected one of"),
        (
            {"variable_update": towers.Asynchronous(), "shard_embeddings": "rows"},
            "shard_embeddings='rows' with variable_update='asynchronous', whose",
        ),
        (
            {"variable_update": towers.Asynchronous(), "micro_batches": 2},
            "variable_update='asynchronous' with stages, micro_batches or recompute;",
        ),
    ],
)
def test_a_config_checks_itself(options, words):
    with pytest.raises(ValueError) as raised:
        Config(**options)
    assert words in str(raised.value)


def test_asynchronous_towers_have_one_host():
    config = Config(variable_update=towers.Asynchronous())
    config.check_hosts(1)
    with pytest.raises(ValueError, match="on 2 hosts, which wait for one another"):
        config.check_hosts(2)


def test_a_copy_trains_as_was_asked():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    update = towers.Replicated("ring")
    parallel = towers.multi_gpu_model(model, 3, variable_update=update, strict=False)
    parallel.resize(gpus=2)
    copied = copy.deepcopy(parallel)
    assert copied._self_program.config == parallel._self_program.config
    assert copied._self_program.layout == parallel._self_program.layout
    assert copied.builder.pieces.store.algorithm == "ring"
    assert copied.__wrapped__ is not model

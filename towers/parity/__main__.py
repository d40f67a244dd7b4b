"""Checks that a model trains on towers as on one device. It writes no files.

    python -m towers.parity --model=resnet20 --dataset=digits --num_gpus=2

The flags are those of towers.train. --parity_steps sets the number of steps to compare.
The last step has a short batch, which does not divide evenly among the towers. With
--hosts, the towers are those of several hosts, on this machine.
Exit codes: 0 equal; 1 error; 2 not equal; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.parity import check_flags
    from towers.program import startup

    _asked = startup.begin(
        "towers.parity", lambda argv: check_flags.read(argv, __doc__)
    )

import itertools
from typing import Any

import tensorflow as tf

from towers.collectives import batch
from towers.collectives.joined_hosts import this_host
from towers.devices.listing import rows, table
from towers.hosts import group
from towers.hosts.group import HostFailedError
from towers.parity import check_parity
from towers.parity.check_flags import Check
from towers.program import ending, startup
from towers.program.commands import fail
from towers.train.parts import fine_tune, my_model
from towers.train.parts import setup as setup_parts
from towers.train.parts.data import Data, open_data
from towers.train.parts.devices import (
    configure_devices,
    split_ratios,
    stages,
    variable_update,
    with_whole_batch,
)
from towers.train.parts.model import build_model, compile_model, make_preprocess
from towers.train.parts.own_data import OwnData
from towers.train.parts.setup import Setup
from towers.train.settings import Settings


def check(settings: Settings, steps: int = 3) -> int:
    """Checks the model that settings describe, and prints the result.

    Args:
        settings: What to compare.
        steps: Number of steps to compare.

    Returns:
        The exit code: 0 if towers equal one device, else 2.

    Raises:
        ValueError: If any input is bad.
    """
    devices = configure_devices(settings)
    ratios, hosts = split_ratios(settings, devices), this_host()
    every = hosts.exchange([*ratios])
    settings = with_whole_batch(settings, ratios)
    mine = my_model.load(settings)
    opened = open_data(settings.but(eval_dataset=None), mine)
    settings = opened.settings
    setup = setup_parts.of(settings, opened.facts, mine)
    model = build_model(setup, devices.home)
    for note in fine_tune.prepare(settings, model, goes_on=False):
        print(note)
    data = opened.prepare()
    with tf.device(devices.home):
        compile_model(setup, model, data.examples)
    sizes = iter(batch.cut(settings.batch_size, [*itertools.chain(*every)]))
    of_hosts = [[*itertools.islice(sizes, len(each))] for each in every]
    local = of_hosts[hosts.index]
    told = hosts.exchange(rows(devices, local, settings.stages))
    several = dict(zip(hosts.names, told, strict=True)) if len(told) > 1 else None
    print(table(devices, local, several, settings.stages), flush=True)
    if settings.update == "auto":
        # To choose, it would have to train.
        settings = settings.but(variable_update="parameter_server")
    parity = check_parity(
        model,
        read_batches(setup, data, sum(map(len, every)), steps),
        devices.towers,
        variable_update=variable_update(settings),
        shard_embeddings=settings.shard_embeddings,
        split_ratios=ratios,
        loss_placement=settings.loss_placement,
        strict=settings.strict,
        stages=stages(settings),
        micro_batches=settings.micro_batch_count,
        recompute=settings.recompute,
    )
    what = f"Model {settings.model}, data {setup.facts.name}"
    print(f"{what}: towers and one device.\n{parity}")
    return 0 if parity.equal else 2


def read_batches(
    setup: Setup, data: Data | OwnData, towers: int, count: int
) -> list[Any]:
    """Reads batches of training data.

    They are what the model gets: `preprocess` has been applied. The last one is short,
    and does not divide evenly among the towers.

    Raises:
        ValueError: If a record is bad.
    """
    preprocess = make_preprocess(setup)
    batches = [
        (*preprocess(x, y, False), *weights) for x, y, *weights in data.batches(count)
    ]
    if len(batches) > 1:
        size = int(batch.batch_size(batches[-1]))
        # One example more than divides.
        rows = (size * 3 // 4 - 1) // towers * towers + 1
        batches[-1] = batch.take(batches[-1], 0, max(rows, 1))
    return batches


def main(asked: Check) -> int:
    """Checks, on all hosts together if there are several; returns the exit code."""
    try:
        with group.together():
            return check(asked, asked.parity_steps)
    except HostFailedError as error:
        fail(error, "towers.parity")
        return ending.ANOTHER_FAILED


if __name__ == "__main__":
    startup.leave(ending.run("towers.parity", lambda: main(_asked)))

"""Where a run is in its data.

Keras opens data for each epoch anew. With `steps_per_epoch` it keeps what it has opened
across epochs, until its end. A pass is what is read of data that were opened once.
"""

import dataclasses
import json
import math
import types
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.lifecycle.checkpoints.store import Position
from towers.model.fit_data import batch_size, count, is_arrays, length

# What TensorFlow takes if no seed was set for all operations.
_NO_SEED = 87654321

_ONLY_IF = "The run ends as an uninterrupted one only if"
_OTHER = "The run may end with other numbers than an uninterrupted one"


@dataclasses.dataclass(frozen=True)
class DataPlace:
    """A place in data.

    Attributes:
        opened: The epoch that the data have begun with.
        passes: Passes that are over.
        batches: Batches of the next one that were read.
        epoch: The epoch that this pass has begun with.
    """

    opened: int
    passes: int
    batches: int
    epoch: int


@dataclasses.dataclass(frozen=True)
class Start:
    """How `fit` comes to the place where a run goes on.

    Attributes:
        data: What to give it, in the place of its data.
        epoch: Where it begins to count: at this epoch, or an earlier one.
        read: Whether the batches to skip have to be read, as `data` still have them.
        whole: Whether also passes that are over have to be read.
        note: Why the run may end with other numbers than an uninterrupted one.
        anew: Whether the data begin anew, and not where the run was in them.
    """

    data: Any
    epoch: int
    read: bool = True
    whole: bool = False
    note: str | None = None
    anew: bool = False


def start(
    options: dict[str, Any], position: Position, past: Sequence[int] | None, used: bool
) -> Start:
    """Returns how to go on with the data that a run has begun with.

    Args:
        options: The arguments of `fit`, by name.
        position: Where the run goes on.
        past: See `find`; `None` if it is not known.
        used: Whether an earlier `fit` has trained on the same object.
    """
    data, known = options["x"], past is not None
    if past is None:
        # As if all epochs before had been trained on these data.
        batches = options["steps_per_epoch"] or count(options)
        known = batches is not None
        past = [batches or 0] * position.epoch
    place = find(options, position, past)
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        return _start_pipeline(pipeline, options, position, place)
    at_pass = place.epoch if known else position.epoch
    opened = position.epoch - len(past) if known else position.epoch
    if isinstance(data, types.GeneratorType):
        if used:
            note = "The generator goes on where it is, without the batches read ahead"
            return Start(data, position.epoch, read=False, note=note)
        note = f"{_ONLY_IF} the generator yields the same batches again, from its first"
        return Start(data, opened, whole=True, note=note)
    if isinstance(data, keras.utils.PyDataset):
        if data.workers > 1 or (data.workers and data.use_multiprocessing):
            note = f"{_OTHER}: the workers of a PyDataset read ahead"
            return Start(data, position.epoch, note=note)
        note = f"{_ONLY_IF} the PyDataset gives the same batches again"
    elif is_arrays(options):
        # Each pass has the same order, if there is a seed.
        unseeded = options["shuffle"] and seed() is None
        note = f"{_OTHER}: Keras shuffles the arrays, and no seed was set; call "
        note = f"{note}keras.utils.set_random_seed first" if unseeded else None
        return Start(data, at_pass, note=note)
    else:
        note = f"{_ONLY_IF} the data set gives the same records again; to shuffle, it "
        note = f"{note}needs a seed"
        if used:
            # It goes on with its shuffles, from one pass to the next.
            other = "a data set that shuffles has another order when it is opened again"
            note = f"{_OTHER}: {other}" if place.batches else None
    # A shuffle draws numbers whenever it is opened, so passes that are over are opened.
    return Start(data, at_pass if used else opened, note=note)


def start_anew(options: dict[str, Any], position: Position) -> Start:
    """Returns how to begin an epoch with data that the run has not begun with."""
    data = options["x"]
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        moved = dataclasses.replace(
            pipeline, start_epoch=position.epoch, start_record=0
        )
        data = moved.dataset()
    return Start(data, position.epoch, read=False, anew=True)


def _start_pipeline(pipeline, options, position, place):
    """Of what `make_dataset` has made, what is passed over is not read, if possible."""
    size = pipeline.source.splits[pipeline.split]
    epoch, batches = place.opened + place.passes, place.batches
    first, read = position.epoch, False
    if pipeline.repeat and size is not None:
        # It goes on with its next epoch by itself.
        more, batches = divmod(batches, math.ceil(size / pipeline.batch_size))
        epoch += more
    elif options["steps_per_epoch"]:
        # Keras has to count the batches of the pass, and so to be given them.
        first, batches, read = place.epoch, 0, True
    record = batches * pipeline.batch_size
    moved = dataclasses.replace(
        pipeline,
        start_epoch=epoch,
        start_record=record if size is None else min(record, size),
    )
    return Start(moved.dataset(), first, read)


def find(options: dict[str, Any], position: Position, past: Sequence[int]) -> DataPlace:
    """Finds a position's place in the data.

    `past` has the batches that were read in each epoch from the one on that these data
    have begun with, up to the position; `options` are the arguments of `fit`.
    """
    steps, batches = options["steps_per_epoch"], count(options)
    opened = first = position.epoch - len(past)
    passes = read = 0
    for epoch, now in enumerate(past, opened):
        read += now
        over = now < steps if steps and batches is None else read >= (batches or 0)
        if over or not steps:
            passes, read, first = passes + 1, 0, epoch + 1
    return DataPlace(opened, passes, read + position.batch, first)


def order(options: dict[str, Any]) -> dict[str, Any]:
    """Returns, as JSON, what is known to decide which records a batch has.

    "validation" has what is known of the validation data, if anything; `options` are
    the arguments of `fit`.
    """
    pipeline = getattr(options["x"], "pipeline", None)
    found = getattr(pipeline, "order", None)
    if found is None:
        found = {"batch size": batch_size(options), "batches": count(options)}
        if is_arrays(options):
            found["shuffled by seed"] = seed() if options["shuffle"] else "none"
    found = found | {"steps_per_epoch": options["steps_per_epoch"] or count(options)}
    if (held_out := _validation(options["validation_data"])) is not None:
        found["validation"] = held_out
    return json.loads(json.dumps(found, default=int))


def _validation(data):
    """What is known to decide what a validation measures."""
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        names = "dataset", "files", "split", "examples"
        return {name: pipeline.order[name] for name in names}
    if isinstance(data, tuple | list) and (examples := length(data)) is not None:
        return {"examples": examples}
    return None


def seed() -> int | None:
    """Returns the seed of all of TensorFlow's operations, if one was set."""
    found, _ = tf.compat.v1.random.get_seed(0)
    return None if found == _NO_SEED else found

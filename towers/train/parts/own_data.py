"""Data that a file of the user's reads: its `train_data` and `eval_data`.

They have the manners of a data set (`OwnData`), so that the rest of a run does not ask
whose data they are.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.targets import IGNORED, Target
from towers.program import words
from towers.train.parts.facts import DataFacts
from towers.train.parts.my_model import MyModel
from towers.train.parts.task import TASKS, Task
from towers.train.settings import DEFAULTS, Settings

MOST_TRAINING_EXAMPLES = 10_000
"""Without validation data, no more of the training data than that is evaluated."""


@dataclasses.dataclass(frozen=True)
class OwnData:
    """What a run trains and evaluates on, as the user's file gives it.

    It has what `towers.train.parts.data.Data` has.

    Attributes:
        settings: How to read it; their batch size is that of the data.
        facts: What it has.
        training: The training data, as `fit` takes it.
        held_out: What to evaluate on; `None` if the file has no `eval_data`.
        examples: How many there are in an epoch of training, if that is known.
        note: What was decided about it, as a phrase.
        mine: The file.
    """

    settings: Settings
    facts: DataFacts
    training: tf.data.Dataset | keras.utils.PyDataset
    held_out: tf.data.Dataset | keras.utils.PyDataset | None
    examples: int | None
    note: str
    mine: MyModel

    bad_records = None
    scaling = None
    vocabularies: ClassVar[Mapping[str, Sequence[str]]] = {}
    quarantines = ()
    # Of its stages, nothing is known.
    advice: ClassVar[Mapping[str, str]] = {}
    bytes_per_token: ClassVar[Mapping[str, float]] = {}
    tokens_per_example = 0

    @functools.cached_property
    def evaluation(self) -> tf.data.Dataset | keras.utils.PyDataset:
        """What to evaluate on: held out, else the training data."""
        data = self.training if self.held_out is None else self.held_out
        return first_batches(data, self.eval_batches)

    @property
    def eval_batches(self) -> int | None:
        """How many batches are evaluated at most; `None` if all are."""
        has_held_out = self.held_out is not None
        return most_batches_evaluated(self.settings, self.examples, has_held_out)

    def steps_per_epoch(self) -> None:
        """An epoch is what the data have; see `Data.steps_per_epoch`."""

    def blaming(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an error is the user's own; see `Data.blaming`."""
        return contextlib.nullcontext()

    def prepare(self, known: Sequence[Any] = ()) -> "OwnData":
        """Returns itself: there is nothing to prepare; see `Opened.prepare`."""
        return self

    def in_batches_of(self, size: int) -> "OwnData":
        """Returns other data, as the file gives them for this size."""
        return open_data(self.settings.but(batch_size=size), self.mine)

    def keep_at_hand(self) -> "OwnData":
        """Returns itself: what is kept is for the file to say."""
        return self

    def batches(self, count: int) -> list[Any]:
        """Reads some batches of training data, beginning anew where they end."""
        found = []
        while len(found) < count:
            before = len(found)
            for batch in _iterate(self.training):
                found.append(tf.nest.map_structure(tf.convert_to_tensor, batch))
                if len(found) == count:
                    break
            if len(found) == before:
                raise ValueError(
                    f"{self.facts.name} has no batch; expected at least 1."
                )
        return found

    def notes(self) -> list[str]:
        """Says what was decided about the data."""
        notes = [
            "Bad records are not looked for, as the records are read by "
            f"{self.facts.name}."
        ]
        images = [
            each
            for each in keras.tree.flatten(self.facts.inputs)
            if each.dtype == "uint8"
        ]
        if images and "preprocess" not in self.mine:
            notes.append(
                f"Note: {self.facts.name} has uint8 inputs, which the model gets as "
                "they are, 0 to 255; scale them in it, or define preprocess."
            )
        return notes


def open_data(settings: Settings, mine: MyModel) -> OwnData:
    """Reads what a file gives to train and evaluate on.

    Raises:
        ValueError: It is not as expected.
    """
    known = {"batch_size": settings.batch_size, "seed": settings.seed}
    name = f"train_data of {mine.path.name}"
    given = mine.data("train_data", **known)
    if given is None:
        raise ValueError(f"{name} returned None; expected data, so return them.")
    training, examples, size = _batched(settings, name, given, shuffled=True)
    fixed = not (isinstance(given, tuple) or mine.asks("train_data", "batch_size"))
    if settings.batch_per_tower and (fixed or settings.batch_size != size):
        raise ValueError(
            f"Received {settings.as_flag('elastic_batch')}, but {name} gives batches "
            f"of {size}; expected the size that is asked for, so define a function "
            "train_data(batch_size)."
        )
    if settings.batch_size not in (size, DEFAULTS.batch_size):
        raise ValueError(
            f"Received {settings.as_flag('batch_size')}, but {name} gives batches of "
            f"{size}; expected none, or a function train_data(batch_size)."
        )
    held = mine.data("eval_data", **known)
    if held is not None:
        other = f"eval_data of {mine.path.name}"
        held, *_ = _batched(settings, other, held, shuffled=False)
    if "preprocess" not in mine:
        training, held = (_weighted(settings, each) for each in (training, held))
    facts = _facts(settings, name, training, given)
    if held is not None:
        _check_alike(_spec(training, name), _spec(held, other), name, other)
    return OwnData(
        settings.but(batch_size=size),
        facts,
        training,
        held,
        examples,
        note=_note(given, size),
        mine=mine,
    )


def _batched(settings, name, data, shuffled):
    """Makes batches of arrays; checks other data.

    Returns:
        The data; how many examples there are, if known; and examples in a batch.
    """
    if isinstance(data, tuple):
        return _of_arrays(settings, name, data, shuffled)
    leaves = keras.tree.flatten(_spec(data, name))
    rows = {leaf.shape[0] if leaf.shape.rank else 0 for leaf in leaves} - {None}
    if len(rows) > 1 or 0 in rows:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise ValueError(
            f"{name} gives single examples, of shapes {shapes}; expected batches, so "
            "add .batch(32), or the batch_size that it may ask for."
        )
    size = leaves[0].shape[0]
    if isinstance(data, keras.utils.PyDataset):
        count, size = data.num_batches, len(keras.tree.flatten(data[0])[0])
    else:
        count = int(data.cardinality())
        if count == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                f"{name} never ends; expected one epoch, so leave out .repeat()."
            )
        if size is None:
            first = next(iter(data.take(1)), None)
            if first is None:
                raise ValueError(f"{name} is empty; expected at least one batch.")
            size = int(tf.shape(keras.tree.flatten(first)[0])[0])
    known = count is not None and count >= 0
    return data, count * size if known else None, size


def _of_arrays(settings, name, arrays, shuffled):
    arrays = keras.tree.map_structure(np.asarray, arrays)
    lengths = {len(each) for each in keras.tree.flatten(arrays)}
    if len(lengths) > 1 or 0 in lengths:
        found = ", ".join(map(str, sorted(lengths)))
        raise ValueError(
            f"{name} has arrays of {found} rows; expected one row for each example, in "
            "all of them."
        )
    (count,) = lengths
    with tf.device("/CPU:0"):
        tensors = keras.tree.map_structure(tf.constant, arrays)
    # Numbers are shuffled, not examples: each takes 8 bytes.
    numbers = tf.data.Dataset.range(count)
    if shuffled:
        numbers = numbers.shuffle(count, seed=settings.seed)
    data = numbers.batch(settings.batch_size).map(
        lambda rows: tf.nest.map_structure(lambda each: tf.gather(each, rows), tensors),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return data.prefetch(tf.data.AUTOTUNE), count, settings.batch_size


def _weighted(settings, data):
    """Has pixels without a class weigh nothing, as in a data set; for metrics."""
    if settings.task != "segmentation" or not isinstance(data, tf.data.Dataset):
        return data
    spec = data.element_spec
    if not isinstance(spec, tuple) or len(spec) != 2:
        return data
    if not isinstance(spec[1], tf.TensorSpec) or not spec[1].dtype.is_integer:
        return data
    return data.map(lambda x, y: (x, y, Target("mask", 0).weights(y)))


def _spec(data, name):
    """Shapes and types of a batch (x, y) or (x, y, sample_weight)."""
    if isinstance(data, keras.utils.PyDataset):
        batch = tf.nest.map_structure(tf.convert_to_tensor, data[0])
        spec = tf.nest.map_structure(_any_rows, batch)
    else:
        spec = data.element_spec
    if not isinstance(spec, tuple | list) or len(spec) not in (2, 3):
        raise ValueError(
            f"{name} gives a {type(spec).__name__}"
            f"{f' of {len(spec)}' if isinstance(spec, tuple | list) else ''}; expected "
            "batches (x, y) or (x, y, sample_weight)."
        )
    return tuple(spec)


def _any_rows(tensor):
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def _facts(settings, name, training, given):
    x, y, *_ = _spec(training, name)
    inputs = tf.nest.map_structure(
        lambda spec: keras.KerasTensor((None, *spec.shape[1:]), spec.dtype.name), x
    )
    facts = DataFacts(name, "own", inputs)
    if settings.task is None or keras.tree.is_nested(y):
        return facts
    shape = tuple(y.shape[1:])
    target = _target(settings, TASKS[settings.task], name, y, given)
    return dataclasses.replace(facts, target=target, target_shape=shape)


def _target(settings: Settings, task: Task, name: str, y: Any, given: Any) -> Target:
    """Finds out what is to be given, for a task that was asked for."""
    size = settings.num_classes or 0
    if task.of_classes:
        if not (y.dtype.is_integer or y.dtype.is_bool):
            raise ValueError(
                f"y of {name} is {y.dtype.name} {tuple(y.shape)}; expected whole "
                f"numbers of classes for --task={task.name}, so convert it."
            )
        if not size and isinstance(given, tuple):
            classes = np.asarray(given[1])
            if task.kind == "mask":
                classes = classes[classes != IGNORED]
            size = int(np.max(classes, initial=0)) + 1
    elif task.name == "binary":
        size = 2
    else:
        size = (y.shape[-1] or 0) if y.shape.rank > 1 else 1
    return Target(task.kind, size)


def _check_alike(spec, other_spec, name, other):
    for ours, theirs in zip(
        keras.tree.flatten(spec[:2]), keras.tree.flatten(other_spec[:2]), strict=False
    ):
        if not ours.shape[1:].is_compatible_with(theirs.shape[1:]):
            raise ValueError(
                f"{other} has shapes {tuple(theirs.shape)}, but {name} "
                f"{tuple(ours.shape)}; expected the same in both."
            )


def _note(given, size):
    if isinstance(given, tuple):
        return "shuffled completely"
    return f"in batches of {words.count(size, 'example')} as the file makes them"


def _iterate(data):
    if isinstance(data, keras.utils.PyDataset):
        return (data[number] for number in range(data.num_batches))
    return iter(data)


def most_batches_evaluated(
    settings: Settings, examples: int | None, has_held_out: bool
) -> int | None:
    """Returns how many batches are evaluated at most; `None` if all are.

    Args:
        settings: --eval_steps counts, if it is given.
        examples: How many there are to train on, if that is known.
        has_held_out: Whether there is validation data, of which all is evaluated.
    """
    if settings.eval_steps is not None or has_held_out:
        return settings.eval_steps
    if examples is not None and examples <= MOST_TRAINING_EXAMPLES:
        return None
    return math.ceil(MOST_TRAINING_EXAMPLES / settings.batch_size)


def first_batches(
    data: tf.data.Dataset | keras.utils.PyDataset, batches: int | None
) -> tf.data.Dataset | keras.utils.PyDataset:
    """Returns data that end after as many batches; `None` leaves them as they are."""
    if batches is None:
        return data
    if isinstance(data, keras.utils.PyDataset):
        return _FirstBatches(data, batches)
    return data.take(batches)


class _FirstBatches(keras.utils.PyDataset):
    """The first batches of another one."""

    def __init__(self, data: keras.utils.PyDataset, batches: int):
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self._data, self._batches = data, batches

    @property
    def num_batches(self):
        known = self._data.num_batches
        return self._batches if known is None else min(known, self._batches)

    def __getitem__(self, index):
        return self._data[index]

    def on_epoch_begin(self):
        self._data.on_epoch_begin()

    def on_epoch_end(self):
        self._data.on_epoch_end()

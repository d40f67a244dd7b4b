"""The data of a run, as settings describe them: opened, checked and kept at hand."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers import input_pipeline
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.records.quarantine import Quarantine
from towers.input_pipeline.specs import takes
from towers.program import words
from towers.program.commands import read_image_size, read_randaugment
from towers.train.checks import DATA_FLAGS
from towers.train.parts import facts as facts_parts
from towers.train.parts import own_data
from towers.train.parts.facts import DataFacts
from towers.train.parts.my_model import MyModel
from towers.train.parts.own_data import OwnData
from towers.train.parts.task import TASKS
from towers.train.settings import DEFAULTS, Settings


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains and evaluates on.

    Attributes:
        settings: How to read it.
        source: Where training data comes from.
        facts: What it has.
        held_out: Source and split to evaluate on, if there is one.
        image_shape: (height, width, channels) of the images, or (numbers in a row,).
        quarantines: Bad records that are passed over, of each data set.
    """

    settings: Settings
    source: input_pipeline.Source
    facts: DataFacts
    held_out: tuple[input_pipeline.Source, str] | None
    image_shape: tuple[int, ...]
    quarantines: Sequence[Quarantine] = ()

    @property
    def examples(self) -> int | None:
        """How many there are in an epoch of training, if that is known."""
        return self.source.splits["train"]

    @property
    def bad_records(self) -> int | None:
        """How many are passed over; `None` if they were not looked for."""
        return sum(map(len, self.quarantines)) if self.quarantines else None

    @property
    def evaluated(self) -> tuple[input_pipeline.Source, str]:
        """Source and split to evaluate on: held out, else the training data."""
        return self.held_out or (self.source, "train")

    @property
    def note(self) -> str:
        """What else is to be known of the training data, as a phrase."""
        return self.source.note

    @property
    def bytes_per_token(self) -> Mapping[str, float]:
        """Of the text that a loss is of, by the loss's name, as far as it is known."""
        size = self.source.bytes_per_token.get("train")
        found = {"loss": size, "train_loss": size}
        if self.held_out is not None:
            source, split = self.held_out
            found["val_loss"] = source.bytes_per_token.get(split)
        return found

    def notes(self) -> Sequence[str]:
        """Says what was decided about the data without being asked for."""
        return self.source.notes

    def blaming(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an error of the input names the record that is bad."""
        return input_pipeline.blame_records(self.source, self.evaluated[0])

    def batches(self, count: int) -> list[Any]:
        """Reads some batches of training data, in a fixed order.

        Raises:
            ValueError: If a record is bad.
        """
        # Each epoch anew, and in this process.
        read = self.open_training(deterministic=True, repeat=False, data_service=None)
        with input_pipeline.blame_records(self.source):
            return list(itertools.islice(read.repeat(), count))

    def steps_per_epoch(self) -> int | None:
        """Batches in an epoch of training, if epochs are to follow without a gap.

        `None` if their number is unknown, or calls of several steps would go on into
        the next epoch: then each epoch opens the data anew.
        """
        steps = self.examples and math.ceil(self.examples / self.settings.batch_size)
        return steps if steps and steps % self.settings.steps_per_loop == 0 else None

    @functools.cached_property
    def training(self) -> tf.data.Dataset:
        """The training data, shuffled, from the beginning."""
        return self.open_training()

    @functools.cached_property
    def evaluation(self) -> tf.data.Dataset:
        """What to evaluate on, in order."""
        return self._open(*self.evaluated, training=False)

    @property
    def advice(self) -> Mapping[str, str]:
        """What to do about a stage that is slow; see `Starvation`."""
        return input_pipeline.stage_advice(
            self.source.origin is not self.source, flags=True
        )

    def samples(self) -> tf.data.Dataset:
        """Opens training data for a look at it: augmented, not mixed, read at once."""
        return self.open_training(
            batch_size=9, shuffle_mb=0, repeat=False, data_service=None
        )

    def open_training(self, **options: Any) -> tf.data.Dataset:
        """Opens the training data, with some options of `make_dataset` changed."""
        return self._open(self.source, "train", training=True, **options)

    def keep_at_hand(self) -> "Data":
        """Returns it with the examples kept at hand, as --cache says.

        Raises:
            ValueError: If a record is bad.
        """
        return _at_hand(self)

    def _open(self, source, split, training, **options):
        settings = self.settings
        options = {
            "batch_size": settings.batch_size,
            "image_shape": self.image_shape,
            "training": training,
            "recipe": settings.recipe,
            "randaugment": read_randaugment(settings.randaugment),
            "seed": settings.seed,
            "deterministic": settings.deterministic or not training,
            "shuffle_mb": settings.shuffle_mb,
            "repeat": training and self.steps_per_epoch() is not None,
            "data_service": settings.data_service,
            "ram_budget_mb": settings.ram_budget_mb,
            **options,
        }
        return input_pipeline.make_dataset(source, split, **options)


@dataclasses.dataclass(frozen=True)
class Opened:
    """Data sets that are opened, and not read yet.

    Attributes:
        settings: How to read them.
        source: What to train on.
        held_out: What to evaluate on, if it is another.
        image_shape: Shape of an image, or of a row.
        facts: What the training data have.
    """

    settings: Settings
    source: input_pipeline.Source
    held_out: input_pipeline.Source | None
    image_shape: tuple[int, ...]
    facts: DataFacts

    def prepare(self, known: Sequence[Quarantine] = ()) -> Data:
        """Downloads or writes what is missing, and has a look at the records.

        Args:
            known: Bad records that were found earlier.
        """
        return prepare_data(self, known)


def open_data(settings: Settings, mine: MyModel | None) -> Opened | OwnData:
    """Opens what to train and evaluate on: data sets, or what the user's file reads.

    Raises:
        ValueError: They cannot be opened, or do not fit together.
    """
    if settings.dataset is None:
        return own_data.open_data(settings, mine)
    source, held_out = open_sources(settings)
    shape = choose_image_shape(settings, source)
    facts = facts_parts.of_source(source, shape)
    return Opened(settings, source, held_out, shape, facts)


def open_sources(
    settings: Settings,
) -> tuple[input_pipeline.Source, input_pipeline.Source | None]:
    """Opens what to train on, and what to evaluate on if that is another data set."""
    source = open_source(settings, settings.dataset, settings.num_classes)
    if settings.eval_dataset is None:
        return source, None
    held_out = open_source(settings, settings.eval_dataset, source.num_classes, source)
    check_same_kind(settings, source, held_out)
    return source, held_out


def open_source(
    settings: Settings,
    spec: str,
    num_classes: int | None,
    like: input_pipeline.Source | None = None,
) -> input_pipeline.Source:
    """Opens a data set.

    Args:
        settings: Of the data.
        spec: The data set.
        num_classes: How many classes it has, if that is known.
        like: The training data, if this is what to evaluate on: classes and columns
            of a table are to be the same.
    """
    options = {name: getattr(settings, name) for name in DATA_FLAGS}
    options["num_classes"] = num_classes
    options["target"] = settings.task and TASKS[settings.task].kind
    if like is not None:
        options["class_names"] = like.class_names
        options["tokenizer"] = like.tokenizer
        if takes(settings.dataset, "feature_columns"):
            options |= {"label_key": None, "label_column": like.label_field}
        if takes(settings.dataset, "feature_columns") and len(like.image_shape) == 1:
            options["feature_columns"] = like.image_fields
    if spec != settings.dataset:
        # All of it is for evaluation.
        options |= {"train_split": None, "eval_fraction": 0}
    elif settings.eval_dataset is not None:
        options |= {"eval_split": None, "eval_fraction": 0}
    return input_pipeline.open_source(
        spec,
        **{
            name: value
            for name, value in options.items()
            if value is not None and takes(spec, name)
        },
        **_cache_dir(settings, spec),
        data_dir=os.path.expanduser(settings.data_dir),
        seed=settings.seed,
        skip_bad=settings.bad_records == "skip",
    )


def _cache_dir(settings: Settings, spec: str) -> dict[str, str]:
    """The folder where the tokens of text are kept, if there is one."""
    if settings.cache_dir is None or not takes(spec, "cache_dir"):
        return {}
    return {"cache_dir": settings.cache_dir}


def check_same_kind(
    settings: Settings,
    source: input_pipeline.Source,
    held_out: input_pipeline.Source,
) -> None:
    """Checks that images have the same size, and labels the same meaning, in both."""
    if held_out.image_shape != source.image_shape and not settings.image_size:
        raise ValueError(
            f"The images of the eval_dataset {held_out.name} are "
            f"{held_out.image_shape}, but those of {source.name} "
            f"{source.image_shape}; give one --image_size for both."
        )
    if held_out.num_classes != source.num_classes:
        raise ValueError(
            f"The eval_dataset {held_out.name} has "
            f"{words.count(held_out.num_classes, 'class', 'classes')}, but "
            f"{source.name} has {source.num_classes}; expected the same classes."
        )
    names = zip(source.class_names or (), held_out.class_names or (), strict=False)
    for label, (ours, theirs) in enumerate(names):
        if ours != theirs:
            raise ValueError(
                f"The label {label} is {theirs!r} in the eval_dataset {held_out.name}, "
                f"but {ours!r} in {source.name}; expected the same classes."
            )


def choose_image_shape(
    settings: Settings, source: input_pipeline.Source
) -> tuple[int, ...]:
    """Decides the images' size: what --image_size says, else as they are."""
    if source.input_kind in ("row", "tokens"):
        of_tokens = source.input_kind == "tokens"
        what = "tokens" if of_tokens else "numbers"
        mixing = ("mixup_alpha", "cutmix_alpha") if of_tokens else ()
        for name in ("image_size", "recipe", "randaugment", *mixing):
            if getattr(settings, name) != getattr(DEFAULTS, name):
                raise ValueError(
                    f"Received {settings.as_flag(name)}, but {source.name} has rows "
                    f"of {what}; expected images, so leave it out."
                )
        if settings.cutmix_alpha:
            raise ValueError(
                f"Received --cutmix_alpha={settings.cutmix_alpha}, but {source.name} "
                "has rows of numbers; expected images, so use --mixup_alpha."
            )
        return source.image_shape
    height, width, channels = source.image_shape
    if (asked := read_image_size(settings.image_size)) is not None:
        height, width = asked
    if height is None or width is None:
        raise ValueError(
            f"The images of {source.name} differ in size; expected one size for all, "
            "so give --image_size, such as --image_size=224."
        )
    return height, width, channels


def prepare_data(opened: Opened, known: Sequence[Quarantine] = ()) -> Data:
    """See `Opened.prepare`; without a held_out, that is the test split, if any."""
    settings, source, held_out = opened.settings, opened.source, opened.held_out
    source.prepare()
    if held_out is not None:
        held_out.prepare()
        split = "test" if "test" in held_out.splits else "train"
        source, found = _look_at_records(settings, source, ["train"], known)
        held_out, more = _look_at_records(settings, held_out, [split], known)
        evaluated, found = (held_out, split), found + more
    else:
        source, found = _look_at_records(settings, source, list(source.splits), known)
        evaluated = (source, "test") if "test" in source.splits else None
    return Data(settings, source, opened.facts, evaluated, opened.image_shape, found)


def _look_at_records(
    settings: Settings,
    source: input_pipeline.Source,
    splits: Sequence[str],
    known: Sequence[Quarantine],
) -> tuple[input_pipeline.Source, list[Quarantine]]:
    """Checks labels, or leaves out bad records, as --bad_records says.

    Returns:
        The source, without its bad records; and which these are, if they were looked
        for.
    """
    for split in splits:
        if source.splits[split] == 0:
            raise ValueError(
                f"{source.name} has no record in its split {split}; expected at least "
                "one, so check its files."
            )
    if settings.bad_records == "fail":
        # Two splits may have parts of the same files.
        for split in {tuple(source.files(split)): split for split in splits}.values():
            input_pipeline.scan_labels(source, split)
        return source, []
    found = quarantine.inspect(source, splits, settings.max_bad_records, known)
    return source.without(found.bad, found.splits), [found]


def _at_hand(data: Data) -> Data:
    source, held_out = _cached(data, data.source), data.held_out
    if held_out is not None:
        other, split = held_out
        held_out = source if other is data.source else _cached(data, other), split
    return dataclasses.replace(data, source=source, held_out=held_out)


def _cached(data: Data, source: input_pipeline.Source) -> input_pipeline.Source:
    settings = data.settings
    # Workers of a service read the files themselves.
    cache = "none" if settings.data_service else settings.cache
    # To keep pixels, all images are decoded first: that pays from the second epoch on.
    pays = settings.train_epochs > 1 or cache == "disk"
    with input_pipeline.blame_records(source):
        return input_pipeline.cached(
            source,
            cache,
            settings.cache_dir,
            settings.deterministic,
            data.image_shape if pays else None,
            settings.recipe,
        )

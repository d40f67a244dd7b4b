"""The data of a run: what it trains and evaluates on, checked and kept at hand."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers import input_pipeline
from towers.collectives.joined_hosts import this_host
from towers.input_pipeline.cache import space
from towers.input_pipeline.pipeline.room import shuffle_note
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.records.quarantine import Quarantine
from towers.input_pipeline.specs import takes
from towers.input_pipeline.text import HubTokenizer
from towers.models import hub
from towers.models import spec as spec_of_model
from towers.program import voice
from towers.program.commands import read_image_size, read_randaugment
from towers.train.checks import DATA_FLAGS
from towers.train.parts import facts as facts_parts
from towers.train.parts import own_data, scale
from towers.train.parts.facts import DataFacts
from towers.train.parts.my_model import MyModel
from towers.train.parts.own_data import OwnData
from towers.train.parts.task import TASKS, described
from towers.train.settings import Settings, is_given

# Of records that are read from front to back, a sample is drawn from this much.
_SAMPLE_MB = 32


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
        scaling: How rows of numbers are scaled; `None` if they are not.
        scaling_note: What to say of that; may be empty.
        sends_numbers: Whether training data are numbers of examples that stay on the
            devices; see `keeping.py`.
    """

    settings: Settings
    source: input_pipeline.Source
    facts: DataFacts
    held_out: tuple[input_pipeline.Source, str] | None
    image_shape: tuple[int, ...]
    quarantines: Sequence[Quarantine] = ()
    scaling: input_pipeline.Scaling | None = None
    scaling_note: str = ""
    sends_numbers: bool = False

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
    def tokens_per_example(self) -> float:
        """How many tokens an example has, without padding; 0 if it is no text."""
        if self.source.input_kind != "tokens":
            return 0
        padded = self.source.has_padding
        return self.source.mean_length("train") if padded else self.image_shape[0]

    @property
    def bytes_per_token(self) -> Mapping[str, float]:
        """Of the text that a loss is of, by the loss's name, as far as it is known."""
        size = self.source.bytes_per_token.get("train")
        found = {"loss": size, "train_loss": size}
        if self.held_out is not None:
            source, split = self.held_out
            found["val_loss"] = source.bytes_per_token.get(split)
        return found

    @property
    def vocabularies(self) -> Mapping[str, Sequence[str]]:
        """Texts of the columns of categories, by their names."""
        return self.source.vocabularies

    def notes(self) -> Sequence[str]:
        """Says what was decided about the data without being asked for."""
        several = this_host().count > 1
        reading = self.training.pipeline.reads_whole if several else ""
        has_buffer = self.source.has_buffer
        buffer = shuffle_note(self.settings.shuffle_mb) if has_buffer else ""
        on_gpu = self.settings.decode_on == "gpu"
        decoding = self.training.pipeline.decode_note if on_gpu else ""
        notes = self.scaling_note, reading, buffer, decoding
        return [*self.source.notes, *filter(None, notes)]

    def blaming(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an error of the input names the record that is bad."""
        return input_pipeline.blame_records(self.source, self.evaluated[0])

    def batches(self, count: int) -> list[Any]:
        """Reads some batches of training data, in a fixed order.

        Raises:
            ValueError: If a record is bad.
        """
        # Each epoch anew, in this process, and in the types that a model takes.
        options = {"repeat": False, "data_service": None, "compact": False}
        read = self.open_training(deterministic=True, **options)
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
        return self.open_training(numbered=self.sends_numbers)

    @functools.cached_property
    def evaluation(self) -> tf.data.Dataset:
        """What to evaluate on, in a fixed order."""
        most = self.eval_batches
        # The first ones of a sorted training set may all be of one class.
        options = {}
        if self.held_out is None and most is not None:
            most_mb = min(self.settings.shuffle_mb, _SAMPLE_MB)
            options = {"sampled": True, "shuffle_mb": most_mb}
        return self._open(*self.evaluated, training=False, most_batches=most, **options)

    @property
    def eval_batches(self) -> int | None:
        """How many batches are evaluated at most; `None` if all are."""
        has_held_out = self.held_out is not None
        return own_data.most_batches_evaluated(
            self.settings, self.examples, has_held_out
        )

    @property
    def advice(self) -> Mapping[str, str]:
        """What to do about a stage that is slow; see `Starvation`."""
        return input_pipeline.stage_advice(
            self.source.origin is not self.source, flags=True
        )

    def samples(self) -> tf.data.Dataset:
        """Opens training data for a look at it: augmented, not mixed, read at once."""
        options = {"batch_size": 9, "shuffle_mb": 0, "repeat": False}
        options["decode_on"] = "cpu"
        # From the origin: a few pictures need not be kept in memory.
        return self._open(
            self.source.origin, "train", training=True, data_service=None, **options
        )

    def open_training(self, **options: Any) -> tf.data.Dataset:
        """Opens the training data, with some options of `make_dataset` changed."""
        return self._open(self.source, "train", **{"training": True, **options})

    def in_batches_of(self, size: int) -> "Data":
        """Returns it with other batches, of so many examples."""
        return dataclasses.replace(self, settings=self.settings.but(batch_size=size))

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
            "scaling": self.scaling,
            "compact": True,  # towers widen them; see `model.make_preprocess`
            "seed": settings.seed,
            "deterministic": settings.deterministic or not training,
            "shuffle_mb": settings.shuffle_mb,
            "repeat": training and self.steps_per_epoch() is not None,
            "data_service": settings.data_service,
            "ram_budget_mb": settings.ram_budget_mb,
            "decode_on": settings.decode_on,
            "group_by_length": settings.group_by_length,
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
    if settings.group_by_length and not source.has_padding:
        raise ValueError(
            f"Received --group_by_length, but {source.name} has no rows of tokens with "
            "padding; expected texts, so leave it out."
        )
    facts = facts_parts.of_source(
        source, (None,) if settings.group_by_length else shape
    )
    return Opened(settings, source, held_out, shape, facts)


def prepare_data(opened: Opened, known: Sequence[Quarantine] = ()) -> Data:
    """See `Opened.prepare`; without a held_out, that is the test split, if any."""
    settings, source, held_out = opened.settings, opened.source, opened.held_out
    source.prepare()
    if "train" not in source.splits:
        raise ValueError(
            f"{source.name} has nothing to train on, as names in it say that all of "
            "it is held out (test, validation); expected other data, so name this by "
            "--eval_dataset, or rename it."
        )
    if held_out is not None:
        held_out.prepare()
        split = "test" if "test" in held_out.splits else "train"
        source, found = _look_at_records(settings, source, ["train"], known)
        held_out, more = _look_at_records(settings, held_out, [split], known)
        validation, found = (held_out, split), found + more
    else:
        source, found = _look_at_records(settings, source, list(source.splits), known)
        validation = (source, "test") if "test" in source.splits else None
    return Data(
        *(settings, source, opened.facts, validation, opened.image_shape, found),
        *_scaling(settings, source),
    )


def _scaling(settings, source):
    """How rows are scaled, and a note on it: as the first host finds."""
    hosts, found = this_host(), None
    if hosts.index == 0:
        scaling, note = scale.choose(settings, source)
        found = scaling and scaling.to_json(), note
    scaling, note = hosts.broadcast_value(found)
    return scaling and input_pipeline.Scaling.from_json(scaling), note


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
    if not settings.skips_bad:
        # Two splits may have parts of the same files.
        for split in {tuple(source.files(split)): split for split in splits}.values():
            input_pipeline.scan_labels(source, split)
        return source, []
    most, hosts = settings.max_bad_records, this_host()
    found = quarantine.inspect(source, splits, most, known, hosts)
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
    cache = "none" if settings.data_service else settings.cache_kind
    if settings.keeps_on_devices:
        cache = "auto"  # here they are read from, and their order is the same
    # To keep pixels, all images are decoded first: that pays from the second epoch on.
    pays = settings.train_epochs > 1 or cache == "disk"
    resized = pays and source.input_kind == "image"
    with input_pipeline.blame_records(source):
        return input_pipeline.cached(
            source,
            cache,
            settings.cache_dir,
            settings.deterministic,
            data.image_shape if resized else None,
            settings.recipe,
            _room,
            lambda fits: all(this_host().exchange(fits)),
        )


def _room(folder: str | None, deterministic: bool) -> tuple[float, float]:
    """What each host may take to keep examples, of the least that one has.

    Hosts on one machine divide what is there.
    """
    mine = [socket.gethostname(), *space.room(folder, deterministic)]
    machines, *sizes = zip(*this_host().exchange(mine), strict=True)
    count = 1 if deterministic else max(map(machines.count, machines))
    return tuple(min(size) / count for size in sizes)


def open_sources(
    settings: Settings,
) -> tuple[input_pipeline.Source, input_pipeline.Source | None]:
    """Opens what to train on, and what to evaluate on if that is another data set."""
    source = open_source(settings, settings.dataset, settings.num_classes)
    if source.input_kind == "columns":
        # A table has as many rows as there are texts in the data.
        source.prepare()
    if settings.eval_dataset is None:
        return source, None
    classes = source.num_classes or None
    held_out = open_source(settings, settings.eval_dataset, classes, source)
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
        like: The training data, if this is what to evaluate on: targets and columns
            of a table are to be the same.
    """
    options = {name: getattr(settings, name) for name in DATA_FLAGS}
    options["num_classes"] = num_classes
    options["vocabularies"], options["column_kinds"] = scale.read_columns(settings)
    options["target"] = settings.task and TASKS[settings.task].kind
    if spec_of_model.is_hub(settings.model) and spec.startswith("text:"):
        preset, _ = spec_of_model.split_hub(settings.model)
        options["tokenizer"] = HubTokenizer(hub.tokenizer(preset))
    if like is not None:
        target = like.target
        options |= {"class_names": like.class_names, "target": target.kind}
        options["tokenizer"] = like.tokenizer
        columns = takes(settings.dataset, "feature_columns")
        tables = columns and takes(settings.dataset, "text_column")
        if tables:
            labels = target.names if target.row_shape else like.label_field
            options |= {"label_column": labels}
        named = like.input_kind in ("columns", *["row"] * tables)
        if columns and named:
            options["feature_columns"] = [*like.image_fields, *like.vocabularies]
            options["vocabularies"] = like.vocabularies or None
            options["column_kinds"] = like.column_kinds or None
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
        **_findings(settings, spec),
        **_local_store(settings, spec),
        data_dir=os.path.expanduser(settings.data_dir),
        seed=settings.seed,
        skip_bad=settings.skips_bad,
    )


def _cache_dir(settings: Settings, spec: str) -> dict[str, str]:
    """The folder where the tokens of text are kept, if there is one."""
    if settings.cache_dir is None or not takes(spec, "cache_dir"):
        return {}
    return {"cache_dir": settings.cache_dir}


def _findings(settings: Settings, spec: str) -> dict[str, str]:
    """The file beside the run in which passes over all data keep their findings."""
    if settings.text_column is not None or not takes(spec, "findings"):
        return {}
    name = "train" if spec == settings.dataset else "eval"
    # Hosts of one folder have a file each.
    host = f"-{this_host().index}" if this_host().index else ""
    path = os.path.join(settings.absolute_model_dir, f"{name}-findings{host}")
    return {"findings": path}


def _local_store(settings: Settings, spec: str) -> dict[str, Any]:
    """The store through which remote files are read, if there is one."""
    if settings.store_folder is None or not takes(spec, "local_store"):
        return {}
    return {"local_store": _store(settings.store_folder, settings.store_gb)}


@functools.cache
def _store(folder: str, limit_gb: float) -> input_pipeline.LocalStore:
    """One for all data sets of a process: its threads go on until the process ends."""
    return input_pipeline.LocalStore(folder, limit_gb, tell=voice.warn)


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
    ours, theirs = source.target, held_out.target
    if (ours.kind, ours.size) != (theirs.kind, theirs.size):
        raise ValueError(
            f"The eval_dataset {held_out.name} has {described(theirs)}, but "
            f"{source.name} has {described(ours)}; expected the same."
        )
    names = zip(ours.names or (), theirs.names or (), strict=False)
    for label, (our, their) in enumerate(names):
        if our != their:
            raise ValueError(
                f"The label {label} is {their!r} in the eval_dataset {held_out.name}, "
                f"but {our!r} in {source.name}; expected the same."
            )


def choose_image_shape(
    settings: Settings, source: input_pipeline.Source
) -> tuple[int, ...]:
    """Decides the images' size: what --image_size says, else as they are."""
    if source.input_kind != "image":
        what = {"row": "numbers", "columns": "numbers and categories"}
        what = what.get(source.input_kind, "tokens")
        mixing = () if source.input_kind == "row" else ("mixup_alpha", "cutmix_alpha")
        for name in ("image_size", "recipe", "randaugment", *mixing):
            if is_given(settings, name):
                raise ValueError(
                    f"Received {settings.as_flag(name)}, but {source.name} has rows "
                    f"of {what}; expected images, so leave it out."
                )
        if settings.cutmix_alpha:
            raise ValueError(
                f"Received {settings.as_flag('mix')}, but {source.name} "
                "has rows of numbers; expected images, so use --mix=mixup:0.2."
            )
        return scale.shape(settings, source)
    if source.target.kind == "mask" and settings.randaugment:
        raise ValueError(
            f"Received {settings.as_flag('randaugment')}, but {source.name} has masks, "
            "which it does not change; expected none, so leave it out."
        )
    height, width, channels = source.image_shape
    if (asked := read_image_size(settings.image_size)) is not None:
        height, width = asked
    if height is None or width is None:
        raise ValueError(input_pipeline.unknown_size(source))
    return height, width, channels

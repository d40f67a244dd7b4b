"""The input pipeline of one split, as a value.

One pass over the dataset is one epoch. Repeating, splitting a batch over the towers,
copying it to the devices and making floats of it are left to whoever iterates.
"""

import dataclasses
import functools
import hashlib
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from towers.input_pipeline.choices import DECODE_ON
from towers.input_pipeline.images import draws, recipes
from towers.input_pipeline.images.decode import ALL_TRICKS, Tricks
from towers.input_pipeline.local_store.ahead import EPOCHS_AT_ONCE
from towers.input_pipeline.pipeline import lengths, room
from towers.input_pipeline.pipeline.advice import stage_advice
from towers.input_pipeline.pipeline.room import THREADS
from towers.input_pipeline.pipeline.rows import Rows, Share
from towers.input_pipeline.pipeline.scaling import Scaling
from towers.input_pipeline.pipeline.sizes import unknown_size
from towers.input_pipeline.pipeline.stages import RecordStages
from towers.input_pipeline.records.checks import check_image_shape
from towers.input_pipeline.sources import Source
from towers.input_pipeline.sources.base import StreamSource
from towers.program.extras import import_extra
from towers.program.python_calls import until_exit

_TOKENS_AT_ONCE = 2**17


def make_dataset(
    source: Source, split: str, batch_size: int, **options: Any
) -> tf.data.Dataset:
    """Builds the input pipeline of one split: a ``Pipeline``'s ``dataset()``.

    Args:
        source: where the records are.
        split: one of ``source.splits``.
        batch_size: examples in a batch.
        **options: the other attributes of ``Pipeline``, all of which have defaults.
    """
    return Pipeline(source, split, batch_size=batch_size, **options).dataset()


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The input pipeline of one split.

    Each iteration over a training dataset is the next epoch, with its own order. The
    order depends only on ``seed`` and the number of the epoch. With
    ``deterministic=False``, it also depends on which thread was faster. An iteration
    counts as an epoch as soon as its first batch is requested. Augmentation depends
    only on the seed, the epoch and the record.

    Attributes:
        source: where the records are.
        split: one of ``source.splits``.
        batch_size: examples in a batch; the last batch of an epoch may be shorter.
        image_shape: (H, W, C) of the resulting images; 1 and 3 channels are converted.
            (F,) for rows of numbers, which stay as they are. None: the source's own.
        training: True shuffles and augments; False reads in one fixed order. None: True
            for the split "train".
        sampled: whether the fixed order of what is not for training is drawn at random,
            so that its first batches are a sample of all.
        recipe: how to augment images; see ``recipes.find``.
        randaugment: number of operations and magnitude of RandAugment, or None.
        scaling: how rows of numbers are scaled; None leaves them as they are.
        exact: whether rows of numbers stay as the source has them, such as float64;
            else they become float32, once they are scaled.
        compact: whether labels, masks, tokens and ids have the smallest integer types
            that hold them, and weights, which are 0 or 1, are uint8. A batch on its way
            to a device is then smaller. Keras's losses and metrics take these types;
            other code may have to cast them, as `towers train` does on the towers.
        numbered: whether a batch has the numbers of its records and nothing else: int64
            [B]. They come in the order in which the records would.
        seed: seed of order and augmentation, at least 0. ``tf.random.set_seed`` has no
            influence.
        deterministic: True gives the same order for the same seed. False may return
            records in the order in which they become ready.
        shuffle_mb: memory of the shuffle buffer, for sources that are read from front
            to back, of encoded records; at most a quarter of what a container may take.
        start_epoch: number of the first iteration, so that a run that resumes at epoch
            e gets the order of epoch e.
        start_record: records that the first iteration skips, without decoding them.
        repeat: True continues with the next epoch, endlessly and without a gap; batches
            do not mix epochs.
        data_service: address of the dispatcher of a tf.data service, such as
            ``grpc://localhost:5050``, whose workers run the pipeline. They have to see
            the same files. None: the pipeline runs here.
        ram_budget_mb: memory that tf.data may take for buffers of batches. None: half
            of the machine's, and in a container with a limit a quarter of what is free.
        tricks: optimizations of decoding on the CPU; all by default.
        decode_on: "cpu", or "gpu" for DALI, which decodes, crops, resizes and mirrors
            images on the GPUs; see `decode_note`. Pixels differ a little.
        group_by_length: whether batches are made of rows of tokens of like length. A
            batch is as long as its longest row, rounded up to a multiple of an eighth
            of the rows' length, so that there are eight lengths at most. The order is
            still a function of the seed and the epoch.
        most_batches: how many batches to give at most. None: all.
        share: which rows of each batch to make, where several hosts train together; the
            towers of a host get no others. All hosts then have the same batches, in the
            same order, whatever `deterministic` is. None: all rows.

    Raises:
        ValueError: there is no such split or recipe, a number is too small, images
            differ in size and no size was given, or channels cannot be converted.
    """

    source: Source
    split: str
    _: dataclasses.KW_ONLY
    batch_size: int
    image_shape: tuple[int, ...] | None = None
    training: bool | None = None
    sampled: bool = False
    recipe: str = "none"
    randaugment: tuple[int, int] | None = None
    scaling: Scaling | None = None
    exact: bool = False
    compact: bool = False
    numbered: bool = False
    seed: int = 0
    deterministic: bool = True
    shuffle_mb: int = 256
    start_epoch: int = 0
    start_record: int = 0
    repeat: bool = False
    data_service: str | None = None
    ram_budget_mb: int | None = None
    tricks: Tricks = ALL_TRICKS
    decode_on: str = "cpu"
    group_by_length: bool = False
    most_batches: int | None = None
    share: Share | None = None

    def __post_init__(self):
        if self.training is None:
            object.__setattr__(self, "training", self.split == "train")
        if self.image_shape is None:
            shape = tuple(self.source.image_shape)
            if self.scaling is not None:
                shape = (len(self.scaling.all_names),)
            if None in shape:
                raise ValueError(unknown_size(self.source))
            object.__setattr__(self, "image_shape", shape)
        self._check()

    def _check(self):
        """Checks that options go together, and with the source."""
        source, shape = self.source, self.image_shape
        if self.scaling is None:
            check_image_shape(source, shape)
        if self.split not in source.splits:
            known = ", ".join(source.splits) or "none yet: call prepare() first"
            raise ValueError(f"{source.name} has no split {self.split!r}, only {known}")
        for name in ("batch_size", "seed", "shuffle_mb", "start_epoch", "start_record"):
            least = 1 if name == "batch_size" else 0
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, expected at least {least}"
                )
        if self.data_service is not None and not source.in_graph:
            raise ValueError(
                f"data_service is {self.data_service}, but {source.name} is read "
                "by Python, which its workers cannot run: expected TFRecord files, to "
                "which towers.input_pipeline.convert turns any source"
            )
        service = self.data_service is not None
        if service and self.share is not None and not self.deterministic:
            raise ValueError(
                f"data_service is {self.data_service} on several hosts, whose workers "
                "would give each host other batches: expected deterministic=True, or "
                "no data service, as each host decodes its own rows only"
            )
        if self.numbered and (self.share is not None or self.group_by_length):
            raise ValueError(
                "numbered is True, with share or group_by_length, which need the "
                "records; expected neither"
            )
        if self.group_by_length and not source.has_padding:
            raise ValueError(
                f"group_by_length is True, but {source.name} has no padded rows "
                "of tokens: expected texts or sentences of different lengths, so leave "
                "it out"
            )
        if (scaling := self.scaling) is not None and (
            tuple(source.image_shape) != (len(scaling.names),)
            or shape != (len(scaling.all_names),)
        ):
            raise ValueError(
                f"scaling makes {len(scaling.all_names)} columns of "
                f"{len(scaling.names)}, but examples of {source.name} have the shape "
                f"{tuple(source.image_shape)} and image_shape is {shape}: expected the "
                "same columns, so measure scaling on this source, or leave it out"
            )
        if source.target.kind == "mask" and self.randaugment is not None:
            raise ValueError(
                f"randaugment is {self.randaugment}, which changes images without "
                f"their masks, and {source.name} has masks: expected None"
            )
        if self.decode_on not in DECODE_ON:
            raise ValueError(
                f"decode_on is {self.decode_on!r}, expected one of "
                f"{', '.join(DECODE_ON)}: choose one"
            )
        for name, refused in (
            ("data_service", service),
            ("randaugment", self.randaugment is not None),
            ("masks", source.target.kind == "mask"),
        ):
            if self.decode_on == "gpu" and refused:
                raise ValueError(
                    f"decode_on is 'gpu' with {name}: expected 'cpu', as only images "
                    "by themselves are decoded on the GPU, by the process that trains"
                )
        plain = self.recipe == "none" and self.randaugment is None
        if len(shape) == 1 and not plain:
            raise ValueError(
                f"recipe is {self.recipe!r}, randaugment {self.randaugment}: "
                f"{source.name} has no images but rows of numbers, so expected "
                "'none' and None"
            )

    def dataset(self) -> tf.data.Dataset:
        """Builds the dataset.

        Returns:
            A dataset of (uint8 images [B, H, W, C], int64 labels [B]), or of what else
            the source's `target` says in the place of labels, and in smaller types with
            `compact`. Masks and tags have sample weights behind them, 0 where there is
            no class. Its cardinality is known if the source knows its size and the
            dataset starts at the beginning of an epoch. Its attribute ``pipeline`` is
            this object. A run that continues uses it to make a dataset that starts
            elsewhere.
        """
        dataset = self._with_length(self._all())
        if self.most_batches is not None:
            dataset = dataset.take(self.most_batches)
        dataset.pipeline = self
        if self.share is not None and self.reads_whole:
            logging.info(self.reads_whole)
        return dataset

    @property
    def reads_whole(self) -> str:
        """Says why each of several hosts reads all records, in a sentence or not."""
        source = self.source
        if self.data_service and isinstance(source, StreamSource):
            # Sources run Python to read some rows only.
            why = "workers of a data service cannot read some rows only"
        else:
            why = source.reads_whole(self.split)
        return why and f"Each host reads all of {source.name}, as {why}."

    @property
    def decode_note(self) -> str:
        """Says where images are decoded if not where `decode_on` has it, else ""."""
        if self.decode_on == "cpu":
            return ""
        if not self.source.encoded:
            return f"The GPU decodes nothing, as {self.source.name} has no JPEG files."
        if not tf.config.get_visible_devices("GPU"):
            return "DALI decodes on the CPU, as there is no GPU."
        return ""

    @functools.cached_property
    def _decoder(self):
        """The decoder of whole batches by DALI; None if TensorFlow decodes."""
        if self.decode_on == "cpu" or not self.source.encoded:
            return None
        import_extra("nvidia.dali", "dali")
        from towers.input_pipeline.images import dali

        return dali.decoders(self.image_shape, self._rows_given)

    @property
    def order(self) -> dict[str, Any]:
        """The options that decide which records a batch has, by its place in an epoch.

        A run that goes on in the middle of an epoch needs the same. How much memory is
        free is none of it: a deterministic run keeps up to 1 GB of examples, by the
        data alone. The limit of a container counts.
        """
        source, split = self.source, self.split
        files = source.origin.files_digest(split)
        has_files = not files.startswith("0 ")
        buffer_mb, target = room.shuffle_mb(self.shuffle_mb), source.target
        return {
            "dataset": source.name.partition(":")[0] if has_files else source.name,
            "files": files,
            # Data that were changed have other sizes, mostly; times change with each
            # copy.
            "bytes": source.origin.bytes_of(split) if has_files else None,
            "split": split,
            "batch size": self.batch_size,
            # Also those that are passed over: the others keep their places.
            "examples": source.size_of_all(split),
            "seed": self.seed,
            "classes": target.names or target.size,
            "kept in memory": source.origin is not source,
            "shuffle_mb": buffer_mb if source.has_buffer else None,
            "grouped by length": self.group_by_length or None,
        }

    @property
    def makes(self) -> dict[str, Any]:
        """The options that change records; equal on all hosts that train together."""
        measured = repr((self.scaling, {**self.source.vocabularies}))
        return {
            "image_shape": self.image_shape,
            "recipe": self.recipe,
            "randaugment": self.randaugment,
            "what was measured of the data": hashlib.sha256(
                measured.encode()
            ).hexdigest()[:8],
        }

    def _all(self):
        if self.data_service is not None:
            dataset = self._epochs(self._on_workers)
        elif self.repeat:
            dataset = self._epochs(self._whole)
        else:
            dataset = self.stages()[-1][1]
        if self.group_by_length:
            # Here, as batches are made of what several workers send.
            of_each = self.source.target.kind in ("tags", "tokens")
            dataset = lengths.shorten(dataset, of_each)
        if self.share is not None:
            # A batch is shortened for all of its rows.
            rows = Rows(self.share, self.batch_size)
            say = rows.of_whole if self._rows is None else rows.say
            say = tf.autograph.experimental.do_not_convert(say)
            dataset = dataset.map(say, name="rows")
        if self.data_service is not None:
            return dataset.prefetch(tf.data.AUTOTUNE)
        return self.finish(dataset)

    @functools.cached_property
    def _rows(self):
        """Returns a function that selects rows of raw records; None keeps all."""
        if self.share is None or self.group_by_length:
            return None
        return Rows(self.share, self.batch_size)

    def _with_length(self, dataset):
        # flat_map does not know its length; progress bars want it.
        size = self.source.splits[self.split]
        if self.repeat:
            length = tf.data.INFINITE_CARDINALITY
        elif size is None or self.start_record:
            return dataset
        else:
            length = -(-size // self.batch_size)
        return dataset.apply(tf.data.experimental.assert_cardinality(length))

    @property
    def advice(self) -> Mapping[str, str]:
        """Returns advice on a slow stage; see `towers.callbacks.Starvation`."""
        return stage_advice(kept=self.source.origin is not self.source)

    def stages(self) -> list[tuple[str, tf.data.Dataset]]:
        """The names of the stages, in order, and the datasets that end behind each."""
        return self._behind(self._epochs(self._raw))

    def finish(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Adds what is not a stage: prefetching, and options for speed."""
        # The next batches are made while the devices compute.
        return dataset.prefetch(tf.data.AUTOTUNE).with_options(self.options())

    def options(self, threads: int | None = THREADS) -> tf.data.Options:
        """Those of all stages.

        Args:
            threads: of the pipeline's own; None shares TensorFlow's.
        """
        options = tf.data.Options()
        # Hosts count rows.
        options.deterministic = self.deterministic or self.share is not None
        # Threads of its own, so that towers on the CPU and input do not queue up
        # behind one another; an operation by itself is too small to divide.
        options.threading.max_intra_op_parallelism = 1
        if self.data_service is None:
            # Workers of a service would keep the threads of every epoch.
            waiting = EPOCHS_AT_ONCE if self.source.is_far else 0
            waiting += self._decoder.count if self._decoder else 0
            room.limit(options, threads, waiting)
        # Where each example has operations of its own, these make it faster; but to try
        # them, TensorFlow copies what the graph holds: rows that are in memory. Of an
        # epoch that comes into memory, its MapAndBatch loses the size of the batch.
        faster = options.experimental_optimization
        is_kept = self.source.origin is not self.source
        faster.apply_default_optimizations = self.source.encoded and not is_kept
        if self.ram_budget_mb is not None:
            options.autotune.ram_budget = self.ram_budget_mb * 2**20
        return options

    def _behind(self, raw):
        if self.numbered:
            # Several batches may come at once.
            numbers = raw.map(lambda _, numbers, *records: (numbers,))
            return [("read", numbers.rebatch(self._rows_given))]
        recipe = recipes.find(
            self.recipe, self.training, self.image_shape[:2], self.randaugment
        )
        stages = RecordStages(
            self.source,
            self._rows_given,
            self.image_shape,
            recipe,
            self.tricks,
            self.scaling,
            self.exact,
            self.compact,
            self._decoder,
        )
        return stages.behind(raw)

    def _raw(self, seeds, start):
        """Batches of (augmentation seed, numbers, raw records) of one epoch."""
        order = seeds[:2] if self.training or self.sampled else None
        take = self._rows
        late = take is not None and self.data_service is not None
        if self.group_by_length:
            grouped = lengths.grouped(
                self.source.size_of_all(self.split), self.batch_size
            )
            batches = self.source.batches_by_length(
                self.split, self.batch_size, grouped, seeds=order, start=start
            )
        else:
            batches = self.source.batches(
                self.split,
                self._rows_at_once,
                seeds=order,
                buffer_mb=room.shuffle_mb(self.shuffle_mb),
                start=start,
                take=None if late else take,
                epoch=seeds[3],
            )
        if late:
            batches = batches.map(take)
        return batches.map(lambda numbers, *records: (seeds[2], numbers, *records))

    @property
    def _rows_given(self):
        return self.batch_size if self._rows is None else self._rows.count

    @property
    def _rows_at_once(self) -> int:
        """Rows that are read at once: whole batches, of tokens several small ones.

        To start the operations of a batch takes longer than to copy its tokens.
        """
        if self.source.input_kind != "tokens":
            return self.batch_size
        tokens = self.batch_size * self.image_shape[0]
        return self.batch_size * max(_TOKENS_AT_ONCE // tokens, 1)

    def _whole(self, seeds, start):
        """One epoch's batches, and an error if there are fewer than there should be."""
        dataset = self._behind(self._raw(seeds, start))[-1][1]
        size = self.source.splits[self.split]
        if size is None:
            return dataset
        length = -(-(size - start) // self.batch_size)
        return dataset.apply(tf.data.experimental.assert_cardinality(length))

    def _on_workers(self, seeds, start):
        """One epoch's batches, made by the workers of a tf.data service."""
        from tensorflow.data.experimental import service

        dataset = self._raw(seeds, start)
        if self.deterministic:
            # With one element to hand out, one worker makes the whole epoch, in order.
            dataset = tf.data.Dataset.from_tensors(0).flat_map(lambda _: dataset)
        dataset = self.finish(self._behind(dataset)[-1][1])
        # Dynamic: a worker that is free gets the next files, or numbers.
        distribute = service.distribute(
            service.ShardingPolicy.DYNAMIC,
            self.data_service,
            # Answers to several requests may overtake one another.
            max_outstanding_requests=1 if self.deterministic else None,
        )
        with warnings.catch_warnings():
            # Of options that are in the graph, which is where they belong.
            warnings.simplefilter("ignore", UserWarning)
            dataset = dataset.apply(distribute)
        # Each worker's last batch may be short.
        return dataset.rebatch(self._rows_given)

    def _epochs(self, build: Callable) -> tf.data.Dataset:
        """A dataset that is the next epoch at each iteration.

        Python counts epochs, because tf.data's own ``reshuffle_each_iteration`` begins
        at epoch 0 in each run. Nothing uses `Dataset.from_generator`: it fixes malloc's
        threshold for the whole process, and a small model's step becomes 8% slower.

        Args:
            build: makes an epoch's dataset of its seeds (int64 [4]: two of the order,
                one of the augmentation, the epoch's number) and of the record to start
                at.
        """
        numbers = itertools.count(self.start_epoch)

        @until_exit
        def next_epoch():
            number = next(numbers) if self.training else 0
            start = self.start_record if number == self.start_epoch else 0
            seeds = [*draws.epoch_seeds(self.seed, number), number]
            return np.array(seeds, np.int64), np.int64(start)

        @tf.autograph.experimental.do_not_convert
        def count(_):
            seeds, start = tf.numpy_function(next_epoch, [], [tf.int64, tf.int64])
            return tf.ensure_shape(seeds, [4]), tf.ensure_shape(start, [])

        @tf.autograph.experimental.do_not_convert
        def epoch(seeds, start):
            # The seed of this function's graph alone: the program's global seed would
            # otherwise be mixed into the order (and 0 with a tensor seed fails).
            tf.random.set_seed(1)
            return build(seeds, start)

        dataset = tf.data.Dataset.from_tensors(0)
        dataset = (dataset.repeat() if self.repeat else dataset).map(count)
        if self.source.epochs_alone or not self.repeat:
            return dataset.flat_map(epoch)
        # In parallel, it begins the next epochs while one is still read.
        return dataset.interleave(
            epoch, cycle_length=1, num_parallel_calls=1, deterministic=True
        )

"""Trains a model on towers and saves it. Run it again to continue an interrupted run.

    python -m towers.train --model=resnet20 --dataset=tfds:cifar10 --num_gpus=2

--flagfile=FILE reads flags from a file, such as the flags.txt of an earlier run.
Exit codes: 0 done; 1 error; 3 a loss, gradient or variable was not finite; 4 stood
still, with --on_stall=stop; 130 stopped by Ctrl-C; 143 stopped by SIGTERM.
"""

# The command-line door. It reads from top to bottom: the run, then what the run is made
# of. All flags are in flags.py. Here alone towers, models and input_pipeline
# meet.

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.program import startup
    from towers.train import flags as train_flags

    startup.begin(
        "towers.train",
        lambda argv: train_flags.read_for_training(argv, __doc__),
        stopped="Stopped by Ctrl-C: nothing was saved yet.",
    )

import contextlib
import dataclasses
import fcntl
import functools
import gc
import glob
import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from typing import IO, Any

import keras
import tensorflow as tf
from absl import flags

from towers import devices, input_pipeline, models
from towers.collectives import batch
from towers.input_pipeline.images.recipes import takes_whole
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.records.quarantine import Quarantine
from towers.input_pipeline.sources.base import StreamSource
from towers.input_pipeline.specs import takes
from towers.lifecycle.checkpoint import Checkpoint, NotFinite, SaveError
from towers.lifecycle.checkpoints import store
from towers.lifecycle.checkpoints.saved_model import check_checkpoint
from towers.lifecycle.resume import ResumeError
from towers.lifecycle.signals import Stopped
from towers.lifecycle.stop_at_step import StopAtStep
from towers.model.tower_model import TowerModel, check_all_reduce, multi_gpu_model
from towers.monitoring.bottleneck.starvation import Starvation
from towers.monitoring.device_report import DeviceReport
from towers.monitoring.lines import Lines
from towers.monitoring.profile.callback import Profile
from towers.monitoring.stall import Stall
from towers.monitoring.tensorboard.callback import TensorBoard
from towers.monitoring.throughput import Throughput
from towers.monitoring.watch import Watch
from towers.program import startup, words
from towers.program.commands import fail, quieten, read_image_size, read_randaugment
from towers.tower.errors import ModelError
from towers.train import continued, model_size
from towers.train import flags as train_flags
from towers.train.versions import versions

FLAGS = flags.FLAGS
_PROGRAM = "towers.train"
_BAD_RECORDS = "bad_records.json"
_NOT_FINITE = "not_finite.npz"
# What is looked at most comes first.
_HYPER_PARAMETERS = (
    "model",
    "batch_size",
    "optimizer",
    "learning_rate",
    "dataset",
    "image_size",
    "recipe",
    "randaugment",
    "mixup_alpha",
    "cutmix_alpha",
    "split_ratios",
    "train_epochs",
    "max_train_steps",
    "lr_schedule",
    "momentum",
    "weight_decay",
    "dtype",
    "variable_update",
    "max_staleness",
    "steps_per_loop",
    "enable_xla",
    "seed",
)


def main() -> int:
    """Runs the job that the flags describe, which are read and checked.

    Returns:
        The exit code.
    """
    signal.signal(signal.SIGTERM, _terminate)
    quieten()
    # Where their number is unknown, batches are taken until there are no more.
    warnings.filterwarnings("ignore", "Your input ran out of data")
    job = None
    try:
        startup.end()
        job = set_up()
        with input_pipeline.blame_records(job.source, job.evaluated[0]):
            run(job)
    except Stopped as stopped:
        return stopped.code
    except KeyboardInterrupt:
        return _stop(job, "Ctrl-C", 130)
    except _Terminated:
        return _stop(job, "SIGTERM", 143)
    except NotFinite as error:
        fail(error, _PROGRAM)
        return 3
    except input_pipeline.BadRecordError as error:
        # What TFDS has prepared, it prepares again; and most are not to be left out.
        skips = FLAGS.bad_records == "skip" or "tfds" in FLAGS.dataset or error.many
        hint = "" if skips else "; to train without it, give --bad_records=skip"
        return fail(f"{str(error).removesuffix('.')}{hint}", _PROGRAM)
    except (ModelError, ResumeError, SaveError) as error:
        return fail(error, _PROGRAM)
    except (ValueError, OSError, tf.errors.OpError) as error:
        # While setting up, what goes wrong is the user's input, and said in one
        # sentence. Later, it is worth a traceback.
        if job is not None:
            raise
        return fail(error, _PROGRAM)
    finally:
        # All is saved and said. Python ends for some time yet, and a signal then would
        # make a failure of it, or a traceback.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # A half-read epoch ends here: TensorFlow warns if Python has gone before it.
        gc.collect()
    return 0


@dataclasses.dataclass
class Job:
    """A run that is ready to start.

    Attributes:
        source: Where training data comes from.
        held_out: Source and split to evaluate on, if there is one.
        image_shape: (height, width, channels) of the images, or (numbers in a row,).
        placed: The devices.
        model: The user's model, compiled, as the checkpoint left it.
        parallel: The same model on towers.
        checkpoint: The callback that saves it, which knows the epoch to begin at.
        model_dir: Where everything is written.
        quarantines: Bad records that are passed over, of each data set.
    """

    source: input_pipeline.Source
    held_out: tuple[input_pipeline.Source, str] | None
    image_shape: tuple[int, int, int]
    placed: devices.Devices
    model: keras.Model
    parallel: TowerModel
    checkpoint: Checkpoint
    model_dir: str
    quarantines: Sequence[Quarantine]

    @property
    def sizes(self) -> list[int]:
        """Examples of a full batch that each tower gets."""
        return batch.cut(FLAGS.batch_size, split_ratios(self.placed))

    @property
    def bad_records(self) -> int | None:
        """How many are passed over; `None` if they were not looked for."""
        return sum(map(len, self.quarantines)) if self.quarantines else None

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return self.checkpoint.position.epoch

    def steps_per_epoch(self) -> int | None:
        """Batches in an epoch of training, if epochs are to follow without a gap.

        `None` if their number is unknown, or calls of several steps would go on into
        the next epoch: then each epoch opens the data anew.
        """
        examples = self.source.splits["train"]
        steps = examples and math.ceil(examples / FLAGS.batch_size)
        return steps if steps and steps % FLAGS.steps_per_loop == 0 else None

    @property
    def evaluated(self) -> tuple[input_pipeline.Source, str]:
        """Source and split to evaluate on: held out, else the training data."""
        return self.held_out or (self.source, "train")

    @functools.cached_property
    def train_data(self) -> tf.data.Dataset:
        """Opens the training data, shuffled, from the beginning."""
        return self._open(self.source, "train", training=True)

    @functools.cached_property
    def eval_data(self) -> tf.data.Dataset:
        """Opens what to evaluate on, in order."""
        return self._open(*self.evaluated, training=False)

    def examples(self) -> tf.data.Dataset:
        """Opens training data for a look at it: augmented, not mixed, read at once."""
        return self._open(
            self.source,
            "train",
            training=True,
            batch_size=9,
            shuffle_mb=0,
            repeat=False,
            data_service=None,
        )

    def _open(self, source, split, training, **options):
        options = {
            "batch_size": FLAGS.batch_size,
            "image_shape": self.image_shape,
            "training": training,
            "recipe": FLAGS.recipe,
            "randaugment": read_randaugment(FLAGS.randaugment),
            "seed": FLAGS.seed,
            "deterministic": FLAGS.deterministic or not training,
            "shuffle_mb": FLAGS.shuffle_mb,
            "repeat": training and self.steps_per_epoch() is not None,
            "data_service": FLAGS.data_service,
            "ram_budget_mb": FLAGS.ram_budget_mb,
            **options,
        }
        return input_pipeline.make_dataset(source, split, **options)


def set_up() -> Job:
    """Builds what the run needs, and checks it; of model_dir it only reads.

    Returns:
        The run.

    Raises:
        ValueError: If any input is bad.
    """
    model_dir = train_flags.check_model_dir()
    folder = os.path.join(model_dir, "checkpoints")
    # Before the data, which TensorFlow may be asked to read.
    placed = configure_devices()
    split_ratios(placed)  # they are checked
    if FLAGS.all_reduce_alg != "auto":
        check_all_reduce(FLAGS.all_reduce_alg, FLAGS.variable_update, placed.towers)
    source = open_source(FLAGS.dataset, FLAGS.num_classes)
    held_out = None
    if FLAGS.eval_dataset is not None:
        held_out = open_source(FLAGS.eval_dataset, source.num_classes, like=source)
        check_same_kind(source, held_out)
    if not FLAGS.clean:
        continued.check_classes(folder, source)
    image_shape = choose_image_shape(source)
    if FLAGS.cutmix_alpha and len(image_shape) == 1:
        raise ValueError(
            f"Received --cutmix_alpha={FLAGS.cutmix_alpha}, but {source.name} has rows "
            "of numbers; expected images, so use --mixup_alpha."
        )
    model = build_model(source, image_shape, placed.home)
    if not FLAGS.eval_only:
        check_can_be_saved(model)
    if not FLAGS.clean:
        check_checkpoint(folder, model)

    known = os.path.join(model_dir, _BAD_RECORDS)
    source, held_out, quarantines = prepare_data(
        source, held_out, [] if FLAGS.clean else quarantine.read(known)
    )
    parallel = build_towers(
        model, placed, image_shape, source.splits["train"], model_dir=model_dir
    )
    checkpoint = continued.make_checkpoint(folder, validates=held_out is not None)
    if not FLAGS.clean:
        continued.restore(checkpoint, folder, model)
    if not FLAGS.eval_only and not is_finished(checkpoint, model):
        kept = cached(source, image_shape)
        if held_out is not None:
            other, split = held_out
            other = kept if other is source else cached(other, image_shape)
            held_out = other, split
        source = kept
    job = Job(
        source,
        held_out,
        image_shape,
        placed,
        model,
        parallel,
        checkpoint,
        model_dir,
        quarantines,
    )
    # Built now: whatever that finds wrong is the user's input, too.
    _ = job.train_data, job.eval_data
    return job


def run(job: Job) -> None:
    """Trains, evaluates, saves and sums up."""
    print(start_text(job), flush=True)
    if FLAGS.eval_only:
        print(values_text(evaluate(job)))
        return
    try:
        os.makedirs(job.model_dir, exist_ok=True)
        lock = open(os.path.join(job.model_dir, "lock"), "w")
    except OSError as error:
        raise cannot_write(job, error) from error
    with lock:
        try:
            take(lock)
        except BlockingIOError as error:
            raise SaveError(
                f"Another run writes to {job.model_dir}; expected one at a time, so "
                "wait for its end, or choose another --model_dir."
            ) from error
        run_alone(job)


def take(lock: IO) -> None:
    """Locks a file; a report that looks whether it is locked holds it for a moment.

    Raises:
        BlockingIOError: If another run has locked it.
    """
    for again in (True, True, False):
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not again:
                raise
            time.sleep(0.1)


def run_alone(job: Job) -> None:
    """The same, while no other run writes to the model_dir."""
    if FLAGS.clean:
        remove_run(job.model_dir)
    try:
        # Of an earlier run; this one has found nothing yet.
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(job.model_dir, _NOT_FINITE))
        write_text(job, "flags.txt", train_flags.as_text(job.model_dir))
        if job.bad_records is not None:
            path = os.path.join(job.model_dir, _BAD_RECORDS)
            quarantine.write(job.quarantines, path)
    except OSError as error:
        raise cannot_write(job, error) from error
    renew_learning_rate(job)
    watch = train(job)
    summary = summarise(job, watch)
    (loss,) = (value for name, value in summary.items() if name.endswith("_loss"))
    if not math.isfinite(loss):
        raise NotFinite(
            f"The loss is {loss} after epoch {job.epoch}, so model.keras is not "
            "written; start over with --clean and a smaller --learning_rate."
        )
    try:
        save_model(job, summary["model"])
        if (best := summary["best"]) is not None:
            with job.checkpoint.as_in(best["checkpoint"], job.model):
                save_model(job, best["model"])
        write_text(job, "summary.json", json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise cannot_write(job, error) from error
    print(summary_text(summary))


def save_model(job: Job, path: str) -> None:
    """Saves the model; the file gets its name only once it is whole."""
    unfinished = os.path.join(job.model_dir, "unfinished.keras")
    job.model.save(unfinished)
    os.replace(unfinished, path)


def renew_learning_rate(job: Job) -> None:
    """Gives a run that goes on the learning rate that is asked for now."""
    before = float(job.model.optimizer.learning_rate)
    # A schedule is no variable, so it is not restored.
    if FLAGS.lr_schedule == "constant" and not math.isclose(
        before, FLAGS.learning_rate, rel_tol=1e-6
    ):
        job.model.optimizer.learning_rate = FLAGS.learning_rate
        print(f"Learning rate: {FLAGS.learning_rate:g}, after {before:g}.")


def train(job: Job) -> Watch | None:
    """Fits the model, from where its checkpoint ends.

    Returns:
        What has measured it; `None` if nothing is left to train.
    """
    if is_finished(job.checkpoint, job.model):
        print(
            f"Nothing left to train: {job.model_dir} has "
            f"{words.count(job.epoch, 'epoch')} already. "
            "Give more --train_epochs, or --clean to start over."
        )
        return None
    watch = make_watch(job)
    measures = watch.measures
    if FLAGS.variable_update == "asynchronous":
        measures.append(job.parallel.builder.staleness.measured)
    # The order matters: what one callback adds to the logs, the later ones see.
    callbacks = [
        *watch.callbacks,
        make_tensorboard(job, measures, watch),
        job.checkpoint,
    ]
    if (steps := train_flags.read_profile_steps()) is not None:
        callbacks.insert(0, Profile(os.path.join(job.model_dir, "train"), *steps))
    if FLAGS.stall_seconds:
        # First, to hear of a batch before it is waited for any other.
        callbacks.insert(0, make_stall(job))
    if FLAGS.max_train_steps is not None:
        callbacks.append(StopAtStep(FLAGS.max_train_steps))
    terminal = sys.stdout.isatty()
    if not terminal:
        callbacks.append(Lines(FLAGS.log_steps, rate=watch.throughput.text))
    job.parallel.fit(
        job.train_data,
        validation_data=job.eval_data if job.held_out else None,
        epochs=FLAGS.train_epochs,
        steps_per_epoch=job.steps_per_epoch(),
        callbacks=callbacks,
        verbose=1 if terminal else 0,
        shuffle=False,  # the pipeline has shuffled already
    )
    return watch


def make_watch(job: Job) -> Watch:
    """Makes the callbacks that measure the run."""
    fractions = [size / FLAGS.batch_size for size in job.sizes]
    examples = job.source.splits["train"]
    return Watch(
        Throughput(FLAGS.batch_size, examples, fractions=fractions),
        Starvation(FLAGS.log_steps, advice=input_pipeline.ADVICE),
        DeviceReport(job.placed),
        fractions,
    )


def make_tensorboard(
    job: Job, measures: Sequence[Callable[[], dict[str, float]]], watch: Watch
) -> TensorBoard:
    """Makes the callback that writes what the run does, and is.

    Args:
        job: The run.
        measures: What has been measured; see `TensorBoard`.
        watch: Says at the end what was measured.
    """
    found = "\n".join(f"{name}: {value}" for name, value in versions().items())
    texts = {
        "flags": train_flags.as_text(job.model_dir),
        "model": model_size.summary_text(job.model),
        "devices": devices.table(job.placed, job.sizes),
        "versions": found,
    }
    return TensorBoard(
        job.model_dir,
        every_steps=FLAGS.log_steps,
        texts={
            **{tag: as_markdown(text) for tag, text in texts.items()},
            "verdict": lambda: (
                f"{watch.starvation.verdict}\n\n{as_markdown(watch.text())}"
            ),
        },
        scalars={
            "bad_records": job.bad_records,
            "parameters": job.model.count_params(),
        },
        measures=measures,
        hparams=hyper_parameters(job),
        histograms=FLAGS.histograms,
        graph=lambda: job.parallel.builder.graph,
        examples=job.examples() if len(job.image_shape) == 3 else None,
        sample=job.eval_data,
        class_names=job.source.class_names,
    )


def hyper_parameters(job: Job) -> dict[str, bool | int | float | str]:
    """Returns the flags that runs are compared by."""
    values = {name: FLAGS[name].value for name in _HYPER_PARAMETERS}
    given = {name: value for name, value in values.items() if value is not None}
    return {
        "towers": len(job.placed.towers),
        **{n: ",".join(v) if isinstance(v, list) else v for n, v in given.items()},
    }


def make_stall(job: Job) -> Stall:
    """Makes the callback that says what is waited for."""
    return Stall(
        FLAGS.stall_seconds,
        FLAGS.on_stall,
        devices=(*job.placed.towers, job.placed.home),
        data=job.train_data,
        validation_data=job.eval_data,
        checkpoint=job.checkpoint,
    )


def is_finished(checkpoint: Checkpoint, model: keras.Model) -> bool:
    """Tells whether the checkpoint is already where training is to end."""
    steps = int(model.optimizer.iterations)
    return checkpoint.position.epoch >= FLAGS.train_epochs or (
        FLAGS.max_train_steps is not None and steps >= FLAGS.max_train_steps
    )


def evaluate(job: Job) -> dict[str, float]:
    """Evaluates the model on validation data, or on the training data if none is given.

    Returns:
        `val_loss` and `val_accuracy`, as Keras calls them; of the training data
        `train_loss` and `train_accuracy`.
    """
    prefix = "val" if job.held_out else "train"
    logs = job.parallel.evaluate(job.eval_data, verbose=0, return_dict=True)
    return {f"{prefix}_{name}": float(value) for name, value in logs.items()}


# What a run is made of.


def open_source(
    spec: str, num_classes: int | None, like: input_pipeline.Source | None = None
) -> input_pipeline.Source:
    """Opens a data set as the flags say.

    Args:
        spec: The data set.
        num_classes: How many classes it has, if that is known.
        like: The training data, if this is what to evaluate on: classes and columns
            of a table are to be the same.
    """
    options = {name: FLAGS[flag].value for name, flag in train_flags.DATA_FLAGS.items()}
    options["num_classes"] = num_classes
    if like is not None:
        options["class_names"] = like.class_names
        if takes(FLAGS.dataset, "label_column"):
            options |= {"label_key": None, "label_column": like.label_field}
        if takes(FLAGS.dataset, "feature_columns") and len(like.image_shape) == 1:
            options["feature_columns"] = like.image_fields
    if spec != FLAGS.dataset:
        # All of it is for evaluation.
        options |= {"train_split": None, "eval_fraction": 0}
    elif FLAGS.eval_dataset is not None:
        options |= {"test_split": None, "eval_fraction": 0}
    return input_pipeline.open_source(
        spec,
        **{
            name: value
            for name, value in options.items()
            if value is not None and takes(spec, name)
        },
        data_dir=os.path.expanduser(FLAGS.data_dir),
        seed=FLAGS.seed,
        skip_bad=FLAGS.bad_records == "skip",
    )


def check_same_kind(
    source: input_pipeline.Source, held_out: input_pipeline.Source
) -> None:
    """Checks that images have the same size, and labels the same meaning, in both."""
    if held_out.image_shape != source.image_shape and not FLAGS.image_size:
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


def prepare_data(
    source: input_pipeline.Source,
    held_out: input_pipeline.Source | None,
    known: Sequence[Quarantine],
) -> tuple[
    input_pipeline.Source,
    tuple[input_pipeline.Source, str] | None,
    list[Quarantine],
]:
    """Downloads or writes what is missing, and has a look at the records.

    Args:
        source: What to train on.
        held_out: What to evaluate on, if it is another.
        known: Bad records that were found earlier.

    Returns:
        What to train on; source and split to evaluate on: those of `held_out`, else the
        test split of `source`, else `None`; the bad records that both pass over.
    """
    source.prepare()
    if held_out is not None:
        held_out.prepare()
        split = "test" if "test" in held_out.splits else "train"
        source, found = look_at_records(source, ["train"], known)
        held_out, more = look_at_records(held_out, [split], known)
        return source, (held_out, split), found + more
    source, found = look_at_records(source, list(source.splits), known)
    return source, (source, "test") if "test" in source.splits else None, found


def look_at_records(
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
    if FLAGS.bad_records == "fail":
        # Two splits may have parts of the same files.
        for split in {tuple(source.files(split)): split for split in splits}.values():
            input_pipeline.scan_labels(source, split)
        return source, []
    found = quarantine.inspect(source, splits, FLAGS.max_bad_records, known)
    return source.without(found.bad, found.splits), [found]


def cached(
    source: input_pipeline.Source, image_shape: tuple[int, ...]
) -> input_pipeline.Source:
    """Keeps a source's examples at hand, as --cache says.

    Raises:
        ValueError: If a record is bad.
    """
    # Workers of a service read the files themselves.
    cache = "none" if FLAGS.data_service else FLAGS.cache
    # To keep pixels, all images are decoded first: that pays from the second epoch on.
    pays = FLAGS.train_epochs > 1 or cache == "disk"
    with input_pipeline.blame_records(source):
        return input_pipeline.cached(
            source,
            cache,
            FLAGS.cache_dir,
            FLAGS.deterministic,
            image_shape if pays and takes_whole(FLAGS.recipe) else None,
        )


def configure_devices() -> devices.Devices:
    """Sets up the devices, the random seeds and the type to compute in."""
    num_gpus, indices = FLAGS.num_gpus, None
    if FLAGS.gpu_indices:
        indices = [int(index) for index in FLAGS.gpu_indices]
    elif num_gpus is None and not tf.config.list_physical_devices("GPU"):
        # Two, so that towers can be seen at work on any machine.
        num_gpus = len(FLAGS.split_ratios or (1, 1))
    placed = devices.configure(
        num_gpus,
        gpu_indices=indices,
        allow_growth=FLAGS.allow_growth,
        gpu_memory_limit_mb=FLAGS.gpu_memory_limit_mb,
        gpu_split=FLAGS.gpu_split,
        local_parameter_device=FLAGS.local_parameter_device,
        soft_placement=FLAGS.soft_placement,
        log_device_placement=FLAGS.log_device_placement,
    )
    keras.utils.set_random_seed(FLAGS.seed)
    if FLAGS.deterministic:
        tf.config.experimental.enable_op_determinism()
    policies = {"fp32": "float32", "fp16": "mixed_float16", "bf16": "mixed_bfloat16"}
    keras.config.set_dtype_policy(policies[FLAGS.dtype])
    return placed


def split_ratios(placed: devices.Devices) -> tuple[int, ...]:
    """Reads how much of a batch each tower gets, relative to the others."""
    towers = len(placed.towers)
    if not FLAGS.split_ratios:
        return (1,) * towers
    if len(FLAGS.split_ratios) != towers:
        raise ValueError(
            f"Received --split_ratios={','.join(FLAGS.split_ratios)} for "
            f"{words.count(towers, 'tower')}; expected one share for each, so give "
            f"{towers} of them, or --num_gpus={len(FLAGS.split_ratios)}."
        )
    return tuple(int(share) for share in FLAGS.split_ratios)


def make_preprocess(outputs: int | None) -> Callable[[Any, Any, bool], tuple[Any, Any]]:
    """Makes what towers do to their shares: bytes to floats in [-1, 1], and mixing.

    Args:
        outputs: How many values the model returns for an image; needed to mix.
    """
    mix = None
    if train_flags.mixes():
        mix = input_pipeline.Mix(
            outputs, FLAGS.mixup_alpha, FLAGS.cutmix_alpha, FLAGS.seed
        )
    dtype = keras.config.dtype_policy().compute_dtype

    def preprocess(x, y, training):
        images = x.dtype == tf.uint8
        if mix is not None and y is not None:
            x, y = mix(x, y) if training else (x, tf.one_hot(y, outputs))
        return (input_pipeline.normalize(x, dtype) if images else x), y

    return preprocess


def choose_image_shape(source: input_pipeline.Source) -> tuple[int, ...]:
    """Decides the images' size: what --image_size says, else as they are."""
    if len(source.image_shape) == 1:
        for name in ("image_size", "recipe", "randaugment"):
            if FLAGS[name].value != FLAGS[name].default:
                raise ValueError(
                    f"Received {FLAGS[name].serialize()}, but {source.name} has rows "
                    "of numbers; expected images, so leave it out."
                )
        return source.image_shape
    height, width, channels = source.image_shape
    if (asked := read_image_size(FLAGS.image_size)) is not None:
        height, width = asked
    if height is None or width is None:
        raise ValueError(
            f"The images of {source.name} differ in size; expected one size for all, "
            "so give --image_size, such as --image_size=224."
        )
    return height, width, channels


def build_model(
    source: input_pipeline.Source, image_shape: tuple[int, int, int], home: str
) -> keras.Model:
    """Builds the model at home, and checks that it fits the data."""
    with tf.device(home):
        model = models.build(
            FLAGS.model,
            input_shape=image_shape,
            num_classes=source.num_classes,
            seed=FLAGS.seed,
        )
        try:
            output = _returned(model, image_shape)
        except ValueError as error:
            takes = getattr(model, "input_shape", None)
            what, other = "images", "another --image_size or "
            if len(image_shape) == 1:
                what, other = "rows", ""
            raise ValueError(
                f"The model {FLAGS.model} takes {takes or 'other inputs'}, but the "
                f"{what} of {source.name} are {image_shape}; give {other}another model."
            ) from error
        except Exception as error:  # whatever the user's code raises
            raise ValueError(
                f"The model {FLAGS.model} raised {type(error).__name__} when it was "
                f"called, which says: {error}; correct the model."
            ) from error
    shape = getattr(output, "shape", None)
    if shape is None or len(shape) != 2 or (shape[-1] or 0) < source.num_classes:
        returned = shape or f"{len(keras.tree.flatten(output))} tensors in a structure"
        raise ValueError(
            f"The model {FLAGS.model} returns {returned}, but {source.name} has labels "
            f"from 0 to {source.num_classes - 1}; expected one output of shape (None, "
            f"{source.num_classes}), a value for each class."
        )
    return model


def check_can_be_saved(model: keras.Model) -> None:
    """Checks that Keras can describe the model, before anything is trained.

    Raises:
        ValueError: It cannot, so that no model.keras could be written.
    """
    try:
        keras.saving.serialize_keras_object(model)
    except NotImplementedError as error:
        found = re.search(r"Object (\w+) was created", str(error))
        raise ValueError(
            f"The model {FLAGS.model} cannot be saved: Keras cannot tell with which "
            f"arguments {found[1] if found else 'a part of it'} was made; expected a "
            "method get_config() there that returns them."
        ) from error


def _returned(model, image_shape):
    """What a model returns, symbolically: a class of the user's has no output_shape."""
    return model(keras.KerasTensor((None, *image_shape)))


def build_towers(
    model: keras.Model,
    placed: devices.Devices,
    image_shape: tuple[int, ...],
    examples: int | None,
    model_dir: str | None = None,
) -> TowerModel:
    """Puts the model on towers and compiles it, as the flags say.

    Args:
        model: The model.
        placed: The devices.
        image_shape: Shape of an image, or of a row.
        examples: Examples in an epoch, if known.
        model_dir: Where to remember which way of updating was chosen, and to keep a
            batch whose loss is not finite; `None` for nowhere.
    """
    parallel = multi_gpu_model(
        model,
        gpus=placed.towers,
        # What was not asked for may be chosen.
        home=placed.home if placed.local_parameter_device else None,
        builder=FLAGS.variable_update,
        split_ratios=split_ratios(placed),
        loss_placement=FLAGS.loss_placement,
        strict=FLAGS.strict,
        all_reduce_alg=FLAGS.all_reduce_alg,
        choice_file=model_dir and os.path.join(model_dir, "variable_update.json"),
        max_staleness=FLAGS.max_staleness,
        preprocess=make_preprocess(
            _returned(model, image_shape).shape[-1] if train_flags.mixes() else None
        ),
        prefetch=FLAGS.prefetch,
        check_numerics=FLAGS.check_numerics != "off"
        and model_dir is not None
        and os.path.join(model_dir, _NOT_FINITE),
    )
    # Towers that do not wait for one another make a step of the optimizer each.
    asynchronous = FLAGS.variable_update == "asynchronous"
    steps_per_batch = len(placed.towers) if asynchronous else 1
    with tf.device(placed.home):
        compile_model(parallel, image_shape, examples, steps_per_batch)
    return parallel


def compile_model(
    model: keras.Model | TowerModel,
    image_shape: tuple[int, ...],
    examples: int | None,
    steps_per_batch: int = 1,
) -> None:
    """Compiles the model as the flags say, and builds its optimizer.

    Args:
        model: The model.
        image_shape: Shape of an image, or of a row.
        examples: Examples in an epoch, if known.
        steps_per_batch: Steps of the optimizer for a global batch.
    """
    loss = keras.losses.SparseCategoricalCrossentropy
    if train_flags.mixes():
        loss = keras.losses.CategoricalCrossentropy
    model.compile(
        build_optimizer(examples, steps_per_batch),
        loss(from_logits=returns_logits(model, image_shape)),
        # By the labels as they were before they were mixed.
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        steps_per_execution=FLAGS.steps_per_loop,
        jit_compile={"auto": "auto", "true": True, "false": False}[FLAGS.enable_xla],
    )
    model.optimizer.build(model.trainable_variables)


def returns_logits(model: keras.Model, image_shape: tuple[int, ...]) -> bool:
    """Tries whether a model returns logits, as the registry's do, or probabilities."""
    noise = tf.random.stateless_uniform((2, *image_shape), seed=(0, 0))
    outputs = tf.cast(model(2 * noise - 1), tf.float32)
    adds_up = tf.abs(tf.reduce_sum(outputs, axis=-1) - 1) < 1e-2
    return not bool(tf.reduce_all(adds_up) & tf.reduce_all(outputs >= 0))


def build_optimizer(
    examples: int | None, steps_per_batch: int
) -> keras.optimizers.Optimizer:
    """Builds the optimizer that the flags describe.

    Args:
        examples: Examples in an epoch, if known.
        steps_per_batch: Steps of the optimizer for a global batch.
    """
    make = getattr(keras.optimizers, train_flags.optimizer())
    options = {"learning_rate": learning_rate(examples, steps_per_batch)}
    if "momentum" in inspect.signature(make).parameters:
        options["momentum"] = FLAGS.momentum
    if FLAGS.weight_decay:
        options["weight_decay"] = FLAGS.weight_decay
    return make(**options)


def learning_rate(
    examples: int | None, steps_per_batch: int
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """Builds the learning rate's schedule, over all the steps of the run.

    Args:
        examples: Examples in an epoch, if known.
        steps_per_batch: Steps of the optimizer for a global batch.
    """
    high = FLAGS.learning_rate
    if FLAGS.lr_schedule == "constant":
        return high
    steps = FLAGS.max_train_steps
    if steps is None:
        if examples is None:
            raise ValueError(
                f"Received --lr_schedule={FLAGS.lr_schedule} for data of unknown size; "
                "expected a length to fit it to, so give --max_train_steps."
            )
        batches = FLAGS.train_epochs * math.ceil(examples / FLAGS.batch_size)
        steps = batches * steps_per_batch
    schedules = keras.optimizers.schedules
    if FLAGS.lr_schedule == "cosine":
        return schedules.CosineDecay(high, steps)
    if FLAGS.lr_schedule == "linear":
        return schedules.PolynomialDecay(high, steps, end_learning_rate=0.0)
    # As the CIFAR experiments of He et al. 2015, section 4.2.
    return schedules.PiecewiseConstantDecay(
        [steps // 2, steps * 3 // 4], [high, high / 10, high / 100]
    )


def remove_run(model_dir: str) -> None:
    """Removes what a run writes from model_dir, and nothing else."""
    store.remove_all(os.path.join(model_dir, "checkpoints"))
    for pattern in (
        "train/events.out.tfevents.*",
        "train/plugins/profile",
        "validation/events.out.tfevents.*",
        "model.keras",
        "best.keras",
        "unfinished.keras",
        "summary.json",
        "flags.txt",
        "report.html",
        "variable_update.json",
        _BAD_RECORDS,
        _NOT_FINITE,
    ):
        for path in glob.glob(os.path.join(glob.escape(model_dir), pattern)):
            # A trace is one, and so is a save that was killed.
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    for name in ("checkpoints", "train/plugins", "train", "validation"):
        path = os.path.join(model_dir, name)
        if os.path.isdir(path) and not os.listdir(path):
            os.rmdir(path)


# What is said and written.


def start_text(job: Job) -> str:
    """Says what will run where."""
    examples = job.source.splits["train"]
    what = "training image", f" of {'x'.join(map(str, job.image_shape))}"
    if len(job.image_shape) == 1:
        what = "row", f" of {words.count(job.image_shape[0], 'number')} to train on"
    data = counted(examples, what[0]) + what[1]
    note = job.source.note and f", {job.source.note}"
    lines = [
        devices.table(job.placed, job.sizes),
        f"Model {FLAGS.model}: {model_size.size_text(job.model)}.",
        f"Data {job.source.name}: {data}, "
        f"{words.count(job.source.num_classes, 'class', 'classes')}{note}.",
        *data_notes(job),
    ]
    if job.bad_records:
        lines.append(bad_records_text(job.bad_records, job.model_dir))
    if examples is not None and examples < FLAGS.batch_size:
        lines.append("Note: the batch is larger than the data, so an epoch is a step.")
    lines += continued.text(job.checkpoint, job.model)
    if job.checkpoint.latest and not FLAGS.eval_only:
        before = read_text(job, "flags.txt")
        now = train_flags.as_text(job.model_dir)
        trains = not is_finished(job.checkpoint, job.model)
        lines.append(before and continued.changed_flags(before, now, trains))
    return "\n".join(filter(None, lines))


def counted(number: int | None, noun: str) -> str:
    """Says how many there are, or that this is unknown."""
    if number is None:
        return f"an unknown number of {noun}s"
    return words.count(number, noun)


def data_notes(job: Job) -> list[str]:
    """Says what was decided about the data, and which flags change nothing."""
    notes = [*job.source.notes]
    if job.source.num_classes == 1:
        notes.append("Note: All labels are of one class, so any model is always right.")
    if job.held_out is None:
        notes.append(
            "There is no validation data, so the training data is evaluated, and the "
            f"best epoch has the {continued.best_text()}; --eval_dataset names "
            "validation data."
        )
    else:
        source, split = job.held_out
        if FLAGS.eval_dataset is not None:
            notes += [f"{source.name}: {note}" for note in source.notes]
            names = job.source.class_names, source.class_names
            if names.count(None) == 1:
                first = (names[0] or names[1])[0]
                notes.append(
                    "Note: Only one of training and validation data has names of "
                    f"classes, so {first!r} in one is taken for label 0 in the other."
                )
        examples = counted(source.splits[split], "example")
        notes.append(f"Validation {source.name}: {examples}.")
    if FLAGS["data_dir"].present and not train_flags.uses_data_dir():
        notes.append(
            f"Note: --data_dir={FLAGS.data_dir} changes nothing, as only digits and "
            "tfds: keep files there."
        )
    idle = []
    if not isinstance(job.source, StreamSource):
        idle.append(("shuffle_mb", "the records are shuffled completely"))
    if FLAGS.bad_records != "skip":
        idle.append(("max_bad_records", "no bad record is skipped"))
    notes += [
        f"Note: --{name}={FLAGS[name].value} changes nothing, as {why}."
        for name, why in idle
        if FLAGS[name].value != FLAGS[name].default
    ]
    folder = FLAGS.cache_dir and os.path.expanduser(FLAGS.cache_dir)
    if folder and not job.source.note.endswith(f"kept in {folder}"):
        notes.append(f"Note: --cache_dir={FLAGS.cache_dir} changes nothing here.")
    return notes


def bad_records_text(count: int, model_dir: str) -> str:
    """Says how many are passed over, and which."""
    path = os.path.join(model_dir, _BAD_RECORDS)
    return f"Bad records: {count:,} passed over, listed in {path}."


def as_markdown(lines: str) -> str:
    """Indents lines, which Markdown shows as they are."""
    return "".join(f"    {line}\n" for line in lines.splitlines())


def summarise(job: Job, watch: Watch | None) -> dict:
    """Collects what summary.json holds."""
    return {
        **evaluate(job),
        **(measured(watch) if watch else measured_before(job.model_dir)),
        "bad_records": job.bad_records,
        "parameters": job.model.count_params(),
        "epochs": job.epoch,
        "steps": int(job.model.optimizer.iterations),
        "towers": list(job.placed.towers),
        "batch_size": FLAGS.batch_size,
        "model": os.path.join(job.model_dir, "model.keras"),
        "checkpoint": job.checkpoint.latest,
        "best": best_model(job),
        "logs": job.model_dir,
    }


def best_model(job: Job) -> dict | None:
    """Returns metric, value and paths of the best model; `None` without one."""
    if (best := job.checkpoint.find_best(job.model)) is None:
        return None
    return {
        "monitor": best.monitor,
        "value": best.value,
        "epoch": best.epoch,
        "model": os.path.join(job.model_dir, "best.keras"),
        "checkpoint": best.path,
    }


def measured(watch: Watch) -> dict:
    """Returns what this run has measured."""
    return {
        "images_per_sec": watch.throughput.images_per_sec,
        "step_ms": watch.starvation.split and watch.starvation.split.parts_ms,
        "waiting": watch.starvation.waiting,
        "verdict": watch.starvation.verdict,
        "measured": watch.text(),
    }


def measured_before(model_dir: str) -> dict:
    """Returns what the last run that has trained here had measured, if it is known."""
    try:
        with open(os.path.join(model_dir, "summary.json")) as file:
            summary = json.load(file)
    except (OSError, ValueError):
        summary = None
    known = summary if isinstance(summary, dict) else {}
    names = "images_per_sec", "step_ms", "waiting", "verdict", "measured"
    return {name: known.get(name) for name in names}


def summary_text(summary: dict) -> str:
    """Says how the run ended, and where things lie."""
    measured = textwrap.indent(summary["measured"] or "images/sec: not measured", "  ")
    bad, best = summary["bad_records"], summary["best"]
    named = best and "{model}, {monitor} {value:.4f} after epoch {epoch}".format(**best)
    return "\n".join(
        [
            f"Done: {words.count(summary['epochs'], 'epoch')}, "
            f"{words.count(summary['steps'], 'step')} on "
            f"{words.count(len(summary['towers']), 'tower')}.",
            f"  {values_text(summary)}",
            measured,
            f"  model        {summary['model']}",
            *([f"  best model   {named}"] if named else []),
            f"  checkpoint   {summary['checkpoint']}",
            f"  TensorBoard  tensorboard --logdir {shlex.quote(summary['logs'])}",
            *([f"  bad records  {bad:,} passed over"] if bad is not None else []),
        ]
    )


def values_text(values: dict) -> str:
    """Says what an evaluation gave."""
    return ", ".join(
        f"{part} {name.removeprefix(prefix).replace('_', ' ')} {value:.4f}"
        for prefix, part in (("val_", "validation"), ("train_", "train"))
        for name, value in values.items()
        if name.startswith(prefix)
    )


def cannot_write(job: Job, error: OSError) -> SaveError:
    """Says that a file in model_dir could not be written."""
    saved = "nothing was saved yet"
    if job.checkpoint.latest:
        saved = f"the last checkpoint is {job.checkpoint.latest}"
    return SaveError(
        f"Cannot write to the model_dir {job.model_dir}: {error}; {saved}, so make "
        "room and run again."
    )


def read_text(job: Job, name: str) -> str | None:
    """Reads a file in model_dir; `None` if there is none."""
    try:
        with open(os.path.join(job.model_dir, name)) as file:
            return file.read()
    except (OSError, ValueError):
        return None


def write_text(job: Job, name: str, text: str) -> None:
    """Writes a file in model_dir."""
    with open(os.path.join(job.model_dir, name), "w") as file:
        file.write(text)


# How it can end.


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _terminate(signum, frame):
    raise _Terminated


def _stop(job: Job | None, cause: str, code: int) -> int:
    """Says that a signal has ended the run, and returns the exit code."""
    _say_stopped(job, cause)
    if job is None:
        # A data set may be on its way, which Python would wait for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _say_stopped(job: Job | None, cause: str) -> None:
    saved = job and job.checkpoint.latest
    if saved:
        again = f"the last checkpoint is {saved}; run again to continue from it"
    else:
        again = "nothing was saved yet"
    if sys.stdout.isatty():
        print()  # ends the progress bar's line
    print(f"towers.train: Stopped by {cause}: {again}.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

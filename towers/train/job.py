"""A run that is ready to start, put together from settings."""

import dataclasses
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Self

import keras

from towers.collectives import batch, reduce
from towers.collectives.joined_hosts import this_host
from towers.devices import listing
from towers.devices.configuration import Devices
from towers.devices.names import HOST
from towers.elastic.generations import Generations, WishSource
from towers.hosts import group
from towers.input_pipeline.records import quarantine
from towers.layers.variables import steps_done
from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.checkpoints import store
from towers.loop import alike
from towers.model.tower_model import TowerModel
from towers.program import forks, words
from towers.program.features import feature
from towers.program.progress import Progress
from towers.train import checks, continued
from towers.train.parts import data as data_parts
from towers.train.parts import model as model_parts
from towers.train.parts import my_model, training
from towers.train.parts import setup as setup_parts
from towers.train.parts.data import Data
from towers.train.parts.devices import (
    configure_devices,
    share_devices,
    split_ratios,
    with_whole_batch,
)
from towers.train.parts.own_data import OwnData
from towers.train.parts.setup import Setup
from towers.train.parts.training import scale_rate
from towers.train.settings import Settings

BAD_RECORDS = "bad_records.json"
# Of long epochs, the steps between lines of output.
_LOG_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that is ready to start.

    Attributes:
        settings: What is asked for.
        data: What it trains and evaluates on.
        devices: Where it trains.
        setup: What it is about: the task, and what the data have.
        model: The user's model, compiled, as the checkpoint left it.
        parallel: The same model on towers.
        checkpoint: The callback that saves it, which knows the epoch to begin at.
        from_logits: Whether the model returns logits, as it was tried before training.
        class_weight: How much each class counts, as `fit` takes it.
        notes: What was done to the model before it trains, and how classes count.
        hosts: With several hosts, by name what each has told of its towers.
        generations: The towers that the run has had.
        shares: What the run has of devices that runs share, if it shares them.
    """

    settings: Settings
    data: Data | OwnData
    setup: Setup
    devices: Devices
    model: keras.Model
    parallel: TowerModel
    checkpoint: Checkpoint
    from_logits: bool
    class_weight: Mapping[int, float] | None = None
    notes: Sequence[str] = ()
    hosts: Mapping[str, Sequence[Mapping[str, str]]] | None = None
    generations: Generations = dataclasses.field(default_factory=Generations)
    shares: WishSource | None = None

    @property
    def model_dir(self) -> str:
        """Where everything is written."""
        return self.settings.absolute_model_dir

    @property
    def batch_size(self) -> int:
        """Examples in a batch of all towers."""
        return self.data.settings.batch_size

    @property
    def sizes(self) -> list[int]:
        """Examples of a full batch that each tower of this host gets."""
        plan, count = self.parallel.builder.plan, self.settings.micro_batch_count
        sizes = plan.sizes(self.batch_size)
        return [sum(sizes[k : k + count]) for k in range(0, len(sizes), count)]

    @property
    def fractions(self) -> list[float]:
        """The part of a full batch that each tower of this host gets."""
        return [each / self.batch_size for each in self.sizes]

    @property
    def towers(self) -> list[str]:
        """The devices of the towers of all hosts, in words."""
        if self.generations.every:
            return [*self.generations.every[-1].towers]
        if not self.hosts:
            replicas = self.parallel.builder.plan.replicas
            return [" and ".join(tower.devices) for tower in replicas]
        return [
            f"host {k} {row['device']}"
            for k, rows in enumerate(self.hosts.values())
            for row in rows
        ]

    @property
    def log_steps(self) -> int:
        """Steps between lines of output: by default, at least a line an epoch."""
        if self.settings.log_steps is not None:
            return self.settings.log_steps
        if not self.data.examples:
            return _LOG_STEPS
        return min(_LOG_STEPS, math.ceil(self.data.examples / self.batch_size))

    def table(self, width: int | None = None) -> str:
        """Describes the devices of all hosts; see `listing.table`."""
        stages = self.settings.stages
        return listing.table(self.devices, self.sizes, self.hosts, stages, width)

    def check_towers(self, devices: int, ratios: Sequence[int] | None = None) -> None:
        """Checks that a batch has rows for each of other towers, and micro-batch.

        Args:
            devices: Number of their devices.
            ratios: The parts of a batch that they get; equal ones by default.

        Raises:
            ValueError: It has not.
        """
        equal = (1,) * max(devices // self.settings.stages, 1)
        ratios, settings = ratios or equal, self.data.settings
        if self.settings.batch_per_tower:
            # The rest of the epoch has its batch, in which a tower may have no part.
            size = self.settings.batch_size * len(ratios)
            settings = settings.but(batch_size=size)
        _check_sizes(settings, ratios)

    def with_batches_of(self, size: int) -> Self:
        """Returns the run with other batches, of so many examples, on its towers."""
        job = dataclasses.replace(
            self,
            data=self.data.in_batches_of(size),
            devices=self.devices.with_towers(self.parallel.builder.plan.all_devices),
        )
        _ = job.data.training, job.data.evaluation
        return job

    def task_logs(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Returns what the task logs beside what Keras does; see `Task.logs`."""
        task = self.setup.task
        return task.logs(logs, self.data.bytes_per_token) if task else {}

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return self.checkpoint.position.epoch

    @property
    def step(self) -> int:
        """Steps of the optimizer that are done."""
        return steps_done(self.model)

    @property
    def is_finished(self) -> bool:
        """Tells whether the checkpoint is already where training is to end."""
        most = self.settings.max_train_steps
        return (
            self.epoch >= self.settings.train_epochs
            or (most is not None and self.step >= most)
            or self.stopped_early
        )

    @property
    def stopped_early(self) -> bool:
        """Tells whether --early_stopping has ended the run, by its checkpoint."""
        patience = self.settings.early_stopping
        return patience is not None and self.checkpoint.epochs_since_best >= patience


def assemble(settings: Settings) -> Job:
    """Builds what a run needs, of settings that `checks.check` has checked.

    It writes nothing to the model_dir but what a pass over all data finds.

    Raises:
        ValueError: If any input is bad.
    """
    checks.check_model_dir(settings)
    if group.restarted():
        settings = settings.but(clean=False)  # others of this run have done so
    # Before the data, which TensorFlow may be asked to read.
    found, shares = share_devices(settings, configure_devices(settings))
    alike.check(this_host(), settings.of_all_hosts())
    settings = _of_this_host(settings)
    model_dir = settings.absolute_model_dir
    folder = os.path.join(model_dir, "checkpoints")
    read = _read_by(settings, split_ratios(settings, found))
    check_reduction(settings, found)
    mine = my_model.load(settings)
    what = settings.dataset or f"the data of {settings.model}"
    with Progress(f"Opening {what}"):
        opened = data_parts.open_data(read, mine)
    one_batch = settings.batch_size
    settings = settings if settings.batch_per_tower else opened.settings
    setup = setup_parts.of(settings, opened.facts, mine)
    if not settings.clean:
        continued.check_classes(folder, setup)
    # What is to be divided may be larger than the device that is home.
    divided = settings.shard_embeddings != "none" or settings.stages > 1
    model = model_parts.build_model(setup, HOST if divided else found.home)
    if not settings.eval_only:
        model_parts.check_can_be_saved(setup, model)
    if not settings.clean:
        continued.check_model(folder, model)
    goes_on = not settings.clean and bool(store.find(folder))
    notes = []
    if settings.init_weights is not None or settings.freeze is not None:
        fine_tune = feature("train.parts.fine_tune")
        notes = fine_tune.prepare(settings, model, goes_on)

    known = os.path.join(model_dir, BAD_RECORDS)
    with Progress(f"Preparing {what}"):
        data = opened.prepare([] if settings.clean else quarantine.read(known))
    alike.check(this_host(), {"the data set": _described(setup.facts, data)})
    kept = feature("tower.kept").KeptExamples() if settings.keeps_on_devices else None
    parallel = model_parts.build_towers(
        setup, model, found, data.examples, model_dir=model_dir, kept=kept
    )
    # Before a checkpoint: loss and metrics are made of the model as it is now.
    logits = model_parts.returns_logits(model, setup)
    checkpoint = continued.make_checkpoint(
        setup, folder, validates=data.held_out is not None
    )
    if not settings.clean:
        continued.restore(settings, checkpoint, folder, model)
    # What is recorded repeats the run, also with other towers.
    asked = settings.but(batch_size=one_batch) if settings.batch_at_start else settings
    job = Job(
        *(asked, data, setup, found, model, parallel, checkpoint, logits),
        notes=notes,
        shares=shares,
    )
    job = _with_batch_per_tower(job)
    job = dataclasses.replace(job, hosts=_of_all_hosts(job))
    if not (settings.eval_only or job.is_finished):
        job = _ready_to_train(job, kept)
    # Built now: whatever that finds wrong is the user's input, too.
    _ = job.data.training, job.data.evaluation
    return job


def _with_batch_per_tower(job):
    """Scales the learning rate, of one tower or of the checkpoint, to the batch."""
    if not job.settings.batch_per_tower:
        return job
    checkpoint, one = job.checkpoint, job.settings.batch_size
    before = (checkpoint.latest and checkpoint.batch_size) or one
    if checkpoint.position.batch:
        # The rest of the epoch is as it was; see `BatchPerTower`.
        return job if before == job.batch_size else job.with_batches_of(before)
    scale_rate(job.model, job.batch_size / before)
    return job


def _ready_to_train(job, kept):
    """Reads what only training needs; `kept` gets what stays on the devices."""
    data = job.data.keep_at_hand()
    weights = training.class_weight(job.setup, data)
    said = [] if weights is None else [training.class_weight_text(job.setup, weights)]
    if kept is not None:
        data, line = feature("train.parts.keeping").keep(data, job.devices, kept)
        said.append(line)
    return dataclasses.replace(
        job, data=data, class_weight=weights, notes=[*job.notes, *said]
    )


def _of_all_hosts(job):
    """What each host tells of its towers, by name; `None` with one host."""
    hosts = this_host()
    if hosts.count == 1:
        return None
    told = hosts.exchange(listing.rows(job.devices, job.sizes, job.settings.stages))
    return dict(zip(hosts.names, told, strict=True))


def _described(facts, data):
    """What hosts compare of the data, of which each may have files of its own."""
    target = facts.target
    names = target and target.names
    return {
        "name": facts.name,
        "number of examples": data.examples,
        "number of bad records": data.bad_records,
        "shape of an example": str(facts.input_shape),
        "kind of target": target and target.kind,
        "number of outputs": target and target.size,
        "names of outputs": names and [*map(str, names)],
        "vocabulary size": facts.vocabulary_size,
        "table sizes": facts.table_sizes and dict(facts.table_sizes),
    }


def _of_this_host(settings):
    """Settings by which only the first host writes in --model_dir."""
    if this_host().index == 0:
        return settings
    aside = tempfile.mkdtemp(prefix="towers-")
    forks.at_exit(shutil.rmtree, aside, ignore_errors=True)
    return settings.but(model_dir=aside)


def _read_by(settings, ratios):
    """Settings by which data are read, in batches of all towers; checks their size."""
    read = with_whole_batch(settings, ratios)
    _check_sizes(read, ratios)
    return read


def _check_sizes(settings, ratios):
    """Checks that no tower, or micro-batch, is idle in every step."""
    count = settings.micro_batch_count
    ratios = [n for n in ratios for _ in range(count)]
    ratios = [*itertools.chain(*this_host().exchange(ratios))]
    idle = batch.cut(settings.batch_size, ratios).count(0)
    if idle and count > 1:
        raise ValueError(
            f"Received {settings.as_flag('batch_size')} for "
            f"{len(ratios)} micro-batches of all towers, of which {idle} would get no "
            "example; expected one for each, so give a larger batch, or fewer of them "
            "by --micro_batches."
        )
    if idle:
        raise ValueError(
            f"Received {settings.as_flag('batch_size')} for "
            f"{words.count(len(ratios), 'tower')}, of which {idle} would get no "
            "example; expected one for each, so give a larger batch, or fewer towers "
            f"by --{'num_gpus' if settings.share_gpus is None else 'max_gpus'}."
        )


def check_reduction(settings: Settings, devices: Devices) -> None:
    """Checks that these towers can update variables as flags say."""
    copied, home = settings.update == "replicated", devices.home
    if copied and settings.local_parameter_device and home != devices.towers[0]:
        raise ValueError(
            f"Received {settings.as_flag('local_parameter_device')} and "
            "--variable_update=replicated, where the variables are on each tower; "
            "expected one of them, so leave out --local_parameter_device."
        )
    if settings.all_reduce_alg != "auto":
        reduce.check_all_reduce(
            settings.all_reduce_alg, settings.update, devices.towers
        )

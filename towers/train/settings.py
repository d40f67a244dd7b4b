"""What a run is asked to do: one frozen value, which needs no TensorFlow.

flags.py reads it from the command line, checks.py checks it, job.py makes a job of it.
"""

import csv
import dataclasses
import difflib
import io
import os
from typing import Any, Literal, Self

from towers.hosts.group import JOIN_SECONDS
from towers.input_pipeline import specs
from towers.input_pipeline.choices import (
    BAD_RECORDS,
    CACHES,
    FILE_KINDS,
    MISSING,
    RECIPES,
    SCALES,
)
from towers.input_pipeline.local_store.store_flags import LIMIT_GB
from towers.models import spec
from towers.train.parts import metrics

# Names alone: what they stand for is imported with TensorFlow. A test compares.
BUILDERS = ("asynchronous", "parameter_server", "replicated", "sharded")
ALL_REDUCE_ALGS = ("cpu", "device", "ring", "nccl")
OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lamb"),
    *("Lion", "Muon", "Nadam", "RMSprop", "ScheduleFreeAdamW", "SGD"),
)
CLOUDS = ("aws", "azure", "gcp")
DEFAULT_DATA = "digits"
TASKS = (
    *("classification", "regression", "binary", "multilabel", "segmentation"),
    *("text_classification", "tagging", "language_model"),
)
# What a file of the user's may define beside the model.
OWN_NAMES = (
    *("loss", "metrics", "optimizer", "callbacks", "preprocess"),
    *("train_data", "eval_data"),
)

# Describes the layers of a run's model, in its model_dir, from the run's begin.
ARCHITECTURE = "model.json"
# What is done with raw data before a model sees them; beside the model.
PREPROCESSING = "preprocessing.json"

# Names the flags by which the runs of a queue differ, in their environment.
DIFFERING = "TOWERS_DIFFERING"
# Names a file descriptor where a run writes lines of JSON while it trains.
REPORTS = "TOWERS_REPORTS"

# Of a run, these say what to do now; flags.txt, which describes the run, omits them.
_OF_THE_START = ("clean", "eval_only", "checkpoint")

# Of several hosts, each may have its own; all other flags are the same on all.
OF_A_HOST = (
    *("num_gpus", "gpu_indices", "max_gpus", "gpu_split", "split_ratios"),
    *("share_gpus", "join_seconds"),
    *(
        "allow_growth",
        "gpu_memory_limit_mb",
        "gpu_memory_fraction",
        "local_parameter_device",
        "soft_placement",
    ),
    *("log_device_placement", "ram_budget_mb", "prefetch"),
    *("data_dir", "cache_dir", "model_dir", "preemption_notice"),
    *("local_store", "local_store_gb"),
)
_FILES = ("model_dir", "data_dir", "cache_dir", "local_store", "init_weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that the flags of towers.train say, under their names.

    flags.py says what each of them means. Without a `dataset`, the model's file has the
    data; `checks.check` names the default where it has none.
    """

    # Data.
    dataset: str | None = None
    eval_dataset: str | None = None
    data_dir: str = "data"
    num_classes: int | None = None
    eval_fraction: float | None = None
    feature_columns: tuple[str, ...] | None = None
    missing: Literal[*MISSING] | None = None
    label_column: str | None = None
    text_column: str | None = None
    tokenizer: str | None = None
    sequence_length: int | None = None
    packing: bool | None = None
    image_key: str | None = None
    label_key: str | None = None
    group_by_length: bool = False
    train_split: str | None = None
    eval_split: str | None = None
    eval_steps: int | None = None
    scale: Literal[*SCALES] | None = None
    bad_records: Literal[*BAD_RECORDS] = "fail"
    max_bad_records: int = 100
    # Images.
    image_size: str | None = None
    recipe: Literal[*RECIPES] = "none"
    randaugment: tuple[str, ...] | None = None
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    # Input pipeline.
    cache: Literal[*CACHES] = "auto"
    cache_dir: str | None = None
    local_store: str | None = None
    local_store_gb: float = LIMIT_GB
    shuffle_mb: int = 256
    ram_budget_mb: int | None = None
    prefetch: int | None = None
    data_service: str | None = None
    # Model and training.
    model: str = "cnn"
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    positions: Literal[*spec.POSITIONS] | None = None
    dropout: float | None = None
    sparsity: float | None = None
    task: Literal[*TASKS] | None = None
    batch_size: int = 64
    batch_size_per_tower: int | None = None
    train_epochs: int = 30
    max_train_steps: int | None = None
    optimizer: str = "adam"
    learning_rate: float = 0.001
    lr_schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    warmup_steps: int = 0
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float | None = None
    accumulate_steps: int = 1
    ema: float | None = None
    label_smoothing: float = 0.0
    class_weight: tuple[str, ...] | None = None
    metrics: tuple[str, ...] | None = None
    init_weights: str | None = None
    freeze: tuple[str, ...] | None = None
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    seed: int = 0
    deterministic: bool = False
    parity_steps: int = 3
    # Devices.
    num_gpus: int | Literal["auto"] | None = None
    gpu_indices: tuple[str, ...] | None = None
    max_gpus: int | None = None
    share_gpus: str | None = None
    join_seconds: float = JOIN_SECONDS
    gpu_split: int = 1
    allow_growth: bool | None = None
    gpu_memory_limit_mb: int | None = None
    gpu_memory_fraction: float | None = None
    soft_placement: bool = True
    log_device_placement: bool = False
    # Towers.
    variable_update: Literal["auto", *BUILDERS] = "auto"
    all_reduce_alg: Literal["auto", *ALL_REDUCE_ALGS] = "auto"
    shard_optimizer_state: bool = False
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"
    elastic_batch: Literal["global", "per_tower"] = "global"
    max_staleness: int | None = None
    shard_embeddings: Literal["none", "auto", "rows", "columns"] = "none"
    stages: int = 1
    placement: tuple[str, ...] | None = None
    micro_batches: int = 1
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    recompute: Literal["none", "stage", "layer"] = "none"
    local_parameter_device: Literal["cpu", "gpu"] | None = None
    split_ratios: tuple[str, ...] | None = None
    loss_placement: Literal["auto", "tower", "gathered"] = "auto"
    strict: bool = True
    steps_per_loop: int = 1
    enable_xla: Literal["auto", "true", "false"] = "auto"
    # Where the run goes.
    model_dir: str | None = None
    clean: bool = False
    eval_only: bool = False
    checkpoint: str = "last"
    monitor: str | None = None
    monitor_mode: Literal["auto", "min", "max"] = "auto"
    early_stopping: int | None = None
    log_csv: bool = False
    save_steps: int | None = None
    save_minutes: float = 10.0
    keep_checkpoints: int = 3
    on_save_error: Literal["stop", "continue"] = "stop"
    preemption_notice: str | None = None
    # What the run shows, and looks out for.
    log_steps: int = 100
    histograms: bool = False
    profile_steps: tuple[str, ...] | None = None
    check_numerics: Literal["auto", "off"] = "auto"
    stall_seconds: float = 300.0
    on_stall: Literal["wait", "stop"] = "wait"

    def but(self, **changes: Any) -> Self:
        """Returns these settings with some of them changed."""
        return dataclasses.replace(self, **changes)

    @property
    def mixes(self) -> bool:
        """Tells whether training examples are mixed."""
        return bool(self.mixup_alpha or self.cutmix_alpha)

    @property
    def defined(self) -> set[str]:
        """What the user's file defines beside the model; nothing without a file.

        Raises:
            ValueError: There is no such file, or it is not valid Python.
        """
        if not spec.is_user_file(self.model):
            return set()
        return spec.names_in(spec.split_user_file(self.model)[0]) & {*OWN_NAMES}

    @property
    def model_options(self) -> dict[str, Any]:
        """What is asked of the model beyond the data, by the names of its flags."""
        given = {name: getattr(self, name) for name in spec.OPTIONS}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def finds_free(self) -> bool:
        """Tells whether the run takes GPUs that nobody uses."""
        return self.gpu_indices == ("free",)

    @property
    def finds_count(self) -> bool:
        """Tells whether it is measured how many GPUs pay."""
        return self.num_gpus == "auto"

    @property
    def fixed_gpus(self) -> int | None:
        """The number of GPUs that is asked for; `None` for the default, or to find."""
        return None if self.finds_count else self.num_gpus

    @property
    def finds_ratios(self) -> bool:
        """Tells whether the run finds split ratios by the time that its towers take."""
        return self.split_ratios == ("auto",)

    @property
    def batch_per_tower(self) -> bool:
        """Tells whether batch size and learning rate are those of one tower."""
        return self.elastic_batch == "per_tower"

    @property
    def asynchronous(self) -> bool:
        """Tells whether towers update the variables without waiting for one another."""
        return self.variable_update == "asynchronous"

    @property
    def weights_file(self) -> str | None:
        """The file that --init_weights names: of a model_dir, that of its model."""
        if self.init_weights in (None, "imagenet"):
            return None
        path = os.path.expanduser(self.init_weights)
        return os.path.join(path, "model.keras") if os.path.isdir(path) else path

    @property
    def frozen_layers(self) -> int | None:
        """How many layers --freeze counts off; `None` if it names them."""
        names = self.freeze or ()
        return int(names[0]) if len(names) == 1 and names[0].isdecimal() else None

    @property
    def constant_rate(self) -> bool:
        """Tells whether the learning rate is a number, not a schedule."""
        return self.lr_schedule == "constant" and not self.warmup_steps

    @property
    def uses_data_dir(self) -> bool:
        """Tells whether a data set that is named keeps files in --data_dir."""
        named = self.dataset, self.eval_dataset
        return any(each is not None and specs.takes(each, "data_dir") for each in named)

    @property
    def absolute_model_dir(self) -> str:
        """Where the run goes: the model_dir, or runs/DATASET_MODEL."""
        slug = "_".join(filter(None, (self.dataset, self.model)))
        default = os.path.join("runs", "".join(c if c.isalnum() else "_" for c in slug))
        return os.path.abspath(os.path.expanduser(self.model_dir or default))

    @property
    def optimizer_class(self) -> str:
        """The class of keras.optimizers that --optimizer names, in any case.

        Raises:
            ValueError: If there is none.
        """
        return _canonical(
            *(self.optimizer, OPTIMIZERS, "optimizer"),
            "an optimizer of keras.optimizers",
        )

    @property
    def metric_names(self) -> list[str]:
        """The classes of keras.metrics that --metrics names, in any case.

        Raises:
            ValueError: There is none of a name, or none that needs no arguments.
        """
        return [*map(metrics.canonical, self.metrics or ())]

    def of_all_hosts(self) -> dict[str, Any]:
        """Returns those that have to be the same on all hosts, as flags and values."""
        names = [name for name in NAMES if name not in OF_A_HOST]
        return {f"--{name}": getattr(self, name) for name in names}

    def as_flag(self, name: str) -> str:
        """Returns one of them as it is given, such as "--model=cnn"."""
        value = getattr(self, name)
        if isinstance(value, bool):
            return f"--{name}" if value else f"--no{name}"
        if isinstance(value, tuple):
            text = io.StringIO()
            csv.writer(text).writerow(value)
            value = text.getvalue().strip()
        return f"--{name}={value}"

    def as_text(self) -> str:
        """Returns the flags of the run as --flagfile reads them, from any folder."""
        return "".join(f"{line}\n" for line in self.as_lines())

    def as_lines(self) -> list[str]:
        """Returns the lines of `as_text`, without their ends."""
        lines = []
        for name in NAMES:
            value = getattr(self, name)
            if name == "model_dir":
                value = self.absolute_model_dir
            if value is None or name in _OF_THE_START:
                continue
            if name == "data_dir" and not self.uses_data_dir:
                continue
            if name == "batch_size" and self.batch_size_per_tower is not None:
                continue
            path = with_absolute_path(name, value)
            lines.append(f"--{name}={path}" if path else self.as_flag(name))
        return lines


NAMES = tuple(field.name for field in dataclasses.fields(Settings))
DEFAULTS = Settings()


def is_given(settings: Settings, name: str) -> bool:
    """Tells whether a flag has another value than its default."""
    return getattr(settings, name) != getattr(DEFAULTS, name)


def _canonical(asked, names, flag, what):
    """Returns the name of a class as Keras spells it."""
    known = {name.lower(): name for name in names}
    if asked.lower() in known:
        return known[asked.lower()]
    near = difflib.get_close_matches(asked.lower(), known) or known
    raise ValueError(
        f"Received --{flag}={asked}; expected {what}, such as {', '.join(near)}."
    )


def with_absolute_path(name: str, value: str) -> str | None:
    """Returns the value of a flag that names a file; `None` of any other flag."""
    if name == "init_weights" and value == "imagenet":
        return None
    if name in _FILES and value:
        return _absolute(os.path.expanduser(value))
    if name == "preemption_notice" and value not in CLOUDS:
        return _absolute(os.path.expanduser(value))
    if name in ("dataset", "eval_dataset"):
        kind, _, path = value.partition(":")
        named = kind in FILE_KINDS and value != specs.PYTHON
        if kind == "npy":
            return f"{kind}:{','.join(map(_absolute, path.split(',')))}"
        return f"{kind}:{_absolute(path)}" if named else None
    if name == "tokenizer" and ":" in value:
        kind, _, path = value.partition(":")
        return f"{kind}:{_absolute(os.path.expanduser(path))}"
    if name == "model" and spec.is_user_file(value):
        path, function = spec.split_user_file(value)
        return f"{path.absolute()}:{function}"
    return None


def _absolute(path: str) -> str:
    remote = "://" in path
    return path if remote else os.path.abspath(path)

"""What a run is asked to do: one frozen value, which needs no TensorFlow.

flags.py reads it from the command line, checks.py checks it, job.py makes a job of it.
"""

import csv
import dataclasses
import difflib
import io
import math
import os
import re
from typing import Any, ClassVar, Literal, Self

from towers.input_pipeline import specs
from towers.input_pipeline.choices import (
    FILE_KINDS,
    RECIPES,
    SCALES,
)
from towers.input_pipeline.data_flags import (
    BadRecordsFlag,
    CacheFlag,
    DataFlags,
    DecodeFlag,
)
from towers.input_pipeline.local_store.store_flags import StoreFlags
from towers.models import spec
from towers.program import object_store
from towers.program.flags import table
from towers.program.flags.table import About, flag
from towers.train.parts import metrics

# Names alone: what they stand for is imported with TensorFlow. A test compares.
BUILDERS = ("asynchronous", "parameter_server", "replicated", "sharded")
ALL_REDUCE_ALGS = ("cpu", "device", "ring", "nccl")
OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lamb"),
    *("Lion", "Muon", "Nadam", "RMSprop", "ScheduleFreeAdamW", "SGD"),
)
STALL_SECONDS = 300.0
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

# By the names of values that are parts of flags: the flags.
_PART_OF = {
    **dict.fromkeys(("skips_bad", "max_bad_records"), "bad_records"),
    **dict.fromkeys(("train_split", "eval_split"), "splits"),
    **dict.fromkeys(("mixes", "mixup_alpha", "cutmix_alpha"), "mix"),
    **dict.fromkeys(("cache_kind", "cache_dir"), "cache"),
    **dict.fromkeys(("store_folder", "store_gb"), "local_store"),
    **dict.fromkeys(
        ("allow_growth", "gpu_memory_limit_mb", "gpu_memory_fraction"), "gpu_memory"
    ),
    **dict.fromkeys(("micro_batch_count", "pipeline_schedule"), "micro_batches"),
    **dict.fromkeys(("save_steps", "save_minutes"), "save_every"),
    **dict.fromkeys(("monitored_log", "monitor_mode"), "monitor"),
    **dict.fromkeys(("update", "all_reduce_alg", "max_staleness"), "variable_update"),
    **dict.fromkeys(("stall_action", "stall_seconds"), "on_stall"),
}
_MODEL_OPTIONS = {"layers": int, "width": int, "heads": int, "positions": str}
_MODEL_OPTIONS |= {"dropout": float, "sparsity": float}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DataFlags, BadRecordsFlag, CacheFlag, DecodeFlag, StoreFlags):
    """The flags of towers.train, each with all that is known of it.

    Without a `dataset`, the model's file has the data; `checks.check` names the default
    where it has none. Properties return the parts of flags that have several.
    """

    has_long_help: ClassVar = True

    # Data.
    dataset: str | None = flag(
        None,
        "Data",
        "Data set to train on: digits, tfds:NAME, tfrecord:GLOB, array_record:GLOB, "
        "parquet:GLOB, csv:GLOB, npz:FILE, npy:X.npy,Y.npy, folder:DIR, text:GLOB, "
        "text:python, conll:GLOB, synthetic:HxWxC:CLASSES or "
        "zipf:NUMBERS:TABLESxROWS. Default: train_data of --model=FILE.py, if it is "
        "defined there, else digits.",
        about=About.MAIN | About.COMPARED,
        defined_by=("train_data",),
    )
    eval_dataset: str | None = flag(
        None,
        "Data",
        "Data set to validate on, in one of the forms of --dataset. Default: the "
        "held-out part of --dataset.",
        about=About.MAIN,
        defined_by=("train_data",),
    )
    data_dir: str = flag(
        "data",
        "Data",
        "Folder where digits and tfds: store their files.",
        about=About.HOST | About.PATH,
        defined_by=("train_data",),
    )
    group_by_length: bool = flag(
        False,
        "Data",
        "Make batches of texts of similar length, and pad each batch only to its "
        "longest text. The model must accept texts of any length.",
        about=About.EXAMPLES,
        defined_by=("train_data",),
    )
    splits: tuple[str, ...] | None = flag(
        None,
        "Data",
        "Splits of digits and tfds: to train on and to validate on, such as "
        "train[:90%],train[90%:]. One alone is for training.",
        defined_by=("train_data",),
    )
    eval_steps: int | None = flag(
        None,
        "Data",
        "Number of validation batches to evaluate on, always the same ones. Default: "
        "all; without validation data, as many training batches as hold 10,000 "
        "examples.",
        about=About.RUN,
        at_least=1,
    )
    scale: Literal[*SCALES] | None = flag(
        None,
        "Data",
        "How to scale columns of numbers. standard: to mean 0 and standard deviation "
        "1, measured on the training data. none: no scaling. Default: standard for "
        "csv:, parquet:, npz:, npy: and columns of tfds:, else none. A continued run "
        "scales as before.",
        defined_by=("train_data",),
    )
    # Images.
    image_size: str | None = flag(
        None,
        "Images",
        "Size to resize images to: N or HxW pixels. Default: no resizing.",
        about=About.MAIN | About.COMPARED,
        defined_by=("train_data",),
    )
    recipe: Literal[*RECIPES] = flag(
        "none",
        "Images",
        "How to augment images. none: resize only. imagenet: a random crop, mirrored "
        "at random; the center in evaluation. cifar: a shift of up to 4 pixels, "
        "mirrored at random.",
        about=About.MAIN | About.EXAMPLES | About.COMPARED,
        defined_by=("train_data",),
    )
    randaugment: tuple[str, ...] | None = flag(
        None,
        "Images",
        "Number of operations and magnitude of RandAugment, such as 2,9.",
        about=About.EXAMPLES | About.COMPARED,
        defined_by=("train_data",),
    )
    mix: tuple[str, ...] | None = flag(
        None,
        "Images",
        "How to mix the examples within each tower: mixup:0.2, cutmix:1, each with "
        "its alpha, or both, such as mixup:0.2,cutmix:1, where each batch uses one of "
        "the two at random. Default: no mixing.",
        about=About.COMPARED,
        defined_by=("train_data", "loss"),
    )
    # Input pipeline.
    shuffle_mb: int = flag(
        256,
        "Input pipeline",
        "Memory of the shuffle buffer, in MB; at most a quarter of what a container "
        "may take.",
        about=About.EXAMPLES,
        at_least=0,
        defined_by=("train_data",),
    )
    ram_budget_mb: int | None = flag(
        None,
        "Input pipeline",
        "Memory for batches that are read ahead, in MB.",
        about=About.HOST | About.EXAMPLES,
        at_least=1,
        at_most=2**30,
        defined_by=("train_data",),
    )
    prefetch: int | None = flag(
        None,
        "Input pipeline",
        "Number of batches to copy to the towers ahead of use. Default: 2 with GPUs, "
        "else none.",
        about=About.HOST,
        at_least=0,
    )
    data_service: str | None = flag(
        None,
        "Input pipeline",
        "Address of the dispatcher of a tf.data service, such as "
        "grpc://localhost:5050. Its workers run the input pipeline.",
        about=About.EXAMPLES,
        defined_by=("train_data",),
    )
    # Model and training.
    model: str = flag(
        "cnn",
        "Model and training",
        "Network: mlp, cnn, lstm, resnet20, resnet32, resnet56, unet, transformer_lm, "
        "transformer_encoder, dlrm, a network of keras.applications such as "
        "MobileNetV2, a preset of keras-hub as hub:PRESET or hub:PRESET?lora=RANK, or "
        "your own as file.py:function. Without a function, build. The file may also "
        "define loss, metrics, optimizer, callbacks, preprocess, train_data and "
        "eval_data.",
        about=About.MAIN | About.COMPARED,
    )
    model_options: tuple[str, ...] | None = flag(
        None,
        "Model and training",
        "What the network is made of, such as layers=4,width=256,heads=8. layers: "
        "blocks of a transformer, or how often unet halves the image. width: features "
        "of a token in a transformer, of an id in dlrm, of a pixel at full size in "
        "unet. heads: of attention, in a transformer. positions: rotary or learned, "
        "how a transformer knows the position of a token. dropout: the fraction of "
        "features that cnn and transformers drop in training. sparsity: the fraction "
        "of the weights of a transformer's feed-forward layers that is zero, in "
        "blocks. Default: those of the model.",
    )
    task: Literal[*TASKS] | None = flag(
        None,
        "Model and training",
        "What to learn. Default: what fits the data; none if --model=FILE.py defines "
        "loss.",
        about=About.MAIN,
    )
    batch_size: int = flag(
        64,
        "Model and training",
        "Number of examples in a global batch, which is divided among the towers.",
        about=About.MAIN | About.COMPARED,
        at_least=1,
    )
    train_epochs: int = flag(
        30,
        "Model and training",
        "Number of epochs to train for, in total.",
        about=About.MAIN | About.RUN | About.COMPARED,
        at_least=1,
    )
    max_train_steps: int | None = flag(
        None,
        "Model and training",
        "Number of optimizer steps, in total, after which training stops. With "
        "asynchronous, each tower makes one step per batch.",
        about=About.RUN | About.COMPARED,
        at_least=1,
    )
    optimizer: str = flag(
        "adam",
        "Model and training",
        "Optimizer of keras.optimizers, such as sgd or adam.",
        about=About.MAIN | About.COMPARED,
        defined_by=("optimizer",),
    )
    learning_rate: float = flag(
        0.001,
        "Model and training",
        "Highest learning rate of --lr_schedule.",
        about=About.MAIN | About.COMPARED,
        at_least=0,
    )
    lr_schedule: Literal["constant", "cosine", "linear", "step"] = flag(
        "constant",
        "Model and training",
        "How the learning rate changes. cosine, linear: it falls to 0. step: it is "
        "divided by 10 after 1/2 and after 3/4 of training.",
        about=About.MAIN | About.COMPARED,
    )
    warmup_steps: int = flag(
        0,
        "Model and training",
        "Number of optimizer steps in which the learning rate rises from 0, before "
        "--lr_schedule takes the rest of training.",
        about=About.COMPARED,
        at_least=0,
    )
    momentum: float = flag(
        0.9,
        "Model and training",
        "Momentum of optimizers that have one.",
        about=About.COMPARED,
        at_least=0,
        at_most=1,
        defined_by=("optimizer",),
    )
    weight_decay: float = flag(
        0.0,
        "Model and training",
        "Weight decay of the optimizer.",
        about=About.COMPARED,
        at_least=0,
        defined_by=("optimizer",),
    )
    clip_norm: float | None = flag(
        None,
        "Model and training",
        "Largest norm of all gradients together; larger gradients are scaled down to "
        "it. Default: no limit.",
        about=About.COMPARED,
        defined_by=("optimizer",),
        above=0,
    )
    accumulate_steps: int = flag(
        1,
        "Model and training",
        "Number of batches whose gradients are averaged for one optimizer step.",
        about=About.COMPARED,
        at_least=1,
        defined_by=("optimizer",),
    )
    ema: float | None = flag(
        None,
        "Model and training",
        "Momentum of moving averages of the weights, such as 0.999. Validation, "
        "model.keras and best.keras use the averages. Default: no averages.",
        about=About.COMPARED,
        defined_by=("optimizer",),
        above=0,
        below=1,
    )
    label_smoothing: float = flag(
        0.0,
        "Model and training",
        "Part of each label to share equally among all classes, such as 0.1, in the "
        "loss of training and of validation.",
        about=About.COMPARED,
        defined_by=("loss",),
        at_least=0,
        below=1,
    )
    class_weight: tuple[str, ...] | None = flag(
        None,
        "Model and training",
        "Weight of each class in training, by number or name, such as 0:1,1:5. Other "
        "classes have weight 1. balanced: all classes count the same. Default: 1.",
        about=About.COMPARED,
    )
    metrics: tuple[str, ...] | None = flag(
        None,
        "Model and training",
        "More metrics of keras.metrics to measure, such as Precision,Recall.",
        defined_by=("metrics",),
    )
    init_weights: str | None = flag(
        None,
        "Model and training",
        "Weights to start from, as far as names and shapes fit: a .keras or "
        ".weights.h5 file, the model_dir of a run, or imagenet for a network of "
        "keras.applications. Default: random.",
        about=About.PATH | About.COMPARED,
    )
    freeze: tuple[str, ...] | None = flag(
        None,
        "Model and training",
        "Layers that are not trained: names, such as stem,block1_*, or a number, such "
        "as 10 for the first 10 layers with weights.",
        about=About.COMPARED,
    )
    dtype: Literal["fp32", "fp16", "bf16"] = flag(
        "fp32",
        "Model and training",
        "Type to compute in. Variables are always fp32.",
        about=About.MAIN | About.COMPARED,
    )
    seed: int = flag(
        0,
        "Model and training",
        "Seed of the weights, the order of examples and dropout.",
        about=About.MAIN | About.COMPARED,
        at_least=0,
        at_most=2**32 - 1,
    )
    deterministic: bool = flag(
        False,
        "Model and training",
        "Compute the same bits in every run, which is slower.",
        about=About.MAIN,
    )
    # Devices.
    num_gpus: int | Literal["auto"] | None = flag(
        None,
        "Devices",
        "Number of GPUs, or auto for as many as pay. Default: all; without a GPU, "
        "logical CPUs for 2 towers.",
        about=About.MAIN | About.HOST,
        at_least=1,
    )
    gpu_indices: tuple[str, ...] | None = flag(
        None,
        "Devices",
        "Numbers of the GPUs to use, as in nvidia-smi, such as 0,2; or free for those "
        "that nobody uses, at most --num_gpus.",
        about=About.HOST,
    )
    max_gpus: int | None = flag(
        None,
        "Devices",
        "Number of GPUs to set up, which towers resize may give to the run later. "
        "Default: those that it begins with.",
        about=About.HOST,
        at_least=1,
    )
    share_gpus: str | None = flag(
        None,
        "Devices",
        "Share the GPUs that are set up with other runs on this machine that have "
        "this flag: LEAST:MOST, parts of their memory, such as 0.25:0.75. The run "
        "waits for the least, keeps it, and gets what others leave, up to the most. "
        "0.25:0.75:60 waits for 60 seconds at most instead of 600.",
        about=About.HOST,
    )
    gpu_split: int = flag(
        1,
        "Devices",
        "Number of logical GPUs, and so towers, to make of each GPU.",
        about=About.HOST,
        at_least=1,
    )
    gpu_memory: str | None = flag(
        None,
        "Devices",
        "GPU memory that the run takes. growth: as needed. all: all of it at the "
        "start. A number of MB: at most so much for each tower, at the start. A "
        "fraction, such as 0.5: at most this part of each GPU, which --gpu_split "
        "divides.",
        about=About.HOST,
    )
    soft_placement: bool = flag(
        True,
        "Devices",
        "Run an operation on another device if its own device has no kernel for it.",
        about=About.HOST,
    )
    log_device_placement: bool = flag(
        False,
        "Devices",
        "Log the device of every operation.",
        about=About.HOST,
    )
    # Towers.
    variable_update: str = flag(
        "auto",
        "Towers",
        "How to update the variables. parameter_server: on one device. replicated: in "
        "a copy on each tower; replicated:ring (or cpu, device, nccl) says how "
        "gradients are added. sharded: in parts, one on each tower. asynchronous: by "
        "each tower, waiting for none; asynchronous:4, for 4 updates of others at "
        "most. auto: the faster one of the first two.",
        about=About.MAIN | About.COMPARED,
    )
    shard_optimizer_state: bool = flag(
        False,
        "Towers",
        "With --variable_update=replicated, divide the optimizer's variables, such as "
        "Adam's moments, among the towers of all hosts: each tower keeps those for "
        "one part of the parameters, and updates that part. The results are the same.",
    )
    gradient_compression: Literal["none", "fp16", "bf16"] = flag(
        "none",
        "Towers",
        "How gradients travel between hosts. none: as they are. fp16, bf16: in 16 "
        "bits, which is inexact and takes half the bytes, for slow networks.",
    )
    elastic_batch: Literal["global", "at_start", "per_tower"] = flag(
        "global",
        "Towers",
        "What --batch_size applies to. global: to all towers together, so that the "
        "results are the same with any number of towers. at_start: to one tower; the "
        "global batch is as many for each tower that the run begins with. per_tower: "
        "to one tower, and --learning_rate, too; in each epoch, both are multiplied "
        "by the number of towers at the start of the epoch.",
    )
    shard_embeddings: Literal["none", "auto", "rows", "columns"] = flag(
        "none",
        "Towers",
        "How to place embedding tables and their optimizer slots on the towers' "
        "devices. none: like all other variables. rows, columns: divide each table "
        "over all devices. auto: keep each small table whole on one device, and "
        "divide large ones by rows. With several hosts, rows are divided over all "
        "hosts, and columns over the devices of each host.",
    )
    stages: int = flag(
        1,
        "Towers",
        "Number of devices of each tower. The model is divided among them, with its "
        "gradients and optimizer slots, so that it may be larger than a device. 4 "
        "GPUs with --stages=2 make 2 towers.",
        at_least=1,
    )
    placement: tuple[str, ...] | None = flag(
        None,
        "Towers",
        "The stage of each layer: PATTERN=STAGE, separated by commas, such as "
        "block_[0-5]=0,.*=1. A pattern is a regular expression for the whole name of "
        "a layer; the first that matches counts. Default: layers are divided in their "
        "order, by their weights and the time that they take.",
    )
    micro_batches: str = flag(
        "1",
        "Towers",
        "Number of parts of a tower's batch that go through its stages one after "
        "another, so that stages work at the same time. With one stage, it saves "
        "memory. Each part goes backward as soon as it can, which takes less memory "
        "(1f1b); with 4:gpipe, all go forward, then all go backward.",
    )
    recompute: Literal["none", "stage", "layer"] = flag(
        "none",
        "Towers",
        "Which activations to recompute for the gradient, instead of keeping them in "
        "memory. none: no activations. stage: those of a whole stage. layer: those of "
        "each layer separately.",
    )
    local_parameter_device: Literal["cpu", "gpu"] | None = flag(
        None,
        "Towers",
        "Device where the variables are, and where gradients are added. gpu: the "
        "first tower's device. Default: gpu if towers are on GPUs, else cpu.",
        about=About.HOST,
    )
    split_ratios: tuple[str, ...] | None = flag(
        None,
        "Towers",
        "Relative size of each tower's part of a batch, such as 2,3,3. auto: measure "
        "the towers during the first steps, and give slow ones less. Default: equal "
        "parts.",
        about=About.HOST | About.COMPARED,
    )
    loss_placement: Literal["auto", "tower", "gathered"] = flag(
        "auto",
        "Towers",
        "Where examples meet, as in a loss over pairs. auto: on one device, with the "
        "rows of all towers. tower: each tower treats its part of the batch as the "
        "whole batch. gathered: as auto, until Towers 0.4.",
    )
    strict: bool = flag(
        True,
        "Towers",
        "Refuse a model with a variable that is overwritten with its gradient, if "
        "nobody knows how to combine the gradients of several towers.",
    )
    steps_per_loop: int = flag(
        1,
        "Towers",
        "Number of training steps in one call of the graph.",
        about=About.COMPARED,
        at_least=1,
    )
    enable_xla: Literal["auto", "true", "false"] = flag(
        "auto",
        "Towers",
        "What to compile with XLA. true: towers and update. auto: the towers if the "
        "first steps show that this is faster (on CPUs, only --variable_update=auto "
        "tries it), and the update if the variables are on a GPU. false: nothing.",
        about=About.COMPARED,
    )
    # Output.
    model_dir: str | None = flag(
        None,
        "Output",
        "Folder, or address such as s3://bucket/run, for checkpoints, logs and the "
        "trained model. A run in it continues. Default: runs/DATASET_MODEL.",
        about=About.MAIN | About.HOST | About.PATH,
    )
    clean: bool = flag(
        False,
        "Output",
        "Remove the earlier run from --model_dir first.",
        about=About.MAIN | About.START,
    )
    eval_only: bool = flag(
        False,
        "Output",
        "Evaluate --checkpoint, without training.",
        about=About.MAIN | About.START,
    )
    checkpoint: str = flag(
        "last",
        "Output",
        "Checkpoint to evaluate or to continue from: last, best, or a path. To "
        "evaluate, a .keras file is accepted, too. A run that continues from an "
        "earlier checkpoint removes the later ones.",
        about=About.START | About.RUN,
    )
    monitor: str | None = flag(
        None,
        "Output",
        "Log that determines the best epoch, such as val_accuracy, or max:val_auc if "
        "Keras does not know what is better. Default: val_loss, else loss.",
        about=About.MAIN | About.RUN,
    )
    early_stopping: int | None = flag(
        None,
        "Output",
        "Stop after this number of epochs without a better --monitor. best.keras is "
        "the model of the best epoch. Default: never.",
        about=About.RUN,
        at_least=1,
    )
    log_csv: bool = flag(
        False,
        "Output",
        "Write the logs of each epoch to log.csv in --model_dir.",
        about=About.RUN,
    )
    save_every: tuple[str, ...] = flag(
        ("10min",),
        "Output",
        "When to write a checkpoint within an epoch: after a number of minutes, such "
        "as 10min, or of steps, such as 500, or both, such as 500,10min. none: at the "
        "ends of epochs only.",
        about=About.RUN,
    )
    keep_checkpoints: int = flag(
        3,
        "Output",
        "Number of checkpoints to keep, besides the best one.",
        about=About.RUN,
        at_least=1,
    )
    on_save_error: Literal["stop", "continue"] = flag(
        "stop",
        "Output",
        "Whether to stop or to continue training if a checkpoint cannot be written.",
        about=About.RUN,
    )
    preemption_notice: str | None = flag(
        None,
        "Output",
        "What tells that this machine is about to be taken away: the path of a file "
        "that exists then, or command: and a line for the shell that exits with code 0 "
        "then. The run then stops as by SIGTERM. Default: nothing is looked for.",
        about=About.HOST | About.RUN,
    )
    # Watching.
    log_steps: int | None = flag(
        None,
        "Watching",
        "Number of steps between lines of output, and between TensorBoard scalars. "
        "Default: the steps of an epoch, at most 100.",
        at_least=1,
    )
    histograms: bool = flag(
        False,
        "Watching",
        "Write TensorBoard histograms of the weights after each epoch.",
        about=About.RUN,
    )
    profile_steps: tuple[str, ...] | None = flag(
        None,
        "Watching",
        "First and last step to record for TensorBoard's profile plugin, such as "
        "100,110.",
        about=About.RUN,
    )
    check_numerics: Literal["auto", "off"] = flag(
        "auto",
        "Watching",
        "What to do about a loss or a gradient that is not finite. auto: stop before "
        "anything is updated, name the tower and the layer, and write the batch to "
        "not_finite.npz in --model_dir. off: continue, as on one device.",
    )
    on_stall: str = flag(
        "wait:300",
        "Watching",
        "What to do after a number of seconds without a finished step. wait:300: say "
        "what the towers wait for, and keep waiting. stop:300: say so, and end with "
        "exit code 4. never: nothing. The first step includes compilation.",
        about=About.RUN,
    )

    def but(self, **changes: Any) -> Self:
        """Returns these settings with some of them changed."""
        return dataclasses.replace(self, **changes)

    @property
    def train_split(self) -> str | None:
        """The split to train on, if it is named."""
        return (self.splits or ("",))[0] or None

    @property
    def eval_split(self) -> str | None:
        """The split to validate on, if it is named.

        Raises:
            ValueError: --splits has another form.
        """
        if len(self.splits or ()) > 2 or (self.splits and not self.splits[-1]):
            raise self._malformed("splits", "one or two, such as train,test")
        return (*(self.splits or ()), "", "")[1] or None

    @property
    def mixup_alpha(self) -> float:
        """Alpha of MixUp; 0 without MixUp."""
        return self._alphas.get("mixup", 0.0)

    @property
    def cutmix_alpha(self) -> float:
        """Alpha of CutMix; 0 without CutMix."""
        return self._alphas.get("cutmix", 0.0)

    @property
    def mixes(self) -> bool:
        """Whether training examples are mixed."""
        return any(self._alphas.values())

    @property
    def _alphas(self) -> dict[str, float]:
        example = "mixup:0.2, cutmix:1, or both with a comma between them"
        given = [text.partition(":") for text in self.mix or ()]
        names = [name for name, _, _ in given]
        if len({*names}) < len(names) or not {*names} <= {"mixup", "cutmix"}:
            raise self._malformed("mix", example)
        return {name: self._number("mix", text, example) for name, _, text in given}

    @property
    def allow_growth(self) -> bool | None:
        """Whether GPU memory is taken as needed; `None` if it is limited instead."""
        return {"growth": True, "all": False}.get(self.gpu_memory or "")

    @property
    def gpu_memory_limit_mb(self) -> int | None:
        """The most GPU memory that a tower may take, in MB."""
        limit = self._gpu_memory_limit
        return int(limit) if limit is not None and limit > 1 else None

    @property
    def gpu_memory_fraction(self) -> float | None:
        """The most of each GPU's memory that the run may take."""
        limit = self._gpu_memory_limit
        return limit if limit is not None and limit <= 1 else None

    @property
    def _gpu_memory_limit(self) -> float | None:
        if self.gpu_memory in (None, "growth", "all"):
            return None
        example = "growth, all, a number of MB, or a fraction such as 0.5"
        limit = self._number("gpu_memory", self.gpu_memory, example)
        if not 0 < limit < 1e9 or (limit > 1 and not limit.is_integer()):
            raise self._malformed("gpu_memory", example)
        return limit

    @property
    def micro_batch_count(self) -> int:
        """The number of micro-batches.

        Raises:
            ValueError: --micro_batches has another form.
        """
        match = re.fullmatch(r"([1-9]\d{0,8})(:gpipe|:1f1b)?", self.micro_batches)
        if match is None or (match[1] == "1" and match[2]):
            raise self._malformed("micro_batches", "a number, such as 4, or 4:gpipe")
        return int(match[1])

    @property
    def pipeline_schedule(self) -> str:
        """The order of micro-batches."""
        return self.micro_batches.partition(":")[2] or "1f1b"

    @property
    def save_steps(self) -> int | None:
        """The number of steps between checkpoints within an epoch, if any."""
        return self._save_points.get("steps")

    @property
    def save_minutes(self) -> float | None:
        """The number of minutes between checkpoints within an epoch, if any."""
        return self._save_points.get("minutes")

    @property
    def _save_points(self) -> dict[str, Any]:
        points: dict[str, Any] = {}
        if self.save_every == ("none",):
            return points
        for text in self.save_every or ("",):
            match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)min|([1-9]\d{0,17})", text)
            name = "minutes" if match and match[1] else "steps"
            if match is None or name in points:
                raise self._malformed(
                    "save_every", "500 steps, 10min, 500,10min for both, or none"
                )
            points[name] = float(match[1]) if match[1] else int(match[2])
        return points

    @property
    def monitored_log(self) -> str | None:
        """The log that --monitor names; `None` for the default.

        Raises:
            ValueError: --monitor has another form.
        """
        return self._monitor[1]

    @property
    def monitor_mode(self) -> str:
        """Which --monitor is better: "min", "max", or "auto" to infer it."""
        return self._monitor[0]

    @property
    def _monitor(self) -> tuple[str, str | None]:
        mode, colon, log = (self.monitor or "").partition(":")
        if colon and mode in ("min", "max"):
            return mode, log or None
        if colon:
            raise self._malformed(
                "monitor", "a log, such as val_accuracy, or max:val_auc or min:val_mae"
            )
        return "auto", self.monitor

    @property
    def stall_action(self) -> str:
        """What is done if no step finishes: "wait" or "stop".

        Raises:
            ValueError: --on_stall has another form.
        """
        match = re.fullmatch(
            r"never|(?:wait|stop)(?::(\d{1,9}(?:\.\d+)?))?", self.on_stall
        )
        if match is None or (match[1] and not float(match[1])):
            raise self._malformed("on_stall", "wait:300, stop:300 or never")
        return self.on_stall.partition(":")[0].replace("never", "wait")

    @property
    def stall_seconds(self) -> float:
        """The number of seconds without a finished step that is a stall; 0: never."""
        if self.on_stall == "never":
            return 0.0
        return float(self.on_stall.partition(":")[2] or STALL_SECONDS)

    def _malformed(self, name: str, expected: str) -> ValueError:
        return ValueError(f"Received {self.as_flag(name)}; expected {expected}.")

    def _number(self, name: str, text: str, expected: str) -> float:
        """Returns a part of a flag as a number of at least 0."""
        if not re.fullmatch(r"\d+(\.\d*)?(e-?\d+)?|\.\d+", text):
            raise self._malformed(name, expected)
        if not math.isfinite(number := float(text)):
            raise self._malformed(name, expected)
        return number

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
    def options_of_model(self) -> dict[str, Any]:
        """What is asked of the model beyond the data, by name.

        Raises:
            ValueError: --model_options has another form.
        """
        options: dict[str, Any] = {}
        for text in self.model_options or ():
            name, _, value = text.partition("=")
            kind = _MODEL_OPTIONS.get(name)
            if kind is None or not value or name in options:
                raise self._malformed(
                    "model_options",
                    f"each of {', '.join(_MODEL_OPTIONS)} once, such as layers=4",
                )
            numbers = {
                int: r"[1-9]\d{0,8}",
                float: r"0?\.\d+|0|[1-9](\.\d+)?e-0?[1-9]\d?",
                str: ".+",
            }
            if not re.fullmatch(numbers[kind], value) or (
                name == "positions" and value not in spec.POSITIONS
            ):
                expected = {
                    int: "a whole number of at least 1",
                    float: "at least 0 and less than 1",
                    str: f"one of {', '.join(spec.POSITIONS)}",
                }
                raise self._malformed("model_options", f"{name} to be {expected[kind]}")
            options[name] = kind(value)
        return options

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
        """Whether batch size and learning rate are those of one tower."""
        return self.elastic_batch == "per_tower"

    @property
    def batch_at_start(self) -> bool:
        """Whether the batch size is that of each tower that the run begins with."""
        return self.elastic_batch == "at_start"

    @property
    def update(self) -> str:
        """How variables are updated: "auto", or one of `BUILDERS`.

        Raises:
            ValueError: --variable_update has another form.
        """
        name, colon, option = self.variable_update.partition(":")
        known = {
            "replicated": option in ALL_REDUCE_ALGS,
            "asynchronous": re.fullmatch(r"\d{1,9}", option) is not None,
        }
        if name not in ("auto", *BUILDERS) or (colon and not known.get(name)):
            near = difflib.get_close_matches(name, ("auto", *BUILDERS), n=1)
            raise self._malformed(
                "variable_update",
                f"one of auto, {', '.join(BUILDERS)}, replicated:"
                f"{{{', '.join(ALL_REDUCE_ALGS)}}}, or asynchronous:4"
                + (f" (did you mean {near[0]}?)" if near else ""),
            )
        return name

    @property
    def all_reduce_alg(self) -> str:
        """How `replicated` adds gradients: "auto", or one of `ALL_REDUCE_ALGS`."""
        option = self.variable_update.partition(":")[2]
        return option if self.update == "replicated" and option else "auto"

    @property
    def max_staleness(self) -> int | None:
        """How many updates of other towers `asynchronous` allows; `None` for any."""
        option = self.variable_update.partition(":")[2]
        return int(option) if self.asynchronous and option else None

    @property
    def asynchronous(self) -> bool:
        """Tells whether towers update the variables without waiting for one another."""
        return self.update == "asynchronous"

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
        """Where the run works: the model_dir, or runs/DATASET_MODEL.

        Of an address, it is the copy on this machine.
        """
        slug = "_".join(filter(None, (self.dataset, self.model)))
        default = os.path.join("runs", "".join(c if c.isalnum() else "_" for c in slug))
        return object_store.working_folder(self.model_dir or default)

    @property
    def remote_model_dir(self) -> str | None:
        """The address of the model_dir, if it is one."""
        is_address = object_store.scheme(self.model_dir or "")
        return self.model_dir if is_address else None

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
        given = {f"--{name}": getattr(self, name) for name in names}
        return given | {"--cache": self.cache_kind}

    @property
    def keeps_on_devices(self) -> bool:
        """Tells whether training examples stay on the towers' devices."""
        return self.cache_kind == "devices"

    def as_flag(self, name: str) -> str:
        """Returns a flag as it is given, such as "--model=cnn".

        Args:
            name: The flag, or a part of its value.
        """
        name = _PART_OF.get(name, name)
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
                value = self.remote_model_dir or self.absolute_model_dir
            if value is None or name in _OF_THE_START:
                continue
            if name == "data_dir" and not self.uses_data_dir:
                continue
            path = with_absolute_path(name, value)
            lines.append(f"--{name}={path}" if path else self.as_flag(name))
        return lines


NAMES = tuple(table.fields(Settings))
OF_A_HOST = table.names(Settings, About.HOST)
_OF_THE_START = table.names(Settings, About.START)
_PATHS = table.names(Settings, About.PATH)
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
    if name in ("cache", "local_store"):
        first = r"(\w+:)" if name == "cache" else r"([^/:]*:)?"
        match = re.fullmatch(f"{first}(.*)", value, re.DOTALL)
        if match is None:
            return None  # a cache without a folder
        return f"{match[1] or ''}{_absolute(os.path.expanduser(match[2]))}"
    if name in _PATHS and value:
        return _absolute(os.path.expanduser(value))
    if name == "preemption_notice" and not value.startswith("command:"):
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
    if name == "model" and spec.is_hub(value):
        preset, rank = spec.split_hub(value)
        lora = f"?lora={rank}" if rank else ""
        return f"hub:{_absolute(preset)}{lora}" if os.path.isdir(preset) else None
    return None


def _absolute(path: str) -> str:
    remote = "://" in path
    return path if remote else os.path.abspath(path)

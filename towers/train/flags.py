"""The flags of towers.train: where they stand in the help, and what they mean.

towers.parity and towers.find_batch_size have the same ones. Types and defaults are
those of `Settings`. Nothing else reads absl's FLAGS: `read` returns settings.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Literal

from absl import flags

from towers.input_pipeline import data_flags
from towers.input_pipeline.local_store import store_flags
from towers.program.flags import command_line
from towers.train import checks, tower_flags
from towers.train.settings import Settings

FLAGS = flags.FLAGS

# What --help shows; --helpfull shows all.
MAIN = (
    *("dataset", "eval_dataset", "num_classes"),
    *("eval_fraction", "feature_columns", "label_column"),
    *("tokenizer", "sequence_length", "image_size", "recipe", "bad_records"),
    *("model", "task", "batch_size", "train_epochs", "optimizer", "learning_rate"),
    *("lr_schedule", "weight_decay", "dtype", "seed", "deterministic"),
    *("num_gpus", "variable_update"),
    *("model_dir", "clean", "eval_only", "monitor"),
)

# Below their headings.
HELPS = {
    "Data": {
        "dataset": (
            "Data set to train on: digits, tfds:NAME, tfrecord:GLOB, "
            "array_record:GLOB, parquet:GLOB, csv:GLOB, npz:FILE, "
            "npy:X.npy,Y.npy, folder:DIR, text:GLOB, text:python, conll:GLOB, "
            "synthetic:HxWxC:CLASSES or zipf:NUMBERS:TABLESxROWS. Default: train_data "
            "of --model=FILE.py, if it is defined there, else digits."
        ),
        "eval_dataset": (
            "Data set to validate on, in one of the forms of --dataset. Default: the "
            "held-out part of --dataset."
        ),
        "data_dir": "Folder where digits and tfds: store their files.",
        **data_flags.HELPS,
        "group_by_length": (
            "Make batches of texts of similar length, and pad each batch only to its "
            "longest text. The model must accept texts of any length."
        ),
        "train_split": "Split of digits and tfds: to train on, such as train[:90%].",
        "eval_split": "Split of digits and tfds: to validate on, such as train[90%:].",
        "eval_steps": (
            "Number of validation batches to evaluate on, always the same ones. "
            "Default: all; without validation data, as many training batches as hold "
            "10,000 examples."
        ),
        "scale": (
            "How to scale columns of numbers. standard: to mean 0 and standard "
            "deviation 1, measured on the training data. none: no scaling. Default: "
            "standard for csv:, parquet:, npz:, npy: and columns of tfds:, else none. "
            "A continued run scales as before."
        ),
        "bad_records": (
            "What to do with records that cannot be read, decoded or trained on. fail: "
            "stop, and name the first one. skip: check all records before training, "
            "list the bad ones in bad_records.json in --model_dir, and train without "
            "them."
        ),
        "max_bad_records": (
            "Largest number of records that --bad_records=skip may leave out of a data "
            "set."
        ),
    },
    "Images": {
        "image_size": (
            "Size to resize images to: N or HxW pixels. Default: no resizing."
        ),
        "recipe": (
            "How to augment images. none: resize only. imagenet: a random crop, "
            "mirrored at random; the center in evaluation. cifar: a shift of up to 4 "
            "pixels, mirrored at random."
        ),
        "randaugment": (
            "Number of operations and magnitude of RandAugment, such as 2,9."
        ),
        "mixup_alpha": (
            "Alpha of MixUp, such as 0.2, which mixes examples within each tower. 0 "
            "turns MixUp off."
        ),
        "cutmix_alpha": (
            "Alpha of CutMix, such as 1, which mixes examples within each tower. 0 "
            "turns CutMix off. With --mixup_alpha as well, each batch uses one of the "
            "two at random."
        ),
    },
    "Input pipeline": {
        "cache": (
            "Where to keep examples. auto: in memory if a quarter of the free memory "
            "is enough, else in --cache_dir if it is given; with --deterministic, in "
            "memory up to 1 GB. Images are kept as pixels if they have one size, or if "
            "--recipe=none or cifar resizes them to one (in memory for more than one "
            "epoch only). Other images are kept as encoded files, in memory. The "
            "memory is filled while the first epoch is read; disk is written before."
        ),
        "cache_dir": "Folder for the files of --cache=disk.",
        **store_flags.HELPS,
        "shuffle_mb": (
            "Memory of the shuffle buffer, in MB; at most a quarter of what a "
            "container may take."
        ),
        "ram_budget_mb": "Memory for batches that are read ahead, in MB.",
        "prefetch": (
            "Number of batches to copy to the towers ahead of use. Default: 2 with "
            "GPUs, else none."
        ),
        "data_service": (
            "Address of the dispatcher of a tf.data service, such as "
            "grpc://localhost:5050. Its workers run the input pipeline."
        ),
    },
    "Model and training": {
        "model": (
            "Network: mlp, cnn, lstm, resnet20, resnet32, resnet56, unet, "
            "transformer_lm, transformer_encoder, dlrm, a network of "
            "keras.applications such as MobileNetV2, or your own as file.py:function. "
            "Without a function, build. The file may also define loss, metrics, "
            "optimizer, callbacks, preprocess, train_data and eval_data."
        ),
        "layers": (
            "Number of blocks of a transformer, or number of times that unet halves "
            "the image. Default: that of the model."
        ),
        "width": (
            "Number of features: of a token in a transformer, of an id in dlrm, of a "
            "pixel at full size in unet. Default: that of the model."
        ),
        "heads": "Number of attention heads of a transformer. Default: 4.",
        "positions": (
            "How a transformer knows the position of a token. rotary: attention "
            "depends on the distance between two tokens. learned: each position has a "
            "vector. Default: rotary."
        ),
        "dropout": (
            "Fraction of the features that cnn and transformers drop in training. "
            "Default: that of the model."
        ),
        "sparsity": (
            "Fraction of the weights of a transformer's feed-forward layers that is "
            "zero, such as 0.75. They are in blocks, in the pattern of a butterfly, "
            "and the layers are faster and smaller. Default: 0."
        ),
        "task": (
            "What to learn. It sets the loss, the metrics and the expected output. "
            "Default: the task that fits the data; none if --model=FILE.py defines "
            "loss."
        ),
        "batch_size": (
            "Number of examples in a global batch, which is divided among the towers."
        ),
        "batch_size_per_tower": (
            "Number of examples for each tower, instead of --batch_size. The global "
            "batch is so many for each tower that the run begins with."
        ),
        "train_epochs": "Number of epochs to train for, in total.",
        "max_train_steps": (
            "Number of optimizer steps, in total, after which training stops. With "
            "asynchronous, each tower makes one step per batch."
        ),
        "optimizer": "Optimizer of keras.optimizers, such as sgd or adam.",
        "learning_rate": "Highest learning rate of --lr_schedule.",
        "lr_schedule": (
            "How the learning rate changes. cosine, linear: it falls to 0. step: it is "
            "divided by 10 after 1/2 and after 3/4 of training."
        ),
        "warmup_steps": (
            "Number of optimizer steps in which the learning rate rises from 0, before "
            "--lr_schedule takes the rest of training."
        ),
        "momentum": "Momentum of optimizers that have one.",
        "weight_decay": "Weight decay of the optimizer.",
        "clip_norm": (
            "Largest norm of all gradients together; larger gradients are scaled down "
            "to it. Default: no limit."
        ),
        "accumulate_steps": (
            "Number of batches whose gradients are averaged for one optimizer step."
        ),
        "ema": (
            "Momentum of moving averages of the weights, such as 0.999. Validation, "
            "model.keras and best.keras use the averages. Default: no averages."
        ),
        "label_smoothing": (
            "Part of each label to share equally among all classes, such as 0.1, in "
            "the loss of training and of validation."
        ),
        "class_weight": (
            "Weight of each class in training, by number or name, such as 0:1,1:5. "
            "Other classes have weight 1. balanced: all classes count the same. "
            "Default: 1."
        ),
        "metrics": (
            "More metrics of keras.metrics to measure, such as Precision,Recall."
        ),
        "init_weights": (
            "Weights to start from, as far as names and shapes fit: a .keras or "
            ".weights.h5 file, the model_dir of a run, or imagenet for a network of "
            "keras.applications. Default: random."
        ),
        "freeze": (
            "Layers that are not trained: names, such as stem,block1_*, or a number, "
            "such as 10 for the first 10 layers with weights."
        ),
        "dtype": "Type to compute in. Variables are always fp32.",
        "seed": "Seed of the weights, the order of examples and dropout.",
        "deterministic": (
            "Compute the same bits in every run with the same flags. Training is "
            "slower."
        ),
        "parity_steps": "Number of steps that towers parity compares.",
    },
    "Devices": {
        "num_gpus": (
            "Number of GPUs, or auto for as many as pay. Default: all; without a GPU, "
            "logical CPUs for 2 towers."
        ),
        "gpu_indices": (
            "Numbers of the GPUs to use, as in nvidia-smi, such as 0,2; or free for "
            "those that nobody uses, at most --num_gpus."
        ),
        "max_gpus": (
            "Number of GPUs to set up, which towers resize may give to the run later. "
            "Default: those that it begins with."
        ),
        "share_gpus": (
            "Share the GPUs that are set up with other runs on this machine that have "
            "this flag: LEAST:MOST, parts of their memory, such as 0.25:0.75. The run "
            "waits for the least, keeps it, and gets what others leave, up to the most."
        ),
        "join_seconds": (
            "With --share_gpus, number of seconds to wait until other runs leave the "
            "least that the run needs."
        ),
        "gpu_split": "Number of logical GPUs, and so towers, to make of each GPU.",
        "allow_growth": (
            "Take GPU memory as needed, instead of all at the start. Default: yes, "
            "unless --gpu_memory_limit_mb is given."
        ),
        "gpu_memory_limit_mb": "Most GPU memory that a tower may take, in MB.",
        "gpu_memory_fraction": (
            "Most of each GPU's memory that the run may take, such as 0.5. --gpu_split "
            "divides it."
        ),
        "soft_placement": (
            "Run an operation on another device if its own device has no kernel for it."
        ),
        "log_device_placement": "Log the device of every operation.",
    },
    "Towers": tower_flags.HELPS,
    "Output": {
        "model_dir": (
            "Folder for checkpoints, logs and the trained model. If it contains a run, "
            "that run continues. Default: runs/DATASET_MODEL."
        ),
        "clean": "Remove the earlier run from --model_dir first.",
        "eval_only": "Evaluate --checkpoint, without training.",
        "checkpoint": (
            "Checkpoint to evaluate or to continue from: last, best, or a path. To "
            "evaluate, a .keras file is accepted, too. A run that continues from an "
            "earlier checkpoint removes the later ones."
        ),
        "monitor": (
            "Log that determines the best epoch, such as val_accuracy. Default: "
            "val_loss, or loss without validation data."
        ),
        "monitor_mode": (
            "Whether the best epoch has the smallest or the largest --monitor. auto: "
            "as Keras infers from the metric."
        ),
        "early_stopping": (
            "Stop after this number of epochs without a better --monitor. "
            "best.keras is the model of the best epoch. Default: never."
        ),
        "log_csv": "Write the logs of each epoch to log.csv in --model_dir.",
        "save_steps": "Number of steps between checkpoints within an epoch.",
        "save_minutes": "Number of minutes between checkpoints within an epoch.",
        "keep_checkpoints": "Number of checkpoints to keep, besides the best one.",
        "on_save_error": (
            "Whether to stop or to continue training if a checkpoint cannot be written."
        ),
        "preemption_notice": (
            "Where a notice comes from that this machine is about to be taken away: "
            "aws, gcp, azure, a URL that answers 200 then, or the path of a file that "
            "exists then. The run then stops as by SIGTERM. Default: none is looked "
            "for."
        ),
    },
    "Watching": {
        "log_steps": (
            "Number of steps between lines of output, and between TensorBoard scalars. "
            "By default, each epoch has a scalar, however short it is."
        ),
        "histograms": "Write TensorBoard histograms of the weights after each epoch.",
        "profile_steps": (
            "First and last step to record for TensorBoard's profile plugin, such as "
            "100,110."
        ),
        "check_numerics": (
            "What to do about a loss or a gradient that is not finite. auto: stop "
            "before anything is updated, name the tower and the layer, and write the "
            "batch to not_finite.npz in --model_dir. off: continue, as on one device."
        ),
        "stall_seconds": (
            "After this number of seconds without a finished step, say what the towers "
            "wait for. The first step includes compilation. 0: never."
        ),
        "on_stall": (
            "What to do after --stall_seconds without a finished step. wait: keep "
            "waiting. stop: end with exit code 4."
        ),
    },
}

_DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    tuple: flags.DEFINE_list,
}


def _define(field: dataclasses.Field, text: str, heading: str) -> None:
    """Defines a flag as a field of the settings says, below a heading of the help."""
    kind, where = field.type, {"module_name": heading}
    if typing.get_args(kind)[:2] == (int, Literal["auto"]):
        parser, where["serializer"] = command_line.NUMBER_OR_AUTO
        flags.DEFINE(parser, field.name, field.default, text, **where)
        return
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind, _ = typing.get_args(kind)  # or None
    if typing.get_origin(kind) is typing.Literal:
        values = typing.get_args(kind)
        flags.DEFINE_enum(field.name, field.default, values, text, **where)
    else:
        define = _DEFINE[typing.get_origin(kind) or kind]
        define(field.name, field.default, text, **where)


_fields = {field.name: field for field in dataclasses.fields(Settings)}
for _heading, _texts in HELPS.items():
    for _name, _text in _texts.items():
        _define(_fields[_name], _text, _heading)


def read(argv: Sequence[str], doc: str) -> Settings:
    """Reads the flags of towers.train, as `command_line.read`, and checks them."""
    read_with({}, argv, doc)
    return checks.check(settings())


def read_with(
    ours: Mapping[str, list[flags.Flag]], argv: Sequence[str], doc: str
) -> None:
    """Reads a program's own flags, by their headings, with those of towers.train."""
    shown, every = (_joined(ours, groups(names)) for names in (MAIN, None))
    command_line.read(argv, doc, shown, every, example="--model=cnn")


def _joined(
    first: Mapping[str, list[flags.Flag]], second: Mapping[str, list[flags.Flag]]
) -> dict[str, list[flags.Flag]]:
    """Joins groups of flags. A heading may stand in both."""
    headings = dict.fromkeys([*first, *second])
    return {name: [*first.get(name, ()), *second.get(name, ())] for name in headings}


def settings() -> Settings:
    """Returns the flags as they were read."""
    return command_line.settings(Settings)


def groups(names: Sequence[str] | None = None) -> dict[str, list[flags.Flag]]:
    """Returns the flags below their headings, or those that are wanted."""
    found = {}
    for heading, texts in HELPS.items():
        if members := [FLAGS[n] for n in texts if names is None or n in names]:
            found[heading] = members
    if names is None:
        found["Every program"] = [FLAGS["verbosity"]]
    return found

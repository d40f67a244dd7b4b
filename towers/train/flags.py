"""The flags of towers.train, and their checks that need no TensorFlow.

towers.parity and towers.find_batch_size have the same ones.
"""

import difflib
import math
import os
from collections.abc import Sequence

from absl import flags

from towers.input_pipeline import data_flags, specs
from towers.input_pipeline.choices import CACHES, FILE_KINDS, RECIPES
from towers.models import spec
from towers.program import command_line
from towers.program.commands import (
    check_data_service,
    check_folder,
    read_image_size,
    read_randaugment,
)

FLAGS = flags.FLAGS

# Names alone: what they stand for is imported with TensorFlow. A test compares.
BUILDERS = ("asynchronous", "parameter_server", "replicated")
ALL_REDUCE_ALGS = ("cpu", "device", "ring", "nccl")
OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lamb"),
    *("Lion", "Muon", "Nadam", "RMSprop", "ScheduleFreeAdamW", "SGD"),
)
MOST_PROFILED_STEPS = 200
MONITORS = ("val_loss", "val_accuracy", "loss", "accuracy")

# Flags of the data, by the arguments of `input_pipeline.open_source`.
DATA_FLAGS = {
    **{name: name for name in data_flags.NAMES},
    "train_split": "train_split",
    "test_split": "eval_split",
}

# The headings of the help. A flag stands below one of them.
_DATA = {"module_name": "Data"}
_IMAGES = {"module_name": "Images"}
_INPUT = {"module_name": "Input pipeline"}
_TRAINING = {"module_name": "Model and training"}
_DEVICES = {"module_name": "Devices"}
_TOWERS = {"module_name": "Towers"}
_RUN = {"module_name": "Output"}
_WATCHING = {"module_name": "Watching"}
_GROUPS = _DATA, _IMAGES, _INPUT, _TRAINING, _DEVICES, _TOWERS, _RUN, _WATCHING

# What --help shows; --helpfull shows all.
MAIN = (
    *("dataset", "eval_dataset", "data_dir", "num_classes"),
    *("eval_fraction", "feature_columns", "label_column"),
    *("image_size", "recipe", "cache", "bad_records"),
    *("model", "batch_size", "train_epochs", "optimizer", "learning_rate"),
    *("lr_schedule", "weight_decay", "dtype", "seed", "deterministic"),
    *("num_gpus", "variable_update"),
    *("model_dir", "clean", "eval_only", "checkpoint", "monitor"),
)

flags.DEFINE_string(
    "dataset",
    "digits",
    "Data set to train on: digits, tfds:NAME, tfrecord:GLOB, array_record:GLOB, "
    "parquet:GLOB, csv:GLOB, folder:DIR or synthetic:HxWxC:CLASSES.",
    **_DATA,
)
flags.DEFINE_string(
    "eval_dataset",
    None,
    "Data set to validate on, in one of the forms of --dataset. Default: the "
    "held-out part of --dataset.",
    **_DATA,
)
flags.DEFINE_string(
    "data_dir", "data", "Folder where digits and tfds: store their files.", **_DATA
)
data_flags.define(_DATA)
for _name, _purpose in (("train_split", "train on"), ("eval_split", "validate on")):
    flags.DEFINE_string(
        _name,
        None,
        f"Split of digits and tfds: to {_purpose}, such as train[:90%].",
        **_DATA,
    )
flags.DEFINE_enum(
    "bad_records",
    "fail",
    ["fail", "skip"],
    "What to do with records that cannot be read, decoded or trained on. fail: "
    "stop, and name the first one. skip: check all records before training, "
    "list the bad ones in bad_records.json in --model_dir, and train without "
    "them.",
    **_DATA,
)
flags.DEFINE_integer(
    "max_bad_records",
    100,
    "Most records of a data set that --bad_records=skip may leave out.",
    **_DATA,
)

flags.DEFINE_string(
    "image_size",
    None,
    "Size to resize images to: N or HxW pixels. Default: no resizing.",
    **_IMAGES,
)
flags.DEFINE_enum(
    "recipe",
    "none",
    RECIPES,
    "How to augment images. none: resize only. imagenet: a random crop, "
    "mirrored at random; the center in evaluation. cifar: a shift of up to 4 "
    "pixels, mirrored at random.",
    **_IMAGES,
)
flags.DEFINE_list(
    "randaugment",
    None,
    "Number of operations and magnitude of RandAugment, such as 2,9.",
    **_IMAGES,
)
flags.DEFINE_float(
    "mixup_alpha",
    0.0,
    "Alpha of MixUp, such as 0.2, which mixes examples within each tower. 0 "
    "turns MixUp off.",
    **_IMAGES,
)
flags.DEFINE_float(
    "cutmix_alpha",
    0.0,
    "Alpha of CutMix, such as 1, which mixes examples within each tower. 0 "
    "turns CutMix off. With --mixup_alpha as well, each batch uses one of the "
    "two at random.",
    **_IMAGES,
)

flags.DEFINE_enum(
    "cache",
    "auto",
    CACHES,
    "Where to keep examples. auto: in memory if a quarter of the free memory is "
    "enough, else in --cache_dir if it is given; with --deterministic, in "
    "memory up to 1 GB. Images are kept as pixels if they have one size, or if "
    "--recipe=none or cifar resizes them to one (in memory for more than one "
    "epoch only). Other images are kept as encoded files, in memory.",
    **_INPUT,
)
flags.DEFINE_string(
    "cache_dir", None, "Folder for the files of --cache=disk.", **_INPUT
)
flags.DEFINE_integer(
    "shuffle_mb", 256, "Memory of the shuffle buffer, in MB.", **_INPUT
)
flags.DEFINE_integer(
    "ram_budget_mb", None, "Memory for batches that are read ahead, in MB.", **_INPUT
)
flags.DEFINE_integer(
    "prefetch",
    None,
    "Number of batches to copy to the towers ahead of use. Default: 2 with "
    "GPUs, else none.",
    **_INPUT,
)
flags.DEFINE_string(
    "data_service",
    None,
    "Address of the dispatcher of a tf.data service, such as "
    "grpc://localhost:5050. Its workers run the input pipeline.",
    **_INPUT,
)

flags.DEFINE_string(
    "model",
    "cnn",
    "Network: mlp, cnn, lstm, resnet20, resnet32, resnet56, a network of "
    "keras.applications such as MobileNetV2, or your own as file.py:function.",
    **_TRAINING,
)
flags.DEFINE_integer(
    "batch_size",
    64,
    "Number of examples in a global batch, which is divided among the towers.",
    **_TRAINING,
)
flags.DEFINE_integer(
    "train_epochs", 30, "Number of epochs to train for, in total.", **_TRAINING
)
flags.DEFINE_integer(
    "max_train_steps",
    None,
    "Number of optimizer steps, in total, after which training stops. With "
    "asynchronous, each tower makes one step per batch.",
    **_TRAINING,
)
flags.DEFINE_string(
    "optimizer",
    "adam",
    "Optimizer of keras.optimizers, such as sgd or adam.",
    **_TRAINING,
)
flags.DEFINE_float(
    "learning_rate", 0.001, "Highest learning rate of --lr_schedule.", **_TRAINING
)
flags.DEFINE_enum(
    "lr_schedule",
    "constant",
    ["constant", "cosine", "linear", "step"],
    "How the learning rate changes. cosine, linear: it falls to 0. step: it is "
    "divided by 10 after 1/2 and after 3/4 of training.",
    **_TRAINING,
)
flags.DEFINE_float(
    "momentum", 0.9, "Momentum of optimizers that have one.", **_TRAINING
)
flags.DEFINE_float("weight_decay", 0.0, "Weight decay of the optimizer.", **_TRAINING)
flags.DEFINE_enum(
    "dtype",
    "fp32",
    ["fp32", "fp16", "bf16"],
    "Type to compute in. Variables are always fp32.",
    **_TRAINING,
)
flags.DEFINE_integer(
    "seed", 0, "Seed of the weights, the order of examples and dropout.", **_TRAINING
)
flags.DEFINE_bool(
    "deterministic",
    False,
    "Compute the same bits in every run with the same flags. Training is slower.",
    **_TRAINING,
)
flags.DEFINE_integer(
    "parity_steps", 3, "Number of steps that towers parity compares.", **_TRAINING
)

flags.DEFINE_integer(
    "num_gpus",
    None,
    "Number of GPUs to use, one tower each. Default: all; without a GPU, 2 "
    "logical CPUs.",
    **_DEVICES,
)
flags.DEFINE_list(
    "gpu_indices",
    None,
    "Numbers of the GPUs to use, as in nvidia-smi, such as 0,2.",
    **_DEVICES,
)
flags.DEFINE_integer(
    "gpu_split",
    1,
    "Number of logical GPUs, and so towers, to make of each GPU.",
    **_DEVICES,
)
flags.DEFINE_bool(
    "allow_growth",
    None,
    "Take GPU memory as needed, instead of all at the start. Default: yes, "
    "unless --gpu_memory_limit_mb is given.",
    **_DEVICES,
)
flags.DEFINE_integer(
    "gpu_memory_limit_mb",
    None,
    "Most GPU memory that a tower may take, in MB.",
    **_DEVICES,
)
flags.DEFINE_bool(
    "soft_placement",
    True,
    "Run an operation on another device if its own device has no kernel for it.",
    **_DEVICES,
)
flags.DEFINE_bool(
    "log_device_placement", False, "Log the device of every operation.", **_DEVICES
)

flags.DEFINE_enum(
    "variable_update",
    "auto",
    ["auto", *BUILDERS],
    "How to update the variables. parameter_server: on one device. replicated: "
    "in a copy on each tower. asynchronous: by each tower, without waiting for "
    "the others. auto: whichever of the first two is measured to be faster at "
    "the start.",
    **_TOWERS,
)
flags.DEFINE_enum(
    "all_reduce_alg",
    "auto",
    ["auto", *ALL_REDUCE_ALGS],
    "How --variable_update=replicated adds gradients. cpu: on the CPU. device: "
    "on one device. ring: in parts, on all devices. nccl: by NCCL, on several "
    "GPUs.",
    **_TOWERS,
)
flags.DEFINE_integer(
    "max_staleness",
    None,
    "With --variable_update=asynchronous, the most updates by other towers "
    "between a tower's reading the variables and its own update. Default: no "
    "limit.",
    **_TOWERS,
)
flags.DEFINE_enum(
    "local_parameter_device",
    None,
    ["cpu", "gpu"],
    "Device where the variables are, and where gradients are added. gpu: the "
    "first tower's device. Default: gpu if towers are on GPUs, else cpu.",
    **_TOWERS,
)
flags.DEFINE_list(
    "split_ratios",
    None,
    "Relative size of each tower's part of a batch, such as 2,3,3. Default: "
    "equal parts.",
    **_TOWERS,
)
flags.DEFINE_enum(
    "loss_placement",
    "auto",
    ["auto", "tower", "gathered"],
    "Where to compute the loss. tower: on the towers. gathered: once, on the "
    "outputs of all towers. auto: on the towers where that is exact, else "
    "gathered.",
    **_TOWERS,
)
flags.DEFINE_bool(
    "strict",
    True,
    "Refuse a model if towers would compute other numbers than one device.",
    **_TOWERS,
)
flags.DEFINE_integer(
    "steps_per_loop", 1, "Number of training steps in one call of the graph.", **_TOWERS
)
flags.DEFINE_enum(
    "enable_xla",
    "auto",
    ["auto", "true", "false"],
    "What to compile with XLA. true: towers and update. auto: the towers if "
    "--variable_update=auto measures that this is faster, and the update if the "
    "variables are on a GPU. false: nothing.",
    **_TOWERS,
)

flags.DEFINE_string(
    "model_dir",
    None,
    "Folder for checkpoints, logs and the trained model. If it contains a run, "
    "that run continues. Default: runs/DATASET_MODEL.",
    **_RUN,
)
flags.DEFINE_bool(
    "clean", False, "Remove the earlier run from --model_dir first.", **_RUN
)
flags.DEFINE_bool(
    "eval_only", False, "Evaluate --checkpoint, without training.", **_RUN
)
flags.DEFINE_string(
    "checkpoint",
    "last",
    "Checkpoint to evaluate or to continue from: last, best, or a path. To "
    "evaluate, a .keras file is accepted, too. A run that continues from an "
    "earlier checkpoint removes the later ones.",
    **_RUN,
)
flags.DEFINE_enum(
    "monitor",
    None,
    MONITORS,
    "Metric that determines the best epoch. Default: val_loss, or loss without "
    "validation data.",
    **_RUN,
)
flags.DEFINE_enum(
    "monitor_mode",
    "auto",
    ["auto", "min", "max"],
    "Whether the best epoch has the smallest or the largest --monitor. auto: as "
    "Keras infers from the metric.",
    **_RUN,
)
flags.DEFINE_integer(
    "save_steps", None, "Number of steps between checkpoints within an epoch.", **_RUN
)
flags.DEFINE_float(
    "save_minutes",
    10.0,
    "Number of minutes between checkpoints within an epoch.",
    **_RUN,
)
flags.DEFINE_integer(
    "keep_checkpoints",
    3,
    "Number of checkpoints to keep, besides the best one.",
    **_RUN,
)
flags.DEFINE_enum(
    "on_save_error",
    "stop",
    ["stop", "continue"],
    "Whether to stop or to continue training if a checkpoint cannot be written.",
    **_RUN,
)

flags.DEFINE_integer(
    "log_steps",
    100,
    "Number of steps between lines of output, and between TensorBoard scalars.",
    **_WATCHING,
)
flags.DEFINE_bool(
    "histograms",
    False,
    "Write TensorBoard histograms of the weights after each epoch.",
    **_WATCHING,
)
flags.DEFINE_list(
    "profile_steps",
    None,
    "First and last step to record for TensorBoard's profile plugin, such as 100,110.",
    **_WATCHING,
)
flags.DEFINE_enum(
    "check_numerics",
    "auto",
    ["auto", "off"],
    "What to do about a loss or a gradient that is not finite. auto: stop "
    "before anything is updated, name the tower and the layer, and write the "
    "batch to not_finite.npz in --model_dir. off: continue, as on one device.",
    **_WATCHING,
)
flags.DEFINE_float(
    "stall_seconds",
    300.0,
    "Number of seconds without a finished step after which to say what the "
    "towers wait for. The first step includes compilation. 0: never.",
    **_WATCHING,
)
flags.DEFINE_enum(
    "on_stall",
    "wait",
    ["wait", "stop"],
    "What to do after --stall_seconds without a finished step. wait: keep "
    "waiting. stop: end with exit code 4.",
    **_WATCHING,
)


def read(argv: Sequence[str], doc: str) -> list[str]:
    """Reads the flags of towers.train, and checks them.

    Args:
        argv: The program's name and its arguments.
        doc: What the program is for.

    Returns:
        The program's name.

    Raises:
        ValueError: If a flag is bad, or there is anything but flags.
    """
    rest = command_line.read(argv, doc, groups(MAIN), groups())
    check(rest)
    return rest


def read_for_training(argv: Sequence[str], doc: str) -> None:
    """Does as `read`, and checks that the run can be written."""
    read(argv, doc)
    check_model_dir()


def read_for_parity(argv: Sequence[str], doc: str) -> None:
    """Does as `read`, and checks that nothing is mixed."""
    read(argv, doc)
    if mixes():
        raise ValueError(
            "Received --mixup_alpha or --cutmix_alpha, which mix each tower's own "
            "examples and so never equal one device; leave them out."
        )


def groups(names: Sequence[str] | None = None) -> dict[str, list[flags.Flag]]:
    """Returns the flags below their headings.

    Args:
        names: Those that are wanted; `None` for all.
    """
    by_module = FLAGS.flags_by_module_dict()
    found = {}
    for group in _GROUPS:
        title = group["module_name"]
        members = [f for f in by_module[title] if names is None or f.name in names]
        if members:
            found[title] = members
    if names is None:
        found["Every program"] = [FLAGS["verbosity"]]
    return found


def as_text(model_dir: str | None = None) -> str:
    """Returns the flags as --flagfile reads them, from whatever folder.

    Args:
        model_dir: Where the run goes, if that is known.
    """
    lines = []
    for group in _GROUPS:
        for flag in FLAGS.flags_by_module_dict()[group["module_name"]]:
            # What to remove, whether to train and from where, is not part of the run.
            if flag.name in ("clean", "eval_only", "checkpoint"):
                continue
            if flag.name == "data_dir" and not uses_data_dir():
                continue
            value = flag.value
            if flag.name == "model_dir":
                value = model_dir or value
            if value is None:
                continue
            path = _with_absolute_path(flag.name, value)
            lines.append(f"--{flag.name}={path}" if path else flag.serialize())
    return "".join(f"{line}\n" for line in lines)


def _with_absolute_path(name: str, value: str) -> str | None:
    """Returns the value of a flag that names a file; `None` of any other flag."""
    if name in ("model_dir", "data_dir", "cache_dir") and value:
        return _absolute(os.path.expanduser(value))
    if name in ("dataset", "eval_dataset"):
        kind, _, path = value.partition(":")
        return f"{kind}:{_absolute(path)}" if kind in FILE_KINDS else None
    if name == "model" and spec.is_user_file(value):
        path, function = spec.split_user_file(value)
        return f"{path.absolute()}:{function}"
    return None


def _absolute(path: str) -> str:
    remote = "://" in path
    return path if remote else os.path.abspath(path)


def check(argv: Sequence[str]) -> None:
    """Checks the flags by themselves; touches no device.

    Args:
        argv: What is left of the command line once the flags are read.

    Raises:
        ValueError: If anything is bad.
    """
    if len(argv) > 1:
        raise ValueError(
            f"Received the argument {argv[1]!r}; expected flags only, such as "
            "--model=cnn (see --help)."
        )
    for name, least, most in (
        ("batch_size", 1, None),
        ("train_epochs", 1, None),
        ("max_train_steps", 1, None),
        ("max_staleness", 0, None),
        ("num_gpus", 1, None),
        ("num_classes", 1, None),
        ("gpu_split", 1, None),
        ("gpu_memory_limit_mb", 1, None),
        ("steps_per_loop", 1, None),
        ("log_steps", 1, None),
        ("save_steps", 1, None),
        ("save_minutes", 0, None),
        ("stall_seconds", 0, None),
        ("keep_checkpoints", 1, None),
        ("max_bad_records", 0, None),
        ("mixup_alpha", 0, None),
        ("cutmix_alpha", 0, None),
        ("shuffle_mb", 0, None),
        ("ram_budget_mb", 1, 2**30),
        ("prefetch", 0, None),
        ("parity_steps", 1, None),
        ("seed", 0, 2**32 - 1),
        ("learning_rate", 0, None),
        ("momentum", 0, 1),
        ("weight_decay", 0, None),
    ):
        value = FLAGS[name].value
        if value is None:
            continue
        if not least <= value < math.inf or (most is not None and value > most):
            expected = f"at least {least}" if most is None else f"{least} to {most}"
            if value == math.inf:
                expected = "a number that is finite"
            raise ValueError(f"Received --{name}={value}; expected {expected}.")
    if FLAGS.clean and FLAGS.eval_only:
        raise ValueError(
            "Received --clean and --eval_only; expected one of them, as nothing is "
            "left to evaluate after --clean."
        )
    if FLAGS.clean and FLAGS.checkpoint != "last":
        raise ValueError(
            f"Received --clean and --checkpoint={FLAGS.checkpoint}; expected one of "
            "them, as nothing is left to go on from after --clean."
        )
    if FLAGS.all_reduce_alg != "auto" and FLAGS.variable_update != "replicated":
        raise ValueError(
            f"Received --all_reduce_alg={FLAGS.all_reduce_alg} with --variable_update="
            f"{FLAGS.variable_update}; it says how replicated adds gradients, so give "
            "--variable_update=replicated as well."
        )
    asynchronous = FLAGS.variable_update == "asynchronous"
    if FLAGS.max_staleness is not None and not asynchronous:
        raise ValueError(
            f"Received --max_staleness={FLAGS.max_staleness} and "
            f"--variable_update={FLAGS.variable_update}, whose towers wait for one "
            "another; expected --variable_update=asynchronous, or none."
        )
    if FLAGS.deterministic and asynchronous:
        raise ValueError(
            "Received --deterministic and --variable_update=asynchronous, where the "
            "order of updates is left to chance; expected one of them, so use "
            "--variable_update=parameter_server."
        )
    if any(not index.isdigit() for index in FLAGS.gpu_indices or []):
        raise ValueError(
            f"Received --gpu_indices={','.join(FLAGS.gpu_indices)}; expected numbers "
            "of GPUs, such as --gpu_indices=0,2."
        )
    for share in FLAGS.split_ratios or []:
        if not (share.isdecimal() and int(share)):
            raise ValueError(
                f"Received --split_ratios={','.join(FLAGS.split_ratios)}; expected a "
                "positive integer for each tower, such as --split_ratios=2,3,3."
            )
    if FLAGS.data_service and FLAGS.cache in ("memory", "disk"):
        raise ValueError(
            f"Received --cache={FLAGS.cache} with --data_service, whose workers read "
            "the files themselves; expected one of the two."
        )
    if FLAGS.cache == "disk" and FLAGS.cache_dir is None:
        raise ValueError(
            "Received --cache=disk without --cache_dir; expected a folder for its "
            "files, such as --cache_dir=cache."
        )
    if FLAGS.cache_dir is not None and (
        FLAGS.cache in ("memory", "none") or FLAGS.data_service
    ):
        other = "data_service" if FLAGS.data_service else f"cache={FLAGS.cache}"
        raise ValueError(
            f"Received --cache_dir={FLAGS.cache_dir} with --{other}, which keeps no "
            "files there; expected --cache=disk or auto, so leave one out."
        )
    if FLAGS.eval_fraction is not None and not 0 <= FLAGS.eval_fraction < 1:
        raise ValueError(
            f"Received --eval_fraction={FLAGS.eval_fraction}; expected at least 0 and "
            "less than 1, such as 0.1."
        )
    check_data_flags()
    if uses_data_dir():
        check_folder("data_dir", FLAGS.data_dir, "--data_dir", new=True)
    if FLAGS.cache_dir is not None:
        check_folder("cache_dir", FLAGS.cache_dir, "--cache_dir", new=True)
    if mixes() and FLAGS.loss_placement == "gathered":
        raise ValueError(
            "Received --loss_placement=gathered with --mixup_alpha or --cutmix_alpha, "
            "which mix examples on the towers; expected --loss_placement=auto."
        )
    spec.check(FLAGS.model)
    optimizer()
    read_image_size(FLAGS.image_size)
    read_randaugment(FLAGS.randaugment)
    read_profile_steps()
    check_data_service(FLAGS.data_service)


def check_data_flags() -> None:
    """Checks that data sets can be there, and that the flags of the data apply."""
    if FLAGS.eval_fraction is not None and FLAGS.eval_dataset is not None:
        raise ValueError(
            f"Received --eval_fraction={FLAGS.eval_fraction} and --eval_dataset="
            f"{FLAGS.eval_dataset}, which is evaluated instead; expected one of the "
            "two."
        )
    for name, flag in DATA_FLAGS.items():
        if FLAGS[flag].value is None:
            continue
        named = [FLAGS.dataset, FLAGS.eval_dataset]
        if name == "train_split":
            named = named[:1]
        elif name == "test_split" and FLAGS.eval_dataset is not None:
            named = named[1:]
        named = [each for each in named if each is not None]
        if not any(specs.takes(each, name) for each in named):
            given = FLAGS[flag].serialize()
            raise ValueError(
                f"Received {given} for {' and '.join(named)}; expected it only for "
                f"{specs.kinds_with(name)}, so leave it out."
            )
    for each in (FLAGS.dataset, FLAGS.eval_dataset):
        if each is not None:
            specs.check(each)


def uses_data_dir() -> bool:
    """Tells whether a data set that is named keeps files in --data_dir."""
    named = FLAGS.dataset, FLAGS.eval_dataset
    return any(each is not None and specs.takes(each, "data_dir") for each in named)


def check_model_dir() -> str:
    """Returns the model_dir; checks that it can be written to, leaving nothing."""
    slug = "_".join((FLAGS.dataset, FLAGS.model))
    default = os.path.join("runs", "".join(c if c.isalnum() else "_" for c in slug))
    path = os.path.abspath(os.path.expanduser(FLAGS.model_dir or default))
    if FLAGS.eval_only:
        return path
    check_folder("model_dir", path, "--model_dir")
    return path


def read_profile_steps() -> tuple[int, int] | None:
    """Reads the first and the last step to profile, if any."""
    steps = FLAGS.profile_steps
    if not steps:
        return None
    if all(step.isdecimal() for step in steps) and len(steps) == 2:
        first, last = map(int, steps)
        if 1 <= first < last < first + MOST_PROFILED_STEPS:
            return first, last
    raise ValueError(
        f"Received --profile_steps={','.join(steps)}; expected the first and the last "
        f"of 2 to {MOST_PROFILED_STEPS} steps to record, such as "
        "--profile_steps=100,110."
    )


def mixes() -> bool:
    """Tells whether training examples are mixed."""
    return bool(FLAGS.mixup_alpha or FLAGS.cutmix_alpha)


def optimizer() -> str:
    """Returns the class of keras.optimizers that --optimizer names, in any case.

    Raises:
        ValueError: If there is none.
    """
    known = {name.lower(): name for name in OPTIMIZERS}
    asked = FLAGS.optimizer.lower()
    if asked not in known:
        near = difflib.get_close_matches(asked, known) or known
        raise ValueError(
            f"Received --optimizer={FLAGS.optimizer}; expected an optimizer of "
            f"keras.optimizers, such as {', '.join(near)}."
        )
    return known[asked]

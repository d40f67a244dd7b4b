"""Checks settings by themselves: before TensorFlow is imported, touching no device."""

import math
import os
import sys
from typing import Literal

from towers.input_pipeline import data_flags, specs, tokenizer_specs
from towers.input_pipeline.local_store import store_flags
from towers.models import spec
from towers.program.commands import (
    check_data_service,
    check_folder,
    read_image_size,
    read_randaugment,
)
from towers.program.features import feature
from towers.program.flags import table
from towers.train import tower_flags
from towers.train.parts import metrics
from towers.train.settings import DEFAULT_DATA, Settings, is_given

MOST_PROFILED_STEPS = 200

# Arguments of `input_pipeline.open_source`.
DATA_FLAGS = (*data_flags.NAMES, "train_split", "eval_split")

# Kinds of data sets that have no rows of numbers.
_WITHOUT_ROWS = ("digits", "folder", "synthetic", "text")

# Kinds whose rows of tokens have padding, or may have some.
_WITH_PADDING = ("conll", "folder")


def check(settings: Settings) -> Settings:
    """Checks settings by themselves, and returns them.

    Raises:
        ValueError: If anything is bad.
    """
    spec.check(settings.model, settings.options_of_model)
    settings = _with_data_set(settings)
    table.check_bounds(settings)
    _check_optimizer(settings)
    _check_run(settings)
    tower_flags.check(settings)
    _check_cache(settings)
    _check_keeping(settings)
    _ = settings.max_bad_records, settings.mixes, settings.save_steps
    _ = settings.stall_action, settings.eval_split, settings.monitored_log
    check_data(settings)
    named = [each for each in (settings.dataset, settings.eval_dataset) if each]
    store_flags.check(settings, named)
    _check_grouping(settings)
    if settings.uses_data_dir:
        check_folder("data_dir", settings.data_dir, "--data_dir", new=True)
    if settings.cache_dir is not None:
        check_folder("cache", settings.cache_dir, "--cache", new=True)
    _check_init_weights(settings)
    _ = settings.optimizer_class
    _check_metrics(settings)
    read_image_size(settings.image_size)
    read_randaugment(settings.randaugment)
    read_profile_steps(settings)
    check_data_service(settings.data_service)
    _check_decoding(settings)
    _check_line_breaks(settings)
    return settings


def _check_line_breaks(settings):
    """Checks that flags.txt, which has a flag in each line, gives back what it gets."""
    for line in settings.as_lines():
        if len(line.splitlines()) > 1:
            flag, _, value = line.partition("=")
            raise ValueError(
                f"Received {flag}={value!r}, which has a line break; expected none, as "
                "flags.txt would read what follows as another flag, so rename it."
            )


def _check_metrics(settings):
    """Checks that metrics are for the task, as far as it is known."""
    names, dataset = settings.metric_names, settings.dataset
    of_data = dataset and metrics.task_of(dataset, settings.text_column)
    of_data = None if "loss" in settings.defined else of_data
    if task := settings.task or of_data:
        metrics.check(names, task)


def _with_data_set(settings: Settings) -> Settings:
    """Checks what the user's file defines; names the default where no data are named.

    Raises:
        ValueError: It defines what a flag says otherwise.
    """
    defined = settings.defined
    file = spec.split_user_file(settings.model)[0].name if defined else ""
    if "eval_data" in defined and "train_data" not in defined:
        raise ValueError(
            f"{file} defines eval_data and no train_data; expected both, so define "
            "train_data as well, or name the data by --dataset and --eval_dataset."
        )
    for flag, row in table.rows(Settings).items():
        for name in row.defined_by:
            unused = name in defined and not (name == "loss" and settings.task)
            if unused and is_given(settings, flag):
                raise ValueError(
                    f"Received {settings.as_flag(flag)}, but {file} defines {name}, "
                    f"for which it says nothing; expected one of the two, so leave "
                    "one out."
                )
    if settings.dataset is None and "train_data" not in defined:
        of_text = settings.task == "language_model"
        return settings.but(dataset=specs.PYTHON if of_text else DEFAULT_DATA)
    return settings


def read_class_weight(
    settings: Settings,
) -> dict[str, float] | Literal["balanced"] | None:
    """Reads --class_weight: a weight for each class that it names.

    Raises:
        ValueError: It has another form.
    """
    asked, found = settings.class_weight, {}
    if not asked or asked == ("balanced",):
        return "balanced" if asked else None
    for each in asked:
        name, _, weight = each.rpartition(":")
        try:
            found[name] = float(weight)
        except ValueError:
            found[name] = math.nan
    if len(found) == len(asked) and all(
        name and 0 <= weight < math.inf for name, weight in found.items()
    ):
        return found
    raise ValueError(
        f"Received {settings.as_flag('class_weight')}; expected balanced, or a class "
        "and its weight each, such as --class_weight=cat:1,owl:5."
    )


def check_model_dir(settings: Settings) -> Settings:
    """Checks that the run can be written, leaving nothing; returns the settings."""
    _check_encoding(settings.absolute_model_dir)
    if not settings.eval_only:
        check_folder("model_dir", settings.absolute_model_dir, "--model_dir")
    return settings


def _check_encoding(model_dir):
    """Checks that TensorFlow, which takes paths as UTF-8, can write to a folder."""
    try:
        model_dir.encode()
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        do = "rename it"
        if encoding != "utf-8":
            do = "set PYTHONUTF8=1 in the environment, or choose another name"
        raise ValueError(
            f"Received --model_dir={model_dir!r}, which is no UTF-8 where names of "
            f"files are {encoding}; TensorFlow expects UTF-8, so {do}."
        ) from error


def check_not_mixed(settings: Settings) -> Settings:
    """Checks that no examples are mixed, for towers.parity; returns the settings."""
    if settings.mixes:
        raise ValueError(
            f"Received {settings.as_flag('mix')}, which mixes each tower's own "
            "examples and so never equals one device; leave it out."
        )
    for name in ("label_smoothing", "class_weight"):
        if is_given(settings, name):
            raise ValueError(
                f"Received {settings.as_flag(name)}; expected the task's own loss of "
                "plain labels, whose steps towers.parity compares, so leave it out."
            )
    return settings


def _check_optimizer(settings: Settings) -> None:
    """Checks what the optimizer is to do besides its steps."""
    if read_class_weight(settings) is not None and settings.mixes:
        raise ValueError(
            f"Received {settings.as_flag('class_weight')} with "
            f"{settings.as_flag('mix')}, which mixes examples of several classes; "
            "expected one of the two."
        )
    most = settings.max_train_steps
    if settings.warmup_steps and most is not None and settings.warmup_steps >= most:
        raise ValueError(
            f"Received {settings.as_flag('warmup_steps')} and "
            f"{settings.as_flag('max_train_steps')}, which end the warm-up and "
            "training; expected fewer steps of warm-up."
        )


def _check_init_weights(settings: Settings) -> None:
    """Checks that there are weights to begin with, and what --freeze counts."""
    asked, file = settings.init_weights, settings.weights_file
    if asked == "imagenet":
        spec.check_imagenet(settings.model)
    elif asked is not None and not (
        file.endswith((".keras", ".weights.h5")) and os.path.isfile(file)
    ):
        raise ValueError(
            f"Received --init_weights={asked}, but there is no file {file} of weights; "
            "expected imagenet, a .keras or .weights.h5 file, or the model_dir of a "
            "run that has ended."
        )
    if settings.frozen_layers == 0:
        raise ValueError(
            "Received --freeze=0; expected at least 1, or names of layers, such as "
            "--freeze=stem,block1_*."
        )


def _check_run(settings: Settings) -> None:
    """Checks what is asked of an earlier run, and what ends this one."""
    if settings.clean and settings.eval_only:
        raise ValueError(
            "Received --clean and --eval_only; expected one of them, as nothing is "
            "left to evaluate after --clean."
        )
    if settings.clean and settings.checkpoint != "last":
        raise ValueError(
            f"Received --clean and --checkpoint={settings.checkpoint}; expected one of "
            "them, as nothing is left to go on from after --clean."
        )
    if settings.preemption_notice is not None:
        notice = feature("elastic.notice")
        notice.check(settings.preemption_notice, "--preemption_notice")


def _check_cache(settings: Settings) -> None:
    """Checks where examples are kept."""
    kept = settings.cache_kind not in ("auto", "none") or settings.cache_dir is not None
    if settings.data_service and kept:
        raise ValueError(
            f"Received {settings.as_flag('cache')} with --data_service, whose workers "
            "read the files themselves; expected one of the two."
        )


def _check_keeping(settings: Settings) -> None:
    """Checks that examples are the same in each epoch, if they stay on the devices."""
    if not settings.keeps_on_devices:
        return
    changing = ("randaugment", "group_by_length", "class_weight")
    given = [name for name in changing if getattr(settings, name)]
    given += ["recipe"] if settings.recipe != "none" else []
    given += ["stages"] if settings.stages > 1 else []
    given += ["variable_update"] if settings.asynchronous else []
    if given:
        raise ValueError(
            f"Received --cache=devices with {settings.as_flag(given[0])}; expected "
            "only one of them: examples on the devices are the same in each epoch, and "
            "their towers wait for one another."
        )


def _check_decoding(settings: Settings) -> None:
    """Checks that training leaves the GPU to a decoder, if it is to decode."""
    if settings.decode_on == "cpu":
        return
    unknown = "and it is not known whether GPUs decode the same bits in every run"
    full = "which leaves no memory to decode in"
    for name, is_refused, why in (
        ("task", settings.task == "segmentation", "whose masks are cut on the CPU"),
        ("deterministic", settings.deterministic, unknown),
        ("gpu_memory", settings.allow_growth is False, full),
    ):
        if is_refused:
            raise ValueError(
                f"Received --decode_on=gpu with {settings.as_flag(name)}, {why}; "
                "expected one of the two."
            )
    data_flags.check_decoding(settings)


def _check_grouping(settings: Settings) -> None:
    """Checks that rows may have padding, if they are grouped by length."""
    if not settings.group_by_length:
        return
    kind = settings.dataset.partition(":")[0]
    documents = kind == "text" and settings.packing is False
    if not (kind in _WITH_PADDING or settings.text_column or documents):
        raise ValueError(
            f"Received --group_by_length for {settings.dataset}, whose rows have no "
            "padding; expected it only for conll:, for folder: of texts, for text: "
            "with --nopacking, and for csv: and parquet: with --text_column, so leave "
            "it out."
        )
    if settings.options_of_model.get("positions") == "learned":
        raise ValueError(
            "Received --group_by_length with positions=learned, which is for texts of "
            "one length; expected --model_options=positions=rotary, or no "
            "--group_by_length."
        )


def check_data(settings: Settings) -> None:
    """Checks that data sets can be there, and that the flags of the data apply."""
    fraction, eval_dataset = settings.eval_fraction, settings.eval_dataset
    if fraction is not None and eval_dataset is not None:
        raise ValueError(
            f"Received --eval_fraction={fraction} and --eval_dataset={eval_dataset}, "
            "which is evaluated instead; expected one of the two."
        )
    for name in DATA_FLAGS if settings.dataset is not None else ():
        if getattr(settings, name) is None:
            continue
        named = [settings.dataset, eval_dataset]
        if name == "train_split":
            named = named[:1]
        elif name == "eval_split" and eval_dataset is not None:
            named = named[1:]
        named = [each for each in named if each is not None]
        if not any(specs.takes(each, name) for each in named):
            raise ValueError(
                f"Received {settings.as_flag(name)} for {' and '.join(named)}; "
                f"expected it only for {specs.kinds_with(name)}, so leave it out."
            )
    kind = (settings.dataset or "").partition(":")[0]
    if settings.scale == "standard" and kind in _WITHOUT_ROWS:
        raise ValueError(
            f"Received --scale=standard for {settings.dataset}; expected it only for "
            "rows of numbers, such as those of csv:, so leave it out."
        )
    for each in (settings.dataset, eval_dataset):
        if each is not None:
            specs.check(each)
            given = [name for name in DATA_FLAGS if getattr(settings, name) is not None]
            specs.check_text(each, given)
    if settings.tokenizer is not None:
        if spec.is_hub(settings.model):
            raise ValueError(
                f"Received {settings.as_flag('tokenizer')} with "
                f"{settings.as_flag('model')}, whose preset has a tokenizer; expected "
                "one of them, so leave out --tokenizer."
            )
        tokenizer_specs.check(settings.tokenizer)


def read_profile_steps(settings: Settings) -> tuple[int, int] | None:
    """Reads the first and the last step to profile, if any."""
    steps = settings.profile_steps
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

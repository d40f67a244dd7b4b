"""Data sets are opened as settings describe them, and compared."""

import functools
import os
from typing import Any

from towers import input_pipeline
from towers.collectives.world import this_host
from towers.input_pipeline.specs import takes
from towers.program import voice
from towers.program.commands import read_image_size
from towers.train.checks import DATA_FLAGS
from towers.train.parts.data import scale
from towers.train.parts.task import TASKS, described
from towers.train.settings import Settings, is_given


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
    if like is not None:
        target = like.target
        options |= {"class_names": like.class_names, "target": target.kind}
        options["tokenizer"] = like.tokenizer
        columns = takes(settings.dataset, "feature_columns")
        tables = columns and takes(settings.dataset, "text_column")
        if tables:
            labels = target.names if target.row_shape else like.label_field
            options |= {"label_key": None, "label_column": labels}
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
        skip_bad=settings.bad_records == "skip",
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
    if settings.local_store is None or not takes(spec, "local_store"):
        return {}
    return {"local_store": _store(settings.local_store, settings.local_store_gb)}


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
                f"Received --cutmix_alpha={settings.cutmix_alpha}, but {source.name} "
                "has rows of numbers; expected images, so use --mixup_alpha."
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

"""What a run makes of columns: as it began, or by its training data."""

import os

from towers import input_pipeline
from towers.input_pipeline import Scaling
from towers.lifecycle.checkpoints import store
from towers.program import words
from towers.train.outputs import preprocessing
from towers.train.settings import PREPROCESSING, Settings

_TABLES = ("csv", "parquet", "npz", "npy")


def choose(
    settings: Settings, source: input_pipeline.Source
) -> tuple[Scaling | None, str]:
    """Decides how rows are scaled.

    Args:
        settings: Of the run, and where it may have begun.
        source: The training data, without bad records.

    Returns:
        The scaling, `None` of images and text, and a note on it and on numbers that
        float32 cannot tell apart.

    Raises:
        ValueError: --scale is not for such data, or not what a run began with.
    """
    scaling, note = _scaling(settings, source)
    with input_pipeline.blame_records(source):
        merged = input_pipeline.columns_merged_by_float32(source, scaling is not None)
    return scaling, " ".join(filter(None, [note, *map(_merged, merged, _ADVICE)]))


# On numbers to learn from, and on those to predict.
_ADVICE = (
    "--scale=standard takes their mean off first",
    "take a number near their mean off them first",
)


def _merged(names, advice):
    """Says which columns models cannot learn from, or predict."""
    if not names:
        return ""
    listed = ", ".join(map(repr, names[:10])) + ", ..." * (len(names) > 10)
    return (
        f"float32, in which models compute, cannot tell most of the numbers apart in "
        f"{listed}; {advice}."
    )


def shape(settings: Settings, source: input_pipeline.Source) -> tuple[int | None, ...]:
    """Returns the shape of what a model gets of rows, tokens or columns."""
    if source.input_kind == "tokens" or source.missing == "fail":
        return source.image_shape
    marked = source.missing_columns
    if _goes_on(settings):
        before, *_ = _read(settings.absolute_model_dir)
        marked = before.marked if before else ()
    return (source.image_shape[0] + len(marked),)


def _scaling(settings, source):
    """How rows are scaled, and a note on that."""
    if source.input_kind not in ("row", "columns"):
        if settings.scale == "standard":
            raise ValueError(
                f"Received --scale=standard, but {source.name} has no rows of "
                "numbers; expected a table, so leave it out."
            )
        return None, ""
    if _goes_on(settings):
        return _as_before(settings, source)
    asked = settings.scale
    kind = source.name.partition(":")[0]
    of_columns = kind == "tfds" and source.input_kind == "columns"
    if asked is None and (kind in _TABLES or of_columns):
        asked = "standard"
    fills = source.missing != "fail"
    if not source.image_fields or not (asked == "standard" or fills):
        return None, ""
    with input_pipeline.blame_records(source):
        scaling = input_pipeline.measure_scaling(
            source, standardize=asked == "standard"
        )
    note = ""
    if asked == "standard":
        why = "by the training data; --scale=none leaves them as they are."
        note = _text(f", {why}" if settings.scale is None else ".")
    return scaling, " ".join(filter(None, [note, _of_missing(source)]))


def _of_missing(source):
    """Says what stands for numbers that are missing; empty if none is."""
    if not source.missing_columns:
        return ""
    names = source.missing_columns
    listed = ", ".join(map(repr, names[:10])) + ", ..." * (len(names) > 10)
    return (
        f"Where a number is missing ({listed}), the {source.missing} of its column "
        "stands, and a column beside it says so; --missing=fail takes the row for bad."
    )


def _as_before(settings, source):
    """The scaling of a run that goes on, or is evaluated."""
    scaling, *_ = _read(settings.absolute_model_dir)
    standard = scaling and (any(scaling.mean) or {*scaling.std} != {1.0})
    before = "standard" if standard else "none"
    if settings.scale not in (None, before):
        raise ValueError(
            f"Received --scale={settings.scale}, but the run in "
            f"{settings.absolute_model_dir} began with {before}; expected the same, "
            "so leave it out, or start over with --clean."
        )
    if scaling is not None and scaling.names != tuple(source.image_fields):
        raise ValueError(
            f"The run in {settings.absolute_model_dir} has the columns "
            f"{words.listed(scaling.names)}, but {source.name} "
            f"{words.listed(source.image_fields)}; expected the same, so choose them "
            "by --feature_columns, or start over with --clean."
        )
    return scaling, _text(", as the run began.") if standard else ""


def _text(end):
    return f"Each column is scaled to mean 0 and standard deviation 1{end}"


def read_columns(
    settings: Settings,
) -> tuple[dict[str, list[str]] | None, dict[str, str] | None]:
    """Reads the texts and the kinds of a run's columns; `None` if it begins now."""
    if not _goes_on(settings):
        return None, None
    _, vocabularies, kinds = _read(settings.absolute_model_dir)
    return vocabularies or None, kinds or None


def _goes_on(settings):
    """Tells whether there is a run to go on with, or to evaluate."""
    folder = os.path.join(settings.absolute_model_dir, "checkpoints")
    return not settings.clean and bool(store.find(folder))


def _read(model_dir):
    """The scaling of a run if it has one, and its columns' vocabularies and kinds."""
    try:
        return preprocessing.read(model_dir, _parse)
    except FileNotFoundError:
        return None, None, None  # a run of before
    except preprocessing.FAULTS as error:
        path = os.path.join(model_dir, PREPROCESSING)
        raise ValueError(
            f"{path} cannot be read: {error}; expected what this run wrote, so copy it "
            "from a backup, or start over with --clean."
        ) from error


def _parse(found):
    scaling = found.get("scaling")
    scaling = scaling and Scaling.from_json(scaling)
    return scaling, found.get("vocabularies"), found.get("column_kinds")

"""What the data has: what a model, a task and the first lines of a run ask of it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras

from towers import input_pipeline
from towers.input_pipeline.sources.base import InputKind
from towers.input_pipeline.sources.targets import Target
from towers.program import words


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """What the data has.

    Attributes:
        name: What to call the data.
        input_kind: What an example is; "own" where a file of the user's reads them.
        inputs: What the model takes: a `keras.KerasTensor` whose batch is unknown, or a
            nest of them.
        target: What is to be given for an example; `None` where nothing tells.
        target_shape: Shape of that in the data, without the batch.
        vocabulary_size: How many tokens there are, where examples are tokens.
        feature_names: Of the numbers of a row, or of columns.
        table_sizes: How many values each column of categories has, by its name.
    """

    name: str
    input_kind: InputKind | str
    inputs: Any
    target: Target | None = None
    target_shape: tuple[int | None, ...] = ()
    vocabulary_size: int | None = None
    feature_names: tuple[str, ...] | None = None
    table_sizes: Mapping[str, int] | None = None

    @property
    def input_shape(self) -> Any:
        """Shape of an example without the batch; a nest of them for several inputs."""
        return keras.tree.map_structure(_shape, self.inputs)

    @property
    def sequence_length(self) -> int | None:
        """How many tokens an example has, where examples are tokens of one length."""
        return self.input_shape[0] if self.input_kind == "tokens" else None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, numbers or labels, if they have any."""
        return self.target and self.target.names

    @property
    def has_images(self) -> bool:
        """Whether the examples are pictures of a data set, which are shown."""
        return self.input_kind == "image"

    def text(self, examples: int | None) -> str:
        """Says how many examples there are, and of what."""
        shape = self.input_shape
        if self.input_kind == "image":
            what, each = "training image", f" of {'x'.join(map(str, shape))}"
        elif self.input_kind == "row":
            what, each = "row", f" of {words.count(shape[0], 'number')} to train on"
        elif self.input_kind == "tokens":
            length = words.count(shape[0], "token") if shape[0] else "tokens"
            what, each = "row", f" of {length} to train on"
        elif self.input_kind == "columns":
            count = sum(math.prod(shape[name]) for name in shape if name == "dense")
            tables = words.count(len(self.table_sizes), "category", "categories")
            what = "row"
            each = f" of {words.count(count, 'number')} and {tables} to train on"
        else:
            what, each = "example", f" of {shape}"
        return f"{words.counted(examples, what)}{each}"


def of_source(source: input_pipeline.Source, shape: tuple[int, ...]) -> DataFacts:
    """Returns what a source has.

    Args:
        source: The training data.
        shape: Of its examples, as they are read.
    """
    target, tokenizer = source.target, source.tokenizer
    return DataFacts(
        source.name,
        source.input_kind,
        _inputs(source, shape),
        target,
        {
            "class": (),
            "mask": tuple(shape[:2]),
            "tags": tuple(shape[:1]),
            "tokens": tuple(shape[:1]),
        }.get(target.kind, (target.size,)),
        vocabulary_size=tokenizer and tokenizer.size,
        feature_names=_feature_names(source, shape),
        table_sizes=source.table_sizes or None,
    )


def _inputs(source, shape):
    """What a model gets, whose batch is unknown."""
    if source.table_sizes:
        ids = {name: keras.KerasTensor((None,), "int64") for name in source.table_sizes}
        return ({"dense": keras.KerasTensor((None, *shape))} if shape[0] else {}) | ids
    return keras.KerasTensor(
        (None, *shape), "int32" if source.input_kind == "tokens" else None
    )


def _feature_names(source, shape):
    """What the numbers of a row are called, if they are columns of a table."""
    if source.input_kind not in ("row", "columns"):
        return None
    names = [*source.image_fields]
    if len(names) < shape[0]:
        names += [f"{name} is missing" for name in source.missing_columns]
    return tuple(names) if len(names) == shape[0] else None


def _shape(tensor):
    return tuple(tensor.shape[1:])

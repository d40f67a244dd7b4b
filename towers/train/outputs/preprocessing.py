"""What a trained model is given, and what it tells: for those who use it later.

A run writes it as it begins: preprocessing.json, classes.json and model.json, which
describes the model's layers, and text has its tokenizer in a folder. All of it runs in
TensorFlow's graphs.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from towers import input_pipeline
from towers.input_pipeline import text
from towers.input_pipeline.images import recipes
from towers.input_pipeline.images.decode import ALL_TRICKS, decode_window
from towers.input_pipeline.sources.tables import categories
from towers.train.parts.data import Data
from towers.train.parts.task import TASKS, Task
from towers.train.settings import ARCHITECTURE, PREPROCESSING

CLASSES, TOKENIZER = "classes.json", "tokenizer"
# What `input` is of examples that a file of the user's reads.
OWN = "own"


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """What a model is given for a file's pictures, rows or texts, and what it tells.

    Attributes:
        task: As --task names it; `None` if only a file of the user's knows.
        from_logits: Whether the model returns logits.
        input: "image", "row", "columns" or "tokens"; "own" where `train_data` of the
            user's file gives arrays.
        shape: Of an example, as the data give it; of columns, that of their numbers.
            For several inputs, a dict of shapes.
        model: The file of the user's that has defined the model, if there is one.
        preprocess: Whether `preprocess` of that file is called with examples first.
        known: What that may ask for; see `Setup.known`.
        dtype: Of arrays, as the data give them; for several inputs, a dict.
        range: The least and the largest number of a picture.
        recipe: How pictures are cut before they are resized; see --recipe.
        same_size: Whether all pictures had the model's size.
        features: Names of the numbers of a row, or of a table's column of text; empty
            where each file was a text.
        tables: How many ids the columns of categories have, by their names.
        outputs: Names of the numbers that it tells, if they have names.
        scaling: What is done to them; `None` for nothing.
        vocabularies: Texts of the columns of categories, by their names: what the model
            gets is the place there, from 1, and 0 for any other.
    """

    task: str | None
    from_logits: bool
    input: str
    shape: tuple[int | None, ...] | dict[str, tuple[int | None, ...]]
    model: str | None = None
    preprocess: bool = False
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str | dict[str, str] | None = None
    range: tuple[float, float] | None = None
    recipe: str | None = None
    same_size: bool = False
    features: tuple[str, ...] | None = None
    tables: Mapping[str, int] = dataclasses.field(default_factory=dict)
    outputs: tuple[str, ...] | None = None
    scaling: input_pipeline.Scaling | None = None
    vocabularies: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @property
    def known_task(self) -> Task | None:
        """The task, which decodes what the model returns."""
        return self.task and TASKS[self.task]

    def save(self, folder: str) -> None:
        """Writes it into a folder."""
        found = dataclasses.asdict(self)
        found["scaling"] = self.scaling and self.scaling.to_json()
        _write(os.path.join(folder, PREPROCESSING), found)

    @classmethod
    def load(cls, folder: str) -> Self:
        """Reads what `save` has written.

        Raises:
            ValueError: It is not there, or of another version.
        """
        path = os.path.join(folder, PREPROCESSING)
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            for name in ("range", "features", "outputs"):
                found[name] = found[name] and tuple(found[name])
            found["shape"] = _shapes(found["shape"])
            if "input_shape" in found["known"]:
                shapes = _shapes(found["known"]["input_shape"])
                found["known"]["input_shape"] = shapes
            if found["scaling"]:
                found["scaling"] = input_pipeline.Scaling.from_json(found["scaling"])
            return cls(**found)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Cannot read {path} ({error}); expected the model_dir of a run of "
                "this version of Towers, so train again."
            ) from error

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a table that the model is given: numbers first."""
        return (*(self.features or ()), *self.tables)

    @property
    def is_of_whole_pictures(self) -> bool:
        """Whether the model is given pictures of which nothing is cut off."""
        return self.input == "image" and self._recipe.window is None

    @property
    def _recipe(self):
        return recipes.find(self.recipe, training=False, size=self.shape[:2])

    def is_text(self, column: str) -> bool:
        """Whether a column of categories has texts, and not their numbers."""
        return column in self.vocabularies

    # What is given, in the graph.

    def pictures(self, encoded: tf.Tensor) -> tf.Tensor:
        """Decodes files of pictures, strings [B]; uint8 pixels [B, H, W, C]."""
        return tf.map_fn(
            tf.autograph.experimental.do_not_convert(self.picture),
            encoded,
            fn_output_signature=tf.TensorSpec(self.shape, tf.uint8),
        )

    def picture(self, encoded: tf.Tensor) -> tf.Tensor:
        """Decodes a file of a picture, as in evaluation; uint8 pixels [H, W, C]."""
        recipe = self._recipe
        window = recipe.window and (lambda shape: recipe.window(shape, None))
        tricks = ALL_TRICKS
        if self.same_size and window is None:
            tricks = dataclasses.replace(ALL_TRICKS, fast_dct=False)
        return decode_window(
            encoded, window, self.shape, antialias=recipe.antialias, tricks=tricks
        )

    def rows(self, numbers: tf.Tensor) -> tf.Tensor:
        """Makes what the model is given of rows of numbers, float [B, F]."""
        numbers = tf.cast(numbers, tf.float32)
        return numbers if self.scaling is None else self.scaling(numbers)

    def named(self, columns: Mapping[str, tf.Tensor]) -> Any:
        """Makes what the model is given of columns by their names.

        Args:
            columns: Numbers [B], and texts [B] of the categories; ids [B] of those
                whose ids stood in the data.
        """
        numbers = [tf.cast(columns[name], tf.float32) for name in self.features or ()]
        rows = self.rows(tf.stack(numbers, axis=1)) if numbers else None
        if self.input == "row":
            return rows
        ids = {
            name: self._ids[name](columns[name])
            if self.is_text(name)
            else tf.cast(columns[name], tf.int64)
            for name in self.tables
        }
        return categories.examples(rows, ids)

    @functools.cached_property
    def _ids(self):
        with tf.init_scope():
            return categories.finders(self.vocabularies)

    def texts(self, strings: tf.Tensor, tokenizer: text.Tokenizer) -> tf.Tensor:
        """Makes what the model is given of texts, strings [B] in UTF-8."""
        return text.pad_ids(tokenizer.encode(strings), *self.shape)


def of(job: Any) -> Preprocessing:
    """Returns what the model of a job is given, and what it tells."""
    setup, data, settings = job.setup, job.data, job.settings
    facts, task = setup.facts, setup.task
    own = not isinstance(data, Data)
    preprocess = setup.defines("preprocess")
    images = facts.input_kind == "image"
    named = facts.input_kind in ("row", "columns", "tokens")
    numbers = facts.target is not None and facts.target.kind == "numbers"
    return Preprocessing(
        task=task and task.name,
        from_logits=job.from_logits,
        input=OWN if own else facts.input_kind,
        shape=_shape(facts, data),
        model=str(setup.mine.path.absolute()) if setup.mine else None,
        preprocess=preprocess,
        known=setup.known if preprocess else {},
        dtype=keras.tree.map_structure(_dtype, facts.inputs) if own else None,
        range=(-1.0, 1.0) if images and not preprocess else None,
        recipe=settings.recipe if images else None,
        same_size=images and data.source.image_shape[:2] == data.image_shape[:2],
        features=tuple(data.source.image_fields) if named else None,
        tables=dict(facts.table_sizes or {}),
        outputs=facts.target.names if numbers else None,
        scaling=data.scaling,
        vocabularies=dict(data.vocabularies),
    )


def _dtype(tensor):
    return tensor.dtype


def _shape(facts, data):
    """Shape of an example; of columns, that of their numbers; of texts, the longest."""
    of_source = facts.input_kind in ("columns", "tokens")
    return tuple(data.source.image_shape) if of_source else facts.input_shape


def _shapes(found):
    """Shapes as they were before JSON made lists of them."""
    if isinstance(found, dict):
        return {name: _shapes(each) for name, each in found.items()}
    inner = found and any(isinstance(each, list | dict) for each in found)
    return tuple(map(_shapes, found)) if inner else tuple(found)


def write(job: Any) -> None:
    """Writes what those who use a run's model need to know, into its model_dir."""
    of(job).save(job.model_dir)
    _write(os.path.join(job.model_dir, ARCHITECTURE), json.loads(job.model.to_json()))
    target = job.setup.facts.target
    if target is not None and target.kind != "tokens" and target.kind != "numbers":
        names = target.names or map(str, range(target.size))
        _write(os.path.join(job.model_dir, CLASSES), [*names])
    tokenizer = getattr(getattr(job.data, "source", None), "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save(os.path.join(job.model_dir, TOKENIZER))


def read_classes(folder: str) -> list[str] | None:
    """Returns the names of the classes that a run knows, if it knows any."""
    try:
        with open(os.path.join(folder, CLASSES), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def check_range(
    images: np.ndarray | Sequence[Any], limits: tuple[float, float]
) -> None:
    """Checks that pictures of floats are in the range that a model was trained on.

    Raises:
        ValueError: They are not, such as 0 to 255 for a model of -1 to 1.
    """
    found = np.asarray(images)
    least, most = (float(each(found)) for each in (np.min, np.max))
    low, high = limits
    spare = (high - low) / 4
    if least < low - spare or most > high + spare:
        raise ValueError(
            f"Received pictures of {least:g} to {most:g}, but the model was trained on "
            f"{low:g} to {high:g}; expected uint8 pixels, which are scaled, or "
            "x / 127.5 - 1."
        )


def _write(path: str, content: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")

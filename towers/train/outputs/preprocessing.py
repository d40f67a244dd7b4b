"""Describes a trained model's inputs and outputs, as preprocessing.json has them.

`model.keras` is the user's own model; what it needs besides stands beside it. A scaling
layer within would make it another model than the one that was compared with one device.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import keras

from towers import input_pipeline
from towers.input_pipeline.images import recipes
from towers.lifecycle.checkpoints import store
from towers.program import small_file, voice, whole_file
from towers.train.parts.task import TASKS, Task
from towers.train.settings import ARCHITECTURE, PREPROCESSING

# What `input` is of examples that a file of the user's reads.
OWN = "own"
T = TypeVar("T")
FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""The errors of a file that is lost or damaged."""
# A run reads the file for its data, and again for its scaling.
_say_once = functools.cache(voice.say)
CLASSES, TOKENIZER = "classes.json", "tokenizer"


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """The inputs that a model gets for pictures, rows or texts, and its outputs.

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
        column_kinds: What stood in the columns of a table, by their names; see
            ``Source``. Of runs of before, nothing.
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
    column_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def known_task(self) -> Task | None:
        """The task, which decodes what the model returns."""
        return self.task and TASKS[self.task]

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        content = dataclasses.asdict(self)
        content["scaling"] = self.scaling and self.scaling.to_json()
        return content

    def save(self, folder: str) -> None:
        """Writes it into a folder."""
        whole_file.write_json(os.path.join(folder, PREPROCESSING), self.to_json())

    @classmethod
    def load(cls, folder: str) -> Self:
        """Reads the file of a folder, or a checkpoint's copy if the file is lost.

        Raises:
            ValueError: There is none, or it is of another version.
        """
        try:
            return read(folder, cls._from_json)
        except FAULTS as error:
            path = os.path.join(folder, PREPROCESSING)
            raise ValueError(
                f"Cannot read {path} ({error}); expected the model_dir of a run of "
                "this version of Towers, so train again."
            ) from error

    @classmethod
    def _from_json(cls, found: dict[str, Any]) -> Self:
        for name in ("range", "features", "outputs"):
            found[name] = found[name] and tuple(found[name])
        found["shape"] = _shapes(found["shape"])
        if "input_shape" in found["known"]:
            shapes = _shapes(found["known"]["input_shape"])
            found["known"]["input_shape"] = shapes
        if found["scaling"]:
            found["scaling"] = input_pipeline.Scaling.from_json(found["scaling"])
        if found["task"] not in (None, *TASKS):
            raise ValueError(f"task is {found['task']!r}")
        return cls(**found)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a table that the model is given: numbers first."""
        return (*(self.features or ()), *self.tables)

    @property
    def is_of_whole_pictures(self) -> bool:
        """Tells whether the model is given pictures of which nothing is cut off."""
        return self.input == "image" and self.evaluation_recipe.window is None

    @property
    def evaluation_recipe(self) -> recipes.Recipe:
        """How pictures are cut in evaluation."""
        return recipes.find(self.recipe, training=False, size=self.shape[:2])

    def is_text(self, column: str) -> bool:
        """Tells whether a column of categories has texts, and not their numbers."""
        return column in self.vocabularies


def _shapes(found):
    """Makes tuples of shapes, of which JSON has made lists."""
    if isinstance(found, dict):
        return {name: _shapes(each) for name, each in found.items()}
    inner = found and any(isinstance(each, list | dict) for each in found)
    return tuple(map(_shapes, found)) if inner else tuple(found)


def read(model_dir: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Reads the file, or a checkpoint's copy if the file is lost or damaged.

    Nothing is written, because a reader has no lock of the folder. A run that trains
    there writes the file anew.

    Args:
        model_dir: The folder of the run.
        parse: Makes a value of what the file has.

    Returns:
        The value that `parse` returns.

    Raises:
        FAULTS: The file is lost or damaged, and no checkpoint has a copy.
    """
    path = os.path.join(model_dir, PREPROCESSING)
    try:
        return parse(small_file.read_json(path, dict))
    except FAULTS as error:
        fault = error
    for checkpoint in store.find(os.path.join(model_dir, "checkpoints")):
        try:
            # Each call reads a copy of its own, which `parse` may change.
            value = parse(store.load_about(checkpoint)["preprocessing"])
        except FAULTS:
            continue
        reason = "is lost" if isinstance(fault, FileNotFoundError) else "is damaged"
        _say_once(
            f"{path} {reason}; the copy in {checkpoint} is read, and a run that trains "
            "there writes the file anew."
        )
        return value
    raise fault


def write_model_files(job: Any) -> None:
    """Writes preprocessing.json, model.json, classes.json and the tokenizer's folder.

    model.json describes the model's layers, as Keras does. Only a model of classes gets
    classes.json, and only one of texts gets a tokenizer.
    """
    preprocessing = _preprocessing(job)
    preprocessing.save(job.model_dir)
    # Each checkpoint has a copy: the numbers of scaling stand nowhere else.
    job.checkpoint.run.preprocessing = preprocessing.to_json()
    model = json.loads(job.model.to_json())
    whole_file.write_json(os.path.join(job.model_dir, ARCHITECTURE), model)
    target = job.setup.facts.target
    if target is not None and target.kind != "tokens" and target.kind != "numbers":
        names = target.names or map(str, range(target.size))
        whole_file.write_json(os.path.join(job.model_dir, CLASSES), [*names])
    tokenizer = getattr(getattr(job.data, "source", None), "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save(os.path.join(job.model_dir, TOKENIZER))


def read_classes(folder: str) -> list[str] | None:
    """Returns the names of the classes that a run knows, if it knows any.

    Raises:
        ValueError: The file has something else.
    """
    path = os.path.join(folder, CLASSES)
    try:
        names = small_file.read_json(path, list)
        if not all(isinstance(name, str) for name in names):
            raise small_file.FileError("it holds something that is no name")
        return names
    except FileNotFoundError:
        return None
    except small_file.FileError as error:
        raise ValueError(
            f"Cannot read {path} ({error}); expected the names of classes as the run "
            "wrote them, so copy the file again, or train again."
        ) from error


def _preprocessing(job):
    setup, data, settings = job.setup, job.data, job.settings
    facts, task = setup.facts, setup.task
    own = facts.input_kind == OWN
    preprocess = setup.defines("preprocess")
    images = facts.input_kind == "image"
    named = facts.input_kind in ("row", "columns", "tokens")
    numbers = facts.target is not None and facts.target.kind == "numbers"
    return Preprocessing(
        task=task and task.name,
        from_logits=job.from_logits,
        input=facts.input_kind,
        shape=_example_shape(facts, data),
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
        column_kinds=dict(data.source.column_kinds) if named else {},
    )


def _dtype(tensor):
    return tensor.dtype


def _example_shape(facts, data):
    """Shape of an example; of columns, that of their numbers; of texts, the longest."""
    of_source = facts.input_kind in ("row", "columns", "tokens")
    return tuple(data.source.image_shape) if of_source else facts.input_shape

"""Writes the files with which others can use a run's model, as the run begins."""

import json
import os
from typing import Any

import keras

from towers.program import small_file, whole_file
from towers.train.outputs.preprocessing import OWN, Preprocessing
from towers.train.parts.data import Data
from towers.train.settings import ARCHITECTURE

CLASSES, TOKENIZER = "classes.json", "tokenizer"


def write(job: Any) -> None:
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
        column_kinds=dict(data.source.column_kinds) if named else {},
    )


def _dtype(tensor):
    return tensor.dtype


def _shape(facts, data):
    """Shape of an example; of columns, that of their numbers; of texts, the longest."""
    of_source = facts.input_kind in ("row", "columns", "tokens")
    return tuple(data.source.image_shape) if of_source else facts.input_shape

"""The flags of towers.train that name files, made valid in any folder."""

import os

from towers.elastic import notice
from towers.input_pipeline import specs
from towers.input_pipeline.choices import FILE_KINDS
from towers.models import spec

_FILES = ("model_dir", "data_dir", "cache_dir", "local_store", "init_weights")


def with_absolute_path(name: str, value: str) -> str | None:
    """Returns the value of a flag that names a file; `None` of any other flag."""
    if name == "init_weights" and value == "imagenet":
        return None
    if name in _FILES and value:
        return _absolute(os.path.expanduser(value))
    if name == "preemption_notice" and value not in notice.CLOUDS:
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
    return None


def _absolute(path: str) -> str:
    remote = "://" in path
    return path if remote else os.path.abspath(path)

"""The user's own settings of Keras, which other projects may need otherwise.

They are in the environment and in keras.json. Programs do as their flags say, and tell
what they ignore. In Python they are the user's, but for the backend, which must be
TensorFlow.
"""

import json
import os
import sys
from typing import Any

from towers.program import small_file

# What programs work with, and what else Keras knows.
_OURS = {
    "floatx": ("float32", ("float16", "float64")),
    "image_data_format": ("channels_last", ("channels_first",)),
}
# They would end training early, without a word.
_LIMITS = "KERAS_MAX_EPOCHS", "KERAS_MAX_STEPS_PER_EPOCH"


def ignored() -> list[str]:
    """Says which of the user's settings programs ignore, a sentence each.

    Raises:
        ValueError: Keras could not be imported with this keras.json.
    """
    path, settings = _read()
    said = []
    backend, where = _backend(path, settings)
    if backend != "tensorflow":
        said.append(f"{where} is ignored: Towers trains with Keras on TensorFlow.")
    for name in _LIMITS:
        if name in os.environ:
            value = os.environ[name]
            said.append(f"{name}={value} is ignored: flags say how long to train.")
    for name, (ours, _) in _OURS.items():
        if (value := settings.get(name, ours)) != ours:
            said.append(f'"{name}": "{value}" in {path} is ignored for "{ours}".')
    return said


def override() -> None:
    """Has Keras work as programs expect, whatever the user's settings are.

    To be called before the import of TensorFlow, which imports Keras.

    Raises:
        ValueError: Keras could not be imported with this keras.json.
    """
    _, settings = _read()
    os.environ["KERAS_BACKEND"] = "tensorflow"
    for name in _LIMITS:
        os.environ.pop(name, None)
    if any(settings.get(name, ours) != ours for name, (ours, _) in _OURS.items()):
        from keras import config

        for name, (ours, _) in _OURS.items():
            getattr(config, f"set_{name}")(ours)


def check_backend() -> None:
    """Checks that Keras computes by TensorFlow, or will once it is imported.

    Raises:
        ImportError: It does not.
    """
    if "keras" in sys.modules:
        config = getattr(sys.modules["keras"], "config", None)
        backend = config.backend() if config else "tensorflow"
        where = f"Keras was imported with the backend {backend}"
        _, found = _backend(*_read())
        if found:
            where += f" ({found})"
    else:
        backend, found = _backend(*_read())
        where = f"Received {found}"
    if backend != "tensorflow":
        raise ImportError(
            f"{where}; Towers trains with Keras on TensorFlow, so set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )


def _backend(path: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Returns Keras's backend, and where that is set; empty if it is not."""
    if value := os.environ.get("KERAS_BACKEND"):
        return value, f"KERAS_BACKEND={value}"
    if "backend" in settings:
        value = settings["backend"]
        return value, f'"backend": "{value}" in {path}'
    return "tensorflow", ""


def _read() -> tuple[str, dict[str, Any]]:
    """Reads keras.json, where Keras does.

    Raises:
        ValueError: A value is none that Keras knows.
    """
    home = os.environ.get("KERAS_HOME")
    if home is None:
        user = os.path.expanduser("~")
        home = os.path.join(user if os.access(user, os.W_OK) else "/tmp", ".keras")
    path = os.path.expanduser(os.path.join(home, "keras.json"))
    try:
        settings = small_file.read_json(path)
    except (FileNotFoundError, small_file.FileError):
        return path, {}  # as Keras takes it
    if not isinstance(settings, dict):
        raise ValueError(
            f"{path} holds {settings!r}; expected Keras's settings, such as "
            '{"backend": "tensorflow"}, so correct it or remove it.'
        )
    for name, (ours, others) in _OURS.items():
        if (value := settings.get(name, ours)) not in (ours, *others):
            raise ValueError(
                f'Received "{name}": {json.dumps(value)} in {path}; expected '
                f"{' or '.join((ours, *others))}, so correct it or remove the file."
            )
    if not isinstance(epsilon := settings.get("epsilon", 1e-7), float):
        raise ValueError(
            f'Received "epsilon": {json.dumps(epsilon)} in {path}; expected a number '
            "such as 1e-07, so correct it or remove the file."
        )
    return path, settings

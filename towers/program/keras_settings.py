"""Reads the user's settings of Keras, which other projects may need to differ.

Settings are in the environment and in keras.json. Programs follow their flags instead,
and report the settings they ignore. In Python the settings apply, except for the
backend, which must be TensorFlow.
"""

import json
import os
import sys
from typing import Any

from towers.program import small_file

# The values that programs use, and other values that Keras knows.
_OURS = {
    "floatx": ("float32", ("float16", "float64")),
    "image_data_format": ("channels_last", ("channels_first",)),
}
# These would end training early, without a message.
_LIMITS = "KERAS_MAX_EPOCHS", "KERAS_MAX_STEPS_PER_EPOCH"


def ignored() -> list[str]:
    """Returns a sentence for each of the user's settings that programs ignore.

    Raises:
        ValueError: Keras could not be imported with this keras.json.
    """
    path, settings = _read()
    notes = []
    backend, where = _backend(path, settings)
    if backend != "tensorflow":
        notes.append(f"{where} is ignored: Towers trains with Keras on TensorFlow.")
    for name in _LIMITS:
        if name in os.environ:
            value = os.environ[name]
            notes.append(f"{name}={value} is ignored: flags say how long to train.")
    for name, (used, _) in _OURS.items():
        if (value := settings.get(name, used)) != used:
            notes.append(f'"{name}": "{value}" in {path} is ignored for "{used}".')
    return notes


def override() -> None:
    """Sets Keras up as programs expect, whatever the user's settings are.

    Call it before TensorFlow is imported, which imports Keras.

    Raises:
        ValueError: Keras could not be imported with this keras.json.
    """
    _, settings = _read()
    os.environ["KERAS_BACKEND"] = "tensorflow"
    for name in _LIMITS:
        os.environ.pop(name, None)
    if any(settings.get(name, used) != used for name, (used, _) in _OURS.items()):
        from keras import config

        for name, (used, _) in _OURS.items():
            getattr(config, f"set_{name}")(used)


def check_backend() -> None:
    """Checks that Keras uses TensorFlow, or will use it once it is imported.

    Raises:
        ImportError: Keras uses another backend.
    """
    if "keras" in sys.modules:
        config = getattr(sys.modules["keras"], "config", None)
        backend = config.backend() if config else "tensorflow"
        where = f"Keras was imported with the backend {backend}"
        _, setting = _backend(*_read())
        if setting:
            where += f" ({setting})"
    else:
        backend, setting = _backend(*_read())
        where = f"Received {setting}"
    if backend != "tensorflow":
        raise ImportError(
            f"{where}; Towers trains with Keras on TensorFlow, so set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )


def _backend(path: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Returns Keras's backend, and the setting that selects it; "" without one."""
    if value := os.environ.get("KERAS_BACKEND"):
        return value, f"KERAS_BACKEND={value}"
    if "backend" in settings:
        value = settings["backend"]
        return value, f'"backend": "{value}" in {path}'
    return "tensorflow", ""


def _read() -> tuple[str, dict[str, Any]]:
    """Reads keras.json from the same path as Keras.

    Raises:
        ValueError: Keras does not know a value.
    """
    home = os.environ.get("KERAS_HOME")
    if home is None:
        user = os.path.expanduser("~")
        home = os.path.join(user if os.access(user, os.W_OK) else "/tmp", ".keras")
    path = os.path.expanduser(os.path.join(home, "keras.json"))
    try:
        settings = small_file.read_json(path)
    except (FileNotFoundError, small_file.FileError):
        return path, {}  # Keras does the same.
    if not isinstance(settings, dict):
        raise ValueError(
            f"{path} holds {settings!r}; expected Keras's settings, such as "
            '{"backend": "tensorflow"}, so correct it or remove it.'
        )
    for name, (used, others) in _OURS.items():
        if (value := settings.get(name, used)) not in (used, *others):
            raise ValueError(
                f'Received "{name}": {json.dumps(value)} in {path}; expected '
                f"{' or '.join((used, *others))}, so correct it or remove the file."
            )
    if not isinstance(epsilon := settings.get("epsilon", 1e-7), float):
        raise ValueError(
            f'Received "epsilon": {json.dumps(epsilon)} in {path}; expected a number '
            "such as 1e-07, so correct it or remove the file."
        )
    return path, settings

"""The user's own settings of Keras."""

from towers.doctor.finding import Finding, note, ok, wrong
from towers.program import keras_settings


def keras() -> Finding:
    """Checks Keras's settings in the environment and in keras.json."""
    try:
        found = keras_settings.ignored()
    except ValueError as error:
        return wrong(str(error))
    if not found:
        return ok("as Towers needs them")
    in_python = "; in Python, set KERAS_BACKEND=tensorflow before Keras is imported"
    hint = in_python if any("on TensorFlow" in each for each in found) else ""
    return note(f"{' '.join(found).rstrip('.')}{hint}", ignored=found)

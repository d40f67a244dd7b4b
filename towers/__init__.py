"""Multi-tower training for Keras on TensorFlow: as on one big device.

The door for Python users is `multi_gpu_model`, with `configure` before it to choose the
devices; `check_parity` shows that nothing else changes. For the command line there are
`towers.train`, `towers.parity`, `towers.doctor`, `towers.find_batch_size` and
`towers.report`.
"""

from towers import _start as _start

# isort: split

from importlib import metadata

from towers.keras_adapter import versions
from towers.program import keras_settings, lazy, startup

# TensorFlow takes seconds to import, and programs have things to do before it: what
# __init__.pyi lists is imported when it is asked for.
_find, __dir__, __all__ = lazy.attach(__name__, __file__)


def __getattr__(name):
    if name == "__version__":
        try:
            return metadata.version("keras-towers")
        except metadata.PackageNotFoundError as error:
            raise AttributeError(f"{error}, so it has no {name}") from error
    # Not for a program's own modules: it chooses the backend.
    if name in __all__:
        keras_settings.check_backend()
        versions.warn()
        with startup.quiet_import():
            return _find(name)
    return _find(name)

"""Multi-tower training for Keras on TensorFlow: as on one big device.

The door for Python users is `multi_gpu_model`, with `configure` before it to choose the
devices; `check_parity` shows that nothing else changes. For the command line there are
`towers.train`, `towers.parity`, `towers.doctor`, `towers.find_batch_size` and
`towers.report`.
"""

from typing import TYPE_CHECKING

from towers import lazy

if TYPE_CHECKING:
    from towers import callbacks, numerics
    from towers.devices import configure
    from towers.model import TowerModel, multi_gpu_model
    from towers.parity import Parity, check_parity

__all__ = [
    "Parity",
    "TowerModel",
    "callbacks",
    "check_parity",
    "configure",
    "multi_gpu_model",
    "numerics",
]

# TensorFlow takes seconds to import, and programs have things to do before it.
__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "Parity": "towers.parity",
        "TowerModel": "towers.model",
        "callbacks": "towers.callbacks",
        "check_parity": "towers.parity",
        "configure": "towers.devices",
        "multi_gpu_model": "towers.model",
        "numerics": "towers.numerics",
    },
)

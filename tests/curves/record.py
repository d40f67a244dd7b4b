"""Writes the losses of the ten models as plain Keras gives them on one device.

    python -m tests.curves.record

Only for models that are new or changed: the file is what later versions are held to.
"""

import json
import pathlib

from tests.curves.models import MODELS, losses

FILE = pathlib.Path(__file__).parent / "losses.json"


def main() -> None:
    """Trains each model on one device."""
    curves = {name: losses(curve) for name, curve in MODELS.items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(curves[name])}" for name in curves]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

"""Prints TOWERS_WARM of the environment."""

import os

print(os.environ.get("TOWERS_WARM"))

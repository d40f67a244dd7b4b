"""The error of runs that cannot share places."""


class RegistryError(ValueError):
    """Runs cannot share places in this way."""

"""What goes wrong where runs share places."""


class RegistryError(ValueError):
    """Runs cannot share places so."""

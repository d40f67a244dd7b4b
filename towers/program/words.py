"""Numbers with their nouns, as sentences have them."""


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Says how many there are, such as "1 epoch" or "1,437 examples".

    Args:
        number: How many.
        noun: Of what, for one.
        plural: The same for more; by default with an "s".
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def size(number: float) -> str:
    """Says how many bytes that is, such as "12.5 KB" or "1,024.0 MB"."""
    if number < 2**10:
        return count(int(number), "byte")
    if number < 2**20:
        return f"{number / 2**10:,.1f} KB"
    return f"{number / 2**20:,.1f} MB"

"""Ways to damage a file of a cache."""


def _flipped(content):
    """Of one bit, near the end."""
    return content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]


DAMAGES = (_flipped, lambda content: content[: len(content) // 2])

"""Shortens the programs of pages."""

import ast

# Callbacks of pages do something in the third epoch.
EPOCHS = 3


def shorten(code: str) -> str:
    """Returns a program whose calls of `fit` train for at most three epochs.

    Only `epochs=NUMBER` in such calls is changed, and every line stays where it is.
    """
    lines = [line.encode() for line in code.splitlines(keepends=True)]
    # From the end, as the figures differ in length.
    for number in reversed([*_epochs(code)]):
        line = lines[number.lineno - 1]
        start, end = number.col_offset, number.end_col_offset
        lines[number.lineno - 1] = line[:start] + b"%d" % EPOCHS + line[end:]
    return b"".join(lines).decode()


def _epochs(code):
    """Yields the numbers to change, in the order of the text."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    numbers = [
        keyword.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "fit"
        for keyword in call.keywords
        if keyword.arg == "epochs" and isinstance(keyword.value, ast.Constant)
    ]
    many = (number for number in numbers if number.value > EPOCHS)
    return sorted(many, key=lambda number: (number.lineno, number.col_offset))

"""docs/exactness.md: which losses and metrics are gathered."""

import pathlib
import re

from tests.towers.analysis import losses, metrics

PAGE = pathlib.Path(__file__).parents[3] / "docs/exactness.md"


def _gathered(rows, outcomes):
    """Losses or metrics as the page names them: by the axis, if one is given."""
    found = set()
    for row in rows:
        if any(outcome.startswith("gathered") for outcome in outcomes(row)):
            axis = re.search(r"axis=(\(.*?\)|[^,]+)", row.arguments)
            found.add(f"{row.kind}({axis[0]})" if axis else row.kind)
    return found


def test_the_page_names_what_is_gathered():
    _, _, section = PAGE.read_text().partition("### What is gathered, and why")
    _, of_losses, of_metrics = re.split(r"\| (?:loss|metric) \|", section)
    for text, expected in [
        (of_losses, _gathered(losses.table(), lambda row: row.outcomes)),
        (of_metrics, _gathered(metrics.table(), lambda row: [row.outcome])),
    ]:
        rows = re.findall(r"^\| (`.*?) \| \S.*\|$", text, re.MULTILINE)
        found = re.findall(r"`([A-Z]\w+(?:\(.*?\)+)?)`", " ".join(rows))
        assert expected and sorted(found) == sorted(expected)

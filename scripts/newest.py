"""Runs tests, and if one fails, names the private names that changed.

    python -m scripts.newest python -m pytest tests/towers/keras_adapter

`make test-newest` runs it with the newest release candidates and nightly builds of
TensorFlow and Keras. If a test fails, the end of the output names what Towers uses of
their private names and is no longer as tests/towers/keras_adapter has it.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

# A file that cannot be imported does not keep the others from running.
FLAGS = ["--continue-on-collection-errors"]
# A contract of tests/towers/keras_adapter, and what Python says of a name that is gone.
_CONTRACT = re.compile(r"test_contract\[(?P<name>.+)\]")
_GONE = (
    re.compile(
        r"cannot import name '(?P<name>\w+)' from "
        r"'(?P<owner>(?:keras|tensorflow)[\w.]*)'"
    ),
    re.compile(r"No module named '(?P<name>(?:keras|tensorflow)\.[\w.]+)'"),
    re.compile(
        r"module '(?P<owner>(?:keras|tensorflow)[\w.]*)' has no attribute "
        r"'(?P<name>\w+)'"
    ),
)


def main(command: Sequence[str]) -> int:
    """Runs pytest by a command; returns its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results.xml"
        done = subprocess.run([*command, *FLAGS, f"--junitxml={results}"])
        if done.returncode and results.exists():
            print(report(results))
    return done.returncode


def report(results: pathlib.Path) -> str:
    """Returns the private names that changed, and the tests that failed.

    Args:
        results: The tests' results, in the XML of JUnit, as pytest writes it.
    """
    failed = [*_failed(ElementTree.parse(results).getroot())]
    names = sorted({name for test, text in failed for name in _names(test, text)})
    tests = sorted({test for test, _ in failed})
    lines = ["Private names that changed, as far as the tests tell:"]
    lines += [f"  {name}" for name in names] or ["  none"]
    return "\n".join([*lines, "Tests that failed:", *(f"  {test}" for test in tests)])


def _failed(root: ElementTree.Element) -> Iterator[tuple[str, str]]:
    """Yields each failed test, and what pytest says of its failure."""
    for case in root.iter("testcase"):
        for outcome in (*case.findall("failure"), *case.findall("error")):
            test = f"{case.get('classname')}::{case.get('name')}"
            yield test, f"{outcome.get('message')}\n{outcome.text}"


def _names(test: str, text: str) -> Iterator[str]:
    if contract := _CONTRACT.search(test):
        yield contract["name"]
    for gone in _GONE:
        for match in gone.finditer(text):
            groups = match.groupdict()
            owner = f"{groups['owner']}." if groups.get("owner") else ""
            yield f"{owner}{match['name']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

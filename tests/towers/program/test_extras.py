"""towers.program.extras: what to run for an optional part of Towers."""

import importlib.metadata

import pytest

from towers.program.extras import install_command


@pytest.mark.parametrize(
    ("extra", "package"),
    [
        ("array_record", "array-record"),
        ("gpu", "tensorflow[and-cuda]"),
        ("plots", "matplotlib"),
        ("ray", "ray[default,train]"),
        ("report", "jinja2"),
        ("text", "tensorflow-text"),
    ],
)
def test_the_command_names_the_packages(extra, package):
    command = install_command(extra)
    assert command.startswith("pip install ") and f"'{package}" in command
    assert "keras-towers" not in command


def test_a_checkout_that_is_only_on_the_path(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert "pip install '.[text]'" in install_command("text")

"""The versions that Towers says it works with are those that it is tested with."""

import re
import warnings
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import towers
from tests import warm
from towers.keras_adapter import versions

ROOT = Path(__file__).parents[1]
SETUP = (ROOT / "setup.py").read_text()


@pytest.fixture
def keras(monkeypatch):
    """Has another version of Keras be installed, as far as can be asked."""
    monkeypatch.setattr(versions, "_said", set())

    def install(version):
        real = metadata.version
        asked = lambda name: version if name == "keras" else real(name)  # noqa: E731
        monkeypatch.setattr(versions.metadata, "version", asked)

    return install


@pytest.mark.parametrize("version", ["3.10.0", "3.15.99", "3.15.0.dev2026", "unknown"])
def test_tested_versions_are_not_mentioned(keras, version):
    keras(version)
    assert versions.newer_than_tested("keras") is None


@pytest.mark.parametrize("version", ["3.16.0", "3.16.0rc1", "4.0"])
def test_a_newer_version_is_a_warning_once(keras, version):
    keras(version)
    expected = (
        f"keras {version} is newer than 3.15, the newest that Towers is tested with; "
        "if anything goes wrong, install 'keras<3.16'."
    )
    with pytest.warns(UserWarning, match=re.escape(expected)):
        versions.warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn()


# What is installed, which version counts, and whether files are mixed.
PACKAGES = [
    ({"keras": "3.16.0"}, "3.16.0", False),
    ({"keras-nightly": "3.17.0.dev1"}, "3.17.0.dev1", False),
    ({"keras": "3.15.1", "keras-nightly": "3.16.0.dev1"}, "3.15.1", True),
    ({}, None, False),
]


@pytest.mark.parametrize(("installed", "version", "mixed"), PACKAGES)
def test_packages_of_keras(monkeypatch, installed, version, mixed):
    def asked(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions.metadata, "version", asked)
    monkeypatch.setattr(versions, "_said", set())
    assert versions.installed("keras") == version
    newer = (
        "keras-nightly 3.17.0.dev1 is newer than 3.15, the newest that Towers is "
        "tested with; if anything goes wrong, uninstall keras-nightly, and install "
        "'keras<3.16'."
    )
    assert (newer in versions.notes()) == (version == "3.17.0.dev1")
    versions._said.clear()
    both = (
        "keras 3.15.1 and keras-nightly 3.16.0.dev1 are both installed, and overwrite "
        "each other's files; run: pip uninstall -y keras keras-nightly, then install "
        "one of them."
    )
    assert versions.mixed("keras") == (both if mixed else None)
    assert (both in versions.notes()) == mixed


def test_what_is_not_installed_is_not_mentioned(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", absent)
    assert versions.newer_than_tested("keras") is None
    assert not hasattr(towers, "__version__")


def test_towers_knows_its_own():
    assert f'version="{towers.__version__}",' in SETUP


def test_python_and_programs_warn_of_a_newer_version(tmp_path):
    # Found before the real one.
    folder = tmp_path / "keras-9.9.9.dist-info"
    folder.mkdir()
    lines = "Metadata-Version: 2.1", "Name: keras", "Version: 9.9.9"
    (folder / "METADATA").write_text("\n".join(lines))
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"

    def said(code):
        done = warm.run("tests.program", f"{path}; {code}")
        assert done.returncode == 0, done.stderr
        return done.stderr

    newer = "keras 9.9.9 is newer than 3.15"
    shown = said("import towers; print(towers.configure)")
    assert f"<string>:1: UserWarning: {newer}" in shown
    begin = "from towers.program import startup; startup.begin('towers.x')"
    shown = said(f"{begin}; import towers; print(towers.multi_gpu_model)")
    assert f"towers.x: Note: {newer}" in shown
    assert shown.count(newer) == 1


def test_what_is_developed_with_is_the_newest():
    """The environment of `make test` has what users are told is tested."""
    asked = re.findall(r'"((?:tensorflow|keras)<[\d.]+)"', SETUP)
    expected = {f"{k}<{a}.{b + 1}" for k, (a, b) in versions.NEWEST.items()}
    assert {*asked} == expected


def test_the_oldest_of_each_is_tested():
    makefile = (ROOT / "Makefile").read_text()
    (oldest,) = re.findall(r"^OLDEST := (.*)$", makefile, re.M)
    pins = {name: text for name, text in re.findall(r"'(\w+)==([\d.]+)\.\*'", oldest)}
    asked = re.search(r'^TENSORFLOW = "(.*)"', SETUP, re.M)[1]
    for text in (f"tensorflow{asked}", re.search(r'"(keras>=.*)"', SETUP)[1]):
        requirement = Requirement(text)
        lower = [s.version for s in requirement.specifier if s.operator == ">="]
        assert lower == [pins[requirement.name]]


def test_the_page_of_versions_names_them():
    page = (ROOT / "docs/reference/versions.md").read_text()
    for name, (major, minor) in versions.NEWEST.items():
        assert re.search(rf"(?i){name} \| \S+ to {major}\.{minor}\b", page)

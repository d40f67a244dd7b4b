"""Whatever bears the name of a small file of ours ends in one sentence."""

import os
import socket

import pytest

from towers.program import small_file

DEEP = {
    "lists": "[" * 100_000 + "]" * 100_000,
    "not closed": "[" * 100_000,
    # Python's parser takes this, and functions of Python's that descend do not.
    "objects": '{"a":' * 900 + "1" + "}" * 900,
}


def fifo(path):
    os.mkfifo(path)


def unix_socket(path):
    # The name of a socket may have 100 characters only.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


ODD = {
    "FIFO": (fifo, "it is no regular file"),
    "socket": (unix_socket, "No such device or address"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
    "folder": (lambda path: path.mkdir(), "it is no regular file"),
    "loop of links": (
        lambda path: path.symlink_to(path),
        "Too many levels of symbolic links",
    ),
    "too large": (
        lambda path: path.write_bytes(b"1" * 101),
        "it has more than 100 bytes",
    ),
    "not UTF-8": (lambda path: path.write_bytes(b'"\xfc"'), "it is not UTF-8"),
    "no JSON": (lambda path: path.write_text("{"), "it is no JSON"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_a_file_of_ours_is_a_sentence(tmp_path, kind):
    make, said = ODD[kind]
    path = tmp_path / "summary.json"
    make(path)
    with pytest.raises(small_file.FileError, match=f"^{said}"):
        small_file.read_json(path, most_bytes=100)


@pytest.mark.parametrize("kind", DEEP)
def test_deep_json_is_a_sentence(tmp_path, kind):
    path = tmp_path / "summary.json"
    path.write_text(DEEP[kind])
    with pytest.raises(small_file.FileError, match=r"^it is nested too deeply$"):
        small_file.read_json(path)


def test_json_of_another_kind_is_a_sentence(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("[]")
    with pytest.raises(small_file.FileError, match=r"^it holds no object$"):
        small_file.read_json(path, dict)
    assert small_file.read_json(path, list) == []


def test_what_is_not_there_is_told_from_what_is_bad(tmp_path):
    with pytest.raises(FileNotFoundError):
        small_file.read_text(tmp_path / "summary.json")


def test_links_are_followed(tmp_path):
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "summary.json").symlink_to("blob")
    assert small_file.read_json(tmp_path / "summary.json", dict) == {}

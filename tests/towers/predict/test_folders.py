"""Training, conversion and prediction choose the same files of a folder."""

import os

import pytest
from PIL import Image

from tests.towers.predict.runs import finished, predicted
from towers.input_pipeline import open_source
from towers.input_pipeline.convert.conversion import convert
from towers.predict import inputs

# How Pillow calls a format, and whether files of this name are read.
_NAMES = {
    "a.jpg": ("JPEG", True),
    "b.JPEG": ("JPEG", True),
    "c.jpe": ("JPEG", True),
    "d.jfif": ("JPEG", True),
    "e.png": ("PNG", True),
    "f.gif": ("GIF", True),
    "g.webp": ("WEBP", True),
    "h.bmp": ("BMP", True),
    "i.BMP": ("BMP", True),
    "j": ("PNG", True),
    "k.scan": ("JPEG", True),
    "l.tiff": ("TIFF", False),
    "m.tif": ("TIFF", False),
    "n.jp2": ("JPEG2000", False),
    "o.txt": (None, False),
    "Thumbs.db": (None, False),
    ".DS_Store": (None, False),
    "._a.jpg": (None, False),
    ".p.jpg": ("JPEG", False),
    ".hidden/q.jpg": ("JPEG", False),
}
_READ = sorted(name for name, (_, is_read) in _NAMES.items() if is_read)
_SAID = (
    "5 files left out: 1 .jp2, 1 .tif, 1 .tiff, 1 .txt, 1 hidden .jpg; files are read "
    "if they are JPEG, PNG, GIF, BMP or WebP."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of one class, which has a file of each name."""
    root = tmp_path_factory.mktemp("names") / "data"
    (root / "one" / ".hidden").mkdir(parents=True)
    (root / ".class").mkdir()
    for k, (name, (kind, _)) in enumerate(_NAMES.items()):
        with open(root / "one" / name, "wb") as file:
            if kind is None:
                file.write(b"no picture")
            else:
                Image.new("RGB", (8, 6), (k, k, k)).save(file, kind)
    return root


def test_training_reads_them(folder):
    source = open_source(f"folder:{folder}", eval_fraction=0)
    assert source.class_names == ("one",)
    assert [*map(os.path.basename, source.files("train"))] == _READ
    assert source.notes == (_SAID,)


def test_conversion_writes_them(folder, tmp_path):
    source = open_source(f"folder:{folder}", eval_fraction=0)
    info = convert(source, str(tmp_path / "records"), shards=1)
    assert info["splits"]["train"]["examples"] == len(_READ)
    assert source.notes == (_SAID,)


@pytest.mark.slow
@pytest.mark.parametrize("below", ["", "one"])
def test_prediction_reads_them(folder, tmp_path, capsys, below):
    flags = f"--dataset=folder:{folder}", "--eval_fraction=0", "--image_size=8"
    finished(*flags, "--recipe=imagenet", "--model=mlp", model_dir=tmp_path)
    capsys.readouterr()
    rows = predicted(tmp_path, folder / below)
    assert [os.path.basename(row["file"]) for row in rows] == _READ
    out, err = capsys.readouterr()
    assert f"{len(_READ)} predictions" in out
    assert err.count(f"towers: {_SAID}\n") == 1


@pytest.mark.slow
def test_what_is_ignored_of_a_new_picture_is_said_once(folder, tmp_path, capsys):
    flags = f"--dataset=folder:{folder}", "--eval_fraction=0", "--image_size=8"
    (tmp_path / "run").mkdir()
    finished(*flags, "--model=mlp", model_dir=tmp_path / "run")
    exif = Image.Exif()
    exif[0x112] = 6
    names = [str(tmp_path / f"{k}.jpg") for k in range(2)]
    for name in names:
        Image.new("RGB", (8, 6)).save(name, exif=exif)
    capsys.readouterr()
    assert len(predicted(tmp_path / "run", *names)) == 2
    assert capsys.readouterr().err.count("the EXIF orientation of ") == 1


def test_folders_of_texts(tmp_path, capsys):
    for name in "b.TXT", "a/1.txt", "c.md", ".d.txt", ".git/e.txt", "._f.txt":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "again").symlink_to(tmp_path)
    found = inputs.inside([str(tmp_path), "g.md"], texts=True)
    assert found == [f"{tmp_path}/b.TXT", f"{tmp_path}/a/1.txt", "g.md"]
    assert capsys.readouterr().err == (
        "towers: 1 file left out: 1 .md; files are read if they are .txt files.\n"
        f"towers: 1 folder left out, such as {tmp_path}/again.\n"
    )

"""Which files of class folders are read, and that nothing is left out silently."""

import math
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.towers.train.runs import write_tfrecord
from towers.input_pipeline import make_dataset, open_source
from towers.input_pipeline.sources import base
from towers.input_pipeline.sources.folder import pictures
from towers.program import progress

READ = ("a.jpg", "b.JPEG", "c.png", "d.gif", "e.bmp", "f.webp", "g.jfif")


def _save(path, image_format=None, mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full([6, 8, 3], (200, 100, 50), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, image_format, **options)


def test_every_kind_that_tensorflow_decodes_is_read(tmp_path):
    for name in READ:
        kind = "JPEG" if name.endswith("jfif") else None
        _save(tmp_path / "cat" / name, kind, **({"quality": 95} if kind else {}))
    frames = [Image.new("RGB", (8, 6), (0, 0, k)) for k in (9, 99)]
    options = {"save_all": True, "append_images": frames}
    _save(tmp_path / "cat" / "moving.gif", **options)
    _save(tmp_path / "cat" / "grey.bmp", mode="L")
    source = open_source(f"folder:{tmp_path}", eval_fraction=0)
    assert source.notes == ()
    assert source.splits == {"train": len(READ) + 2}
    dataset = make_dataset(
        source, "train", batch_size=16, image_shape=(6, 8, 3), training=False
    )
    ((images, _),) = dataset.as_numpy_iterator()
    found = dict(zip(source.files("train"), images, strict=True))
    grey = found.pop(f"{tmp_path}/cat/grey.bmp")
    assert np.abs(grey.astype(int) - 124).max() <= 1
    for path, image in found.items():
        # The first frame, where there are several.
        assert np.abs(image.astype(int) - (200, 100, 50)).max() <= 12, path


def test_what_is_left_out_is_said_in_a_line(tmp_path):
    for name in ("cat", "dog"):
        for k in range(2):
            _save(tmp_path / name / f"{k}.jpg")
    for k in range(3):
        _save(tmp_path / "cat" / f"{k}.tiff")
    _save(tmp_path / "dog" / "palette.bmp", mode="P")
    _save(tmp_path / "dog" / "bits.bmp", mode="1")
    _save(tmp_path / "dog" / ".cache.jpg")
    _save(tmp_path / "dog" / "more" / "a.jpg")
    _save(tmp_path / "stray.png")
    _save(tmp_path / "dog" / "scan", "PNG")  # told by its content
    for name in ("Thumbs.db", ".DS_Store", "._0.jpg", "notes.txt", "fake.tif"):
        (tmp_path / "dog" / name).write_bytes(b"BM, but no picture")
    source = open_source(f"folder:{tmp_path}", eval_fraction=0)
    assert source.splits == {"train": 5}
    assert source.notes == (
        "9 files left out: 3 .tiff, 2 .bmp with a palette, 1 .png beside the class "
        "folders, 1 .tif, 1 .txt, 1 hidden .jpg; files are read if they are JPEG, "
        "PNG, GIF, BMP or WebP.",
        f"1 folder left out, such as {tmp_path}/dog/more.",
    )


def test_what_cannot_be_read_is_left_out_as_that(tmp_path):
    none = str(tmp_path / "none")
    assert pictures._fault(none) == " (cannot be read)" and pictures._head(none) == b""


def test_a_class_of_nothing_that_is_read(tmp_path):
    _save(tmp_path / "cat" / "a.jpg")
    _save(tmp_path / "dog" / "a.tiff")
    with pytest.raises(ValueError, match=r"dog has no JPEG, .*it, only 1 \.tiff: add"):
        open_source(f"folder:{tmp_path}")


def test_a_class_that_has_only_folders(tmp_path):
    _save(tmp_path / "pets" / "cat" / "a.jpg")
    _save(tmp_path / "pets" / "dog" / "a.jpg")
    with pytest.raises(ValueError, match=r"pets has no JPEG.* in it, only 2 folders: "):
        open_source(f"folder:{tmp_path}")


def _exif(orientation, order):
    """EXIF data in one of its two orders of bytes."""
    exif = Image.Exif()
    exif.endian = order
    exif[0x10F] = "a camera"
    exif[0x112] = orientation
    return exif.tobytes()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_turned_picture_is_said(tmp_path, order, orientation):
    for k in range(50):
        _save(tmp_path / "a" / f"{k}.jpg", exif=_exif(orientation, order))
    notes = open_source(f"folder:{tmp_path}", eval_fraction=0).notes
    said = "Pictures are read as they are stored: the EXIF orientation of "
    assert [note.startswith(said) for note in notes] == [True] * (orientation > 1)


def test_lower_bits_that_are_ignored_are_said(tmp_path):
    _save(tmp_path / "a" / "0.png")
    pixels = np.full([6, 8], 1000, np.uint16)
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    (note,) = open_source(f"folder:{tmp_path}", eval_fraction=0).notes
    assert f"of the 16 bits of {tmp_path}/a/1.png, the lower 8 are ignored." in note


def _turned(tmp_path):
    _save(tmp_path / "turned.jpg", exif=_exif(6, "<"))
    return (tmp_path / "turned.jpg").read_bytes()


def _deep(tmp_path):
    Image.fromarray(np.full([6, 8], 1000, np.uint16)).save(tmp_path / "deep.png")
    return (tmp_path / "deep.png").read_bytes()


def _turned_png(tmp_path):
    _save(tmp_path / "turned.png", exif=_exif(6, ">"))
    return (tmp_path / "turned.png").read_bytes()


IGNORED = {
    _turned: "the EXIF orientation of",
    _turned_png: "the EXIF orientation of",
    _deep: "of the 16 bits of",
}


def _folder(root, pictures):
    for k, picture in enumerate(pictures):
        path = root / "cat" / f"{k}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)
    return open_source(f"folder:{root}", eval_fraction=0)


def _masks(root, pictures):
    for k, picture in enumerate(pictures):
        _save(root / "masks" / f"{k}.png", mode="L")
        (root / "images").mkdir(parents=True, exist_ok=True)
        (root / "images" / f"{k}.png").write_bytes(picture)
    return open_source(f"folder:{root}", num_classes=2)


def _records(root, pictures):
    root.mkdir()
    write_tfrecord(root / "a.tfrecord", pictures, range(len(pictures)))
    return open_source(f"tfrecord:{root}/a.tfrecord")


def _parquet(root, pictures):
    pa, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    root.mkdir()
    table = pa.table({"image": pictures, "label": [*range(len(pictures))]})
    parquet.write_table(table, root / "a.parquet")
    return open_source(f"parquet:{root}/a.parquet", eval_fraction=0)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("picture", IGNORED)
@pytest.mark.parametrize("reader", [_folder, _masks, _records, _parquet])
def test_what_is_ignored_of_a_picture_is_said_once_whatever_reads_it(
    tmp_path, reader, picture
):
    _save(tmp_path / "plain.jpg")
    plain = (tmp_path / "plain.jpg").read_bytes()
    odd = picture(tmp_path)
    notes = reader(tmp_path / "data", [plain, odd, odd]).notes
    assert [IGNORED[picture] in note for note in notes].count(True) == 1
    notes = reader(tmp_path / "plain", [plain, plain]).notes
    assert not any("ignored" in note for note in notes)


def test_a_split_that_is_not_used_is_named(tmp_path):
    for split in ("train", "val", "test"):
        _save(tmp_path / split / "cat" / "a.jpg")
    source = open_source(f"folder:{tmp_path}")
    assert source.notes == (f"1 folder left out, such as {tmp_path}/test.",)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([(16, 16)] * 3, r"first images of .* are 16x16, but .*--image_size=16x16 \("),
        ([(16, 16), (8, 9)], r"differ in size, such as 16x16 and 8x9; .*=224 \("),
        ([None], r"The size of the images of .* is not known; .*=224 \("),
    ],
)
def test_what_is_said_of_sizes_was_seen(tmp_path, sizes, said):
    (tmp_path / "cat").mkdir()
    for k, size in enumerate(sizes):
        path = tmp_path / "cat" / f"{k}.png"
        if size is None:
            path.write_bytes(b"\x89PNG\r\n\x1a\n, but no picture")
        else:
            Image.new("RGB", size[::-1]).save(path)
    source = open_source(f"folder:{tmp_path}", eval_fraction=0)
    with pytest.raises(ValueError, match=said):
        make_dataset(source, "train", batch_size=2)


def test_names_in_no_encoding_are_read(tmp_path):
    for name in ("cat", "dog"):
        _save(tmp_path / name / "a.png")
        odd = os.path.join(os.fsencode(tmp_path / name), b"\xff.png")
        shutil.copy(tmp_path / name / "a.png", odd)
    source = open_source(f"folder:{tmp_path}", eval_fraction=0)
    assert source.splits == {"train": 4}
    dataset = make_dataset(source, "train", batch_size=4, image_shape=(6, 8, 3))
    ((images, labels),) = dataset.as_numpy_iterator()
    assert (len(images), sorted(labels)) == (4, [0, 0, 1, 1])
    assert dataset.pipeline.order["files"].startswith("4 (")


@pytest.mark.parametrize("fraction", [None, 0, 0.25, 0.3])
def test_files_and_labels_stand_in_their_order(tmp_path, fraction):
    names = {"b": ["10", "2", "a b", "B"], "A": ["1", "0"], "c": ["\u00e4", *"xyzuv"]}
    for folder, stems in names.items():
        for k, stem in enumerate(stems):
            _save(tmp_path / folder / f"{stem}{('.png', '.PNG')[k % 2]}")
    source = open_source(f"folder:{tmp_path}", eval_fraction=fraction)
    assert source.class_names == ("A", "b", "c")
    expected = {"train": [], "test": []}
    for label, folder in enumerate("Abc"):
        held = 0
        for k, path in enumerate(sorted(map(str, (tmp_path / folder).iterdir()))):
            due = math.floor((k + 1) * (0.1 if fraction is None else fraction) + 1e-9)
            split = "test" if due > held else "train"
            held = due
            expected[split].append((path, label))
    for split in source.splits:
        paths = source.files(split)
        of_split = [
            int(source.decode(next(source.walk(path)).raw)[1]) for path in paths
        ]
        assert [*zip(paths, of_split, strict=True)] == expected[split]
    assert sum(source.splits.values()) == 12


def test_what_takes_long_to_list_is_shown(tmp_path, monkeypatch):
    """Each class folder counts, also where many are listed at once."""
    for k in range(300):
        _save(tmp_path / f"{k:03}" / "a.png")
    shown = []

    class Shown(progress.Progress):
        def __init__(self, *args):
            super().__init__(*args)
            shown.append((self, args))

    monkeypatch.setattr(progress, "Progress", Shown)
    open_source(f"folder:{tmp_path}", eval_fraction=0)
    ((listing, args),) = shown
    assert args == (f"Listing {tmp_path}", 300, "folders", progress.EARLY_S)
    assert listing.done == 300


def test_a_file_that_changes_within_a_second_changes_the_fingerprint(tmp_path):
    _save(tmp_path / "cat" / "a.png")
    source = open_source(f"folder:{tmp_path}", eval_fraction=0)
    before = base.fingerprint(source)
    changed_ns = os.stat(tmp_path / "cat" / "a.png").st_mtime_ns
    os.utime(tmp_path / "cat" / "a.png", ns=(changed_ns, changed_ns ^ 1))
    assert base.fingerprint(source) != before

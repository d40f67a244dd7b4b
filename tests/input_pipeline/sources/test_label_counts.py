"""All labels are read once for several runs on the same files."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from towers.input_pipeline import open_source
from towers.input_pipeline.sources.examples.fields import ExampleFiles
from towers.input_pipeline.sources.folder.mask_folder import MaskFolderSource


@pytest.fixture(params=["tfrecord", "array_record", "folder"])
def spec(request, tmp_path, image_example, grey, write_tfrecord):
    """Data of five classes, of which one is held out, in a folder ``data``."""
    folder = tmp_path / "data"
    labels = {"train-0": [0, 1, 3], "train-1": [1], "val": [4, 0]}
    if request.param == "folder":
        for split, some in labels.items():
            split = split.partition("-")[0]
            for name in ("images", "masks"):
                (folder / split / name).mkdir(parents=True, exist_ok=True)
                for label in some:
                    picture = np.full([8, 8], label, np.uint8)
                    path = folder / split / name / f"{label}.png"
                    Image.fromarray(picture).save(path)
        return f"folder:{folder}"
    folder.mkdir()
    for name, some in labels.items():
        examples = [image_example(grey(label), label) for label in some]
        if request.param == "tfrecord":
            write_tfrecord(folder / name, examples)
            continue
        module = pytest.importorskip("array_record.python.array_record_module")
        writer = module.ArrayRecordWriter(str(folder / name), "group_size:1")
        for example in examples:
            writer.write(example)
        writer.close()
    return f"{request.param}:{folder}/*"


def of(source):
    """The facts of a source that its labels tell."""
    numbers = {split: [*source.numbers(split)] for split in source.splits}
    return source.target, source.splits, numbers


def is_known(source):
    return any("known from an earlier run" in note for note in source.notes)


@pytest.fixture
def unreadable(monkeypatch):
    """Returns a function; once it is called, reading all labels fails."""

    def refuse(*_):
        raise AssertionError("the labels are read again")

    def forbid():
        monkeypatch.setattr(ExampleFiles, "_read_labels", refuse)
        monkeypatch.setattr(MaskFolderSource, "_read_classes", refuse)

    return forbid


def test_labels_that_were_counted_are_not_read_again(spec, tmp_path, unreadable):
    findings = str(tmp_path / "run" / "findings")
    first = open_source(spec, findings=findings)
    assert first.num_classes == 5 and not is_known(first)
    unreadable()
    second = open_source(spec, findings=findings)
    assert of(second) == of(first)
    said = [note for note in second.notes if note not in first.notes]
    assert len(said) == 1 and is_known(second)
    assert len(second.notes) == len(first.notes) + 1


def test_a_number_of_classes_that_is_given_reads_nothing(spec, tmp_path, unreadable):
    unreadable()
    findings = str(tmp_path / "findings")
    assert open_source(spec, num_classes=9, findings=findings).num_classes == 9
    assert not os.path.exists(f"{findings}.json")


@pytest.mark.quick_one_in(9)
@pytest.mark.parametrize(
    "change",
    ["time", "removed", "options", "cut", "other JSON", "unwritable", "dangling"],
)
def test_what_is_not_the_same_is_read(spec, tmp_path, change, capsys):
    findings, options = str(tmp_path / "findings"), {}
    if change == "unwritable":
        os.mkdir(f"{findings}.json")
    if change == "dangling":
        os.symlink(tmp_path / "nowhere", f"{findings}.json")
    first = open_source(spec, findings=findings)
    folder = tmp_path / "data"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if change == "time":
        os.utime(files[-1], (1, 1))
    if change == "removed":
        for path in files:
            if path.name in ("train-1", "1.png"):
                path.unlink()
    if change == "options":
        options["skip_bad"] = True
    if change == "cut":
        with open(f"{findings}.json", "r+b") as file:
            file.truncate(20)
    if change == "other JSON":
        with open(f"{findings}.json") as file:
            content = json.load(file)
        with open(f"{findings}.json", "w") as file:
            json.dump({**content, "splits": 3}, file)
    second = open_source(spec, findings=findings, **options)
    # Through the link, the counts are kept.
    assert is_known(second) == (change == "dangling")
    assert second.num_classes == first.num_classes
    said = "findings.json cannot be read" in capsys.readouterr().err
    assert said == (change in ("cut", "other JSON", "unwritable"))


@pytest.mark.quick_one_in(2)
def test_classes_are_those_of_the_files_as_they_are(spec, tmp_path):
    findings = str(tmp_path / "findings")
    assert open_source(spec, findings=findings).num_classes == 5
    folder = tmp_path / "data"
    for path in [*folder.rglob("*")]:
        if path.is_file() and path.name in ("val", "4.png"):
            path.unlink()
    assert open_source(spec, findings=findings).num_classes == 4
    assert is_known(open_source(spec, findings=findings))


def test_another_label_is_counted_anew(tmp_path, encode, example, grey, write_tfrecord):
    fields = {"image__encoded": encode(grey(1)), "a": 2, "b": 6}
    write_tfrecord(tmp_path / "records", [example(**fields)])
    findings, spec = str(tmp_path / "findings"), f"tfrecord:{tmp_path}/records"
    for label, count in (("a", 3), ("b", 7), ("a", 3)):
        source = open_source(spec, label_column=label, findings=findings)
        assert source.num_classes == count and not is_known(source)


def test_counts_without_bad_records_are_not_kept(
    tmp_path, image_example, grey, write_tfrecord
):
    examples = [image_example(grey(label), label) for label in (0, 1, 2)]
    write_tfrecord(tmp_path / "a", [examples[0], b"\xff bad", *examples[1:]])
    options = {"findings": str(tmp_path / "run" / "findings"), "skip_bad": True}
    source = open_source(f"tfrecord:{tmp_path}/a", **options)
    assert source.num_classes == 3
    assert not (tmp_path / "run").exists()
    assert [*source.numbers("train")] == [0, 1, 2, 3]

"""Puts one bad record of each kind into data, and trains: is it named, is it left out?

python -m scripts.faults.records
"""

import io
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import tensorflow as tf
from PIL import Image

from scripts.faults import run

GOOD = 40
AT = 25


def main() -> None:
    """Trains on each kind with --bad_records=fail and skip, and says what is said."""
    named = passed_over = 0
    for kind, (make, where) in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            spec, path = make(pathlib.Path(folder) / "data")
            code, said = _train(folder, spec)
            found = code == 1 and f"{path}{where}" in said
            again, _ = _train(folder, spec, "--bad_records=skip")
            file = pathlib.Path(folder) / "run/bad_records.json"
            listed = json.loads(file.read_text()) if file.exists() else []
            bad = [each for some in listed for each in some["bad"].get("train", ())]
            left_out = again == 0 and [each["path"] for each in bad] == [str(path)]
        named, passed_over = named + found, passed_over + left_out
        print(
            f"{kind}: {'named' if found else 'NOT NAMED'}, exit code {code}; ", end=""
        )
        print("left out" if left_out else f"NOT LEFT OUT, exit code {again}")
        print(f"    {said.replace(folder, '')}", flush=True)
    print(f"{named} of {len(KINDS)} named, {passed_over} left out with skip.")
    with tempfile.TemporaryDirectory() as folder:
        spec, path = _records(pathlib.Path(folder), _good_records())
        (path.parent / "train-1").write_bytes(b"")
        code, said = _train(folder, spec)
        print(f"an empty file: exit code {code}\n    {said.replace(folder, '')}")
        path.write_bytes(b"")
        code, said = _train(folder, spec)
        print(f"no record at all: exit code {code}\n    {said.replace(folder, '')}")


def _train(folder, spec, *flags):
    """Exit code, and what is said of the data on standard error."""
    size = [] if spec.startswith("csv:") else ["--image_size=8"]
    classes = [] if spec.startswith("folder:") else ["--num_classes=3"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "towers.train", "--model=mlp", f"--dataset={spec}"),
            *("--train_epochs=1", *size, *classes),
            *("--batch_size=8", f"--model_dir={folder}/run", "--clean", *flags),
        ],
        cwd=run.ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    said = [line for line in lines if line.startswith("towers") or "no record" in line]
    crashed = ["(a traceback)"] if "Traceback" in done.stderr else []
    return done.returncode, "\n    ".join(said + crashed)


def _png(value):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(value).integers(0, 255, [8, 8, 3], np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _example(image, **label):
    values = {"image/encoded": {"bytes_list": tf.train.BytesList(value=[image])}}
    kinds = {"int64": tf.train.Int64List, "bytes": tf.train.BytesList}
    for kind, value in label.items():
        values["image/class/label"] = {f"{kind}_list": kinds[kind](value=value)}
    features = {name: tf.train.Feature(**value) for name, value in values.items()}
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return example.SerializeToString()


def _good_records():
    return [_example(_png(i), int64=[i % 3]) for i in range(GOOD)]


def _records(folder, records):
    folder.mkdir(exist_ok=True)
    path = folder / "train-0"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return f"tfrecord:{folder}/train-*", path


def _with(bad):
    """Records with a bad one among them."""

    def make(folder):
        return _records(folder, [*_good_records()[:AT], bad, *_good_records()[AT:]])

    return make


def _damaged(damage):
    """A file of good records, and then something happens to its bytes."""

    def make(folder):
        records = _good_records()
        spec, path = _records(folder, records)
        offset = sum(len(record) + 16 for record in records[:AT])
        content = bytearray(path.read_bytes())
        damage(content, offset)
        path.write_bytes(content)
        return spec, path

    return make


def _flip(place):
    def damage(content, offset):
        content[offset + place] ^= 4

    return damage


def _cut(left):
    def damage(content, offset):
        del content[offset + left :]

    return damage


def _folder(image):
    """A folder for each class, and in one of them something else."""

    def make(folder):
        for i in range(GOOD):
            (folder / f"class-{i % 3}").mkdir(parents=True, exist_ok=True)
            (folder / f"class-{i % 3}/{i:02}.png").write_bytes(_png(i))
        path = folder / "class-1/25.png"
        path.write_bytes(image)
        return f"folder:{folder}", path

    return make


def _table(row):
    """Rows of numbers, one of which is none."""

    def make(folder):
        folder.mkdir()
        rows = [f"{i},{i / 2},{i % 3}" for i in range(GOOD)]
        path = folder / "train.csv"
        path.write_text("\n".join(["a,b,label", *rows[:AT], row, *rows[AT:]]))
        return f"csv:{folder}/*.csv", path

    return make


_PNG = _png(7)
_FLIPPED = _PNG[:80] + bytes([_PNG[80] ^ 1]) + _PNG[81:]
_PLACE = f": record {AT} (byte offset "
KINDS = {
    "a file cut off in a record": (_damaged(_cut(60)), _PLACE),
    "a file cut off in a record's length": (_damaged(_cut(5)), _PLACE),
    "a bit flipped in an image": (_damaged(_flip(80)), _PLACE),
    "a bit flipped in a record's length": (_damaged(_flip(1)), _PLACE),
    "no image": (_with(_example(b"text", int64=[1])), _PLACE),
    "half an image": (_with(_example(_PNG[:60], int64=[1])), _PLACE),
    "an image file with a bit flipped": (_folder(_FLIPPED), ": image: "),
    "no label": (_with(_example(_PNG)), _PLACE),
    "a label of another type": (_with(_example(_PNG, bytes=[b"cat"])), _PLACE),
    "two labels": (_with(_example(_PNG, int64=[1, 2])), _PLACE),
    "a label too large": (_with(_example(_PNG, int64=[3])), _PLACE),
    "a label below 0": (_with(_example(_PNG, int64=[-1])), _PLACE),
    "a label that is no number": (_table("1,1,nan"), f": line {AT + 2}: label "),
    "a number that is not finite": (_table("1,inf,1"), f": line {AT + 2}: b is inf"),
    "a column too few": (_table("1,1"), f": line {AT + 2}: "),
}


if __name__ == "__main__":
    main()

"""Draws docs/images/*.jpg: contact sheets of augmented real photographs.

    python -m scripts.docs_pictures
    python -m scripts.docs_pictures --sheets=mix

The photographs are scikit-learn's: china.jpg by flickr.com/photos/danielbuechele and
flower.jpg by flickr.com/photos/vultilion, under CC BY 2.0. Each sheet says so.
"""

import io
import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import app, flags
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_images

from towers.input_pipeline.images import augment, mix, randaugment

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLAGS = flags.FLAGS

flags.DEFINE_string("output_dir", f"{ROOT}/docs/images", "Where the pictures go.")
flags.DEFINE_list("sheets", [], "Which ones; all by default.")

CREDIT = (
    "Photographs: danielbuechele and Vultilion, flickr.com, CC BY 2.0; changed here"
)
MAX_BYTES = 150_000
GAP, TEXT = 6, 14

Cell = tuple[str, np.ndarray]


def main(_) -> None:
    """Draws what is asked for."""
    folder = pathlib.Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name in FLAGS.sheets or SHEETS:
        data = _jpeg(_sheet(SHEETS[name]()))
        (folder / f"{name}.jpg").write_bytes(data)
        print(f"{folder / name}.jpg: {len(data)} bytes")


def randaugment_sheet() -> list[list[Cell]]:
    """Each operation at a few magnitudes, in both directions; two in a row."""
    image = _photographs(96)[0]
    levels = -0.9, -0.3, 0.3, 0.9
    halves = []
    for name, operation in randaugment.OPERATIONS.items():
        cells = [
            (f"{name} {10 * level:+.0f}", operation(image, tf.constant(level)))
            for level in levels
        ]
        halves.append([(caption, cell.numpy()) for caption, cell in cells])
    half = len(halves) // 2
    return [
        left + right for left, right in zip(halves[:half], halves[half:], strict=True)
    ]


def mix_sheet() -> list[list[Cell]]:
    """A flower and a temple, mixed by each method, with the share of the first."""
    temple, flower = _photographs(128)
    images = tf.cast([flower, temple], tf.float32)
    rows = []
    for function, draws, alpha in ((mix.mixup, 2, 1.0), (mix.cutmix, 4, 1.0)):
        cells = []
        for seed in range(5):
            u = tf.random.stateless_uniform([draws, 2], [seed, 5])
            mixed, labels = function(images, tf.eye(2), u, alpha)
            caption = f"{function.__name__} {labels[0, 0]:.2f}"
            cells.append((caption, np.asarray(mixed[0]).round().astype(np.uint8)))
        rows.append(cells)
    return rows


def imagenet_sheet() -> list[list[Cell]]:
    """Random parts for training, and the middle for evaluation, of both photographs."""
    rows = []
    for photograph in load_sample_images().images:
        image = tf.constant(photograph)
        cells = []
        for seed in range(5):
            u = tf.random.stateless_uniform([augment.WINDOW_DRAWS + 1], [seed, 1])
            window = augment.random_window(tf.shape(image), u[:-1])
            part = augment.resize(
                augment.crop(image, window), 128, 128, antialias="none"
            )
            height, width = window.numpy()[2:]
            cells.append((f"{height} x {width}", augment.flip(part, u[-1]).numpy()))
        middle = augment.crop(image, augment.center_window(tf.shape(image), 128, 128))
        middle = augment.resize(middle, 128, 128, antialias="fast")
        rows.append([("evaluation", middle.numpy()), *cells])
    return rows


def cifar_sheet() -> list[list[Cell]]:
    """Both photographs at 32x32, moved and mirrored, magnified three times."""
    rows = []
    for image in _photographs(32):
        u = tf.random.stateless_uniform([7, augment.PAD_CROP_FLIP_DRAWS], [1, 3])
        changed = augment.pad_crop_flip(tf.stack([image] * 7), u)
        cells = [("as it is", image)] + [
            (f"{int(9 * down) - 4:+d}, {int(9 * right) - 4:+d}", one)
            for one, (down, right, _) in zip(changed, u, strict=True)
        ]
        rows.append(
            [(text, np.kron(one, np.ones([3, 3, 1], np.uint8))) for text, one in cells]
        )
    return rows


# A sheet's name, and the function that returns its rows of (caption, uint8 [H, W, 3]).
# Another sheet is another function here.
SHEETS: dict[str, Callable[[], list[list[Cell]]]] = {
    "randaugment": randaugment_sheet,
    "mix": mix_sheet,
    "imagenet": imagenet_sheet,
    "cifar": cifar_sheet,
}


def _photographs(size: int) -> list[tf.Tensor]:
    """The temple and the flower, uint8 [size, size, 3]."""
    china, flower = load_sample_images().images
    squares = china[:, 100:527], flower[:, 150:577]
    return [
        tf.constant(np.asarray(Image.fromarray(square).resize([size, size])))
        for square in squares
    ]


def _sheet(rows: list[list[Cell]]) -> Image.Image:
    """Puts cells of one size in rows, each below its caption."""
    height, width, _ = rows[0][0][1].shape
    step_x, step_y = width + GAP, height + TEXT + GAP
    size = max(map(len, rows)) * step_x + GAP, len(rows) * step_y + TEXT + 2 * GAP
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for i, row in enumerate(rows):
        for j, (caption, pixels) in enumerate(row):
            x, y = GAP + j * step_x, GAP + i * step_y
            draw.text((x, y - 1), caption, "black", font)
            sheet.paste(Image.fromarray(pixels), (x, y + TEXT))
    draw.text((GAP, size[1] - TEXT - GAP // 2), CREDIT, "grey", font)
    return sheet


def _jpeg(sheet: Image.Image) -> bytes:
    """Encodes as well as ``MAX_BYTES`` allow."""
    for quality in range(90, 20, -5):
        buffer = io.BytesIO()
        sheet.save(buffer, "JPEG", quality=quality, optimize=True)
        if buffer.tell() < MAX_BYTES:
            break
    return buffer.getvalue()


if __name__ == "__main__":
    app.run(main)

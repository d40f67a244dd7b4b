"""Detection: where on a sheet are handwritten digits, and which ones?

    towers train --model=examples/detection.py --train_epochs=5

An anchor-free detector, as CenterNet (Zhou et al. 2019, "Objects as points"): a sheet
is divided into cells. Each cell tells whether the centre of a box lies in it, which
digit the box has, where in the cell its centre is, and how large it is. A `PyDataset`
draws the sheets.
"""

import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits

SIDE, CELL = 32, 4
CELLS = SIDE // CELL
# Of a cell: is there a centre? Which digit? Offset (y, x); size (height, width).
PARTS = 1, 10, 2, 2


class Sheets(keras.utils.PyDataset):
    """Sheets with one to three digits in random places and sizes."""

    def __init__(self, batches, batch_size, seed, first, last):
        """Draws `batches` of sheets, with digits `first` to `last` of scikit-learn."""
        super().__init__()
        digits = load_digits()
        self._images = digits.images[first:last] / 16
        self._labels = digits.target[first:last]
        self._batches, self._size, self._seed = batches, batch_size, seed

    def __len__(self):
        """Batches in an epoch."""
        return self._batches

    def __getitem__(self, number):
        """Draws a batch by its number alone: a run that goes on gets the same."""
        random = np.random.default_rng((self._seed, number))
        pairs = [self._sheet(random) for _ in range(self._size)]
        return tuple(np.stack(each) for each in zip(*pairs, strict=True))

    def _sheet(self, random):
        sheet = np.zeros([SIDE, SIDE, 1], "float32")
        cells = np.zeros([CELLS, CELLS, sum(PARTS)], "float32")
        for _ in range(random.integers(1, 4)):
            which, scale = random.integers(len(self._images)), random.integers(1, 3)
            digit = np.kron(self._images[which], np.ones([scale, scale]))
            side = len(digit)
            top, left = random.integers(0, SIDE - side + 1, 2)
            place = sheet[top : top + side, left : left + side, 0]
            if place.any():
                continue  # no box on another
            place[:] = digit
            center = np.array([top, left]) / CELL + side / CELL / 2
            row, column = center.astype(int)
            one_hot = np.eye(10)[self._labels[which]]
            offset, size = center % 1, [side / CELL] * 2
            cells[row, column] = [1, *one_hot, *offset, *size]
        return sheet, cells


def build(input_shape):
    """From a sheet to cells: logits of centre and digit, then offset and size."""
    x = inputs = keras.Input(input_shape)
    for filters, strides in ((16, 1), (32, 2), (64, 2), (64, 1), (64, 1)):
        x = keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        # Over the whole batch, as on one device.
        x = keras.layers.BatchNormalization(momentum=0.9, synchronized=True)(x)
        x = keras.layers.ReLU()(x)
    return keras.Model(inputs, keras.layers.Conv2D(sum(PARTS), 1)(x))


@keras.saving.register_keras_serializable("examples")
def loss(y_true, y_pred):
    """Of each cell: is there a centre? Where there is one, what and how large?"""
    centre, digit, box = _parts(y_true)
    centre_pred, digit_pred, box_pred = _parts(y_pred)
    found = ops.binary_crossentropy(centre, centre_pred, from_logits=True)
    which = ops.categorical_crossentropy(digit, digit_pred, from_logits=True)
    where = ops.sum(ops.abs(box - box_pred), axis=-1)
    return found[..., 0] + centre[..., 0] * (which + where)


@keras.saving.register_keras_serializable("examples")
def overlap(y_true, y_pred):
    """Intersection over union, of the boxes whose cells are known."""
    centre, _, box = _parts(y_true)
    _, _, box_pred = _parts(y_pred)
    first, last = _corners(box)
    first_pred, last_pred = _corners(box_pred)
    sides = ops.minimum(last, last_pred) - ops.maximum(first, first_pred)
    common = ops.prod(ops.maximum(sides, 0.0), axis=-1)
    areas = [ops.prod(ops.maximum(each[..., 2:], 0.0), -1) for each in (box, box_pred)]
    iou = common / (areas[0] + areas[1] - common + 1e-6)
    there = centre[..., 0]
    return ops.sum(iou * there, (1, 2)) / ops.maximum(ops.sum(there, (1, 2)), 1.0)


metrics = [overlap]


def _parts(cells):
    return cells[..., :1], cells[..., 1:11], cells[..., 11:]


def _corners(box):
    middle, half = box[..., :2], box[..., 2:] / 2
    return middle - half, middle + half


def train_data(batch_size, seed):
    """40 batches of sheets, with the first 1,500 digits."""
    return Sheets(40, batch_size, seed, 0, 1500)


def eval_data(batch_size):
    """4 batches, with digits that are not trained on."""
    return Sheets(4, batch_size, 1_000_000, 1500, None)

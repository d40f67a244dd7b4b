"""What towers make of each class of `keras.layers`: layers.txt, and the page of it.

Whether a layer treats each example by itself is measured here, by calls of the layer
alone: the rows of two parts have to equal those of the whole. What towers make of it is
found out as they do it. Nothing is trained.

    .venv/bin/python -m tests.towers.analysis.layers

finds out all outcomes anew, and writes the table and docs/trust/layers.md.
"""

import inspect
import pathlib
import random
import textwrap
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from towers.analysis.dependence import Reader
from towers.analysis.kinds import Dependence
from towers.analysis.layer_calls import is_trusted, recorded_layers

TABLE = pathlib.Path(__file__).with_name("layers.txt")
PAGE = pathlib.Path(__file__).parents[3] / "docs/trust/layers.md"
ROWS, PART = 5, 2
_random = np.random.default_rng(0)


def _normal(*shape):
    return _random.normal(size=(ROWS, *shape)).astype("float32")


def _ids(*shape):
    return _random.integers(0, 6, (ROWS, *shape)).astype("int32")


def _pixels(*shape):
    return _random.integers(0, 256, (ROWS, *shape)).astype("float32")


# What layers are called with, by name.
INPUTS: dict[str, Any] = {
    "(n,)": _normal(),
    "(n, 6)": _normal(6),
    "(n, 5, 6)": _normal(5, 6),
    "(n, 8, 8, 3)": _normal(8, 8, 3),
    "(n, 6, 6, 6, 2)": _normal(6, 6, 6, 2),
    "(n, 3, 6, 6, 6, 2)": _normal(3, 6, 6, 6, 2),
    "(n, 512)": _normal(512),
    "pixels (n, 8, 8, 3)": _pixels(8, 8, 3),
    "pixels (n, 8, 3)": _pixels(8, 3),
    "ids (n,)": _ids(),
    "ids (n, 5)": _ids(5),
    "words (n,)": np.array(["a b", "b", "c a", "d b c", "a"], object),
    "words (n, 2)": np.array([["a", "b"]] * ROWS, object),
}
INPUTS["2 x ids (n,)"] = (_ids(), _ids())
for _name in "(n,)", "(n, 6)", "(n, 5, 6)", "(n, 8, 8, 3)":
    INPUTS[f"2 x {_name}"] = [INPUTS[_name], _normal(*INPUTS[_name].shape[1:])]
INPUTS["cell's (n, 6)"] = INPUTS["(n, 6)"], [_normal(4)]
INPUTS["cell's (n, 6), 2 states"] = INPUTS["(n, 6)"], [_normal(4), _normal(4)]
INPUTS |= {
    "cell's (n, 6), in a list": (INPUTS["(n, 6)"], [[_normal(4)]]),
    "frames (n, 3, 6, 2)": _normal(3, 6, 2),
    "frames (n, 3, 6, 6, 2)": _normal(3, 6, 6, 2),
    "(n, 512, 1)": _normal(512, 1),
    "boxes": {
        "images": _pixels(8, 8, 3),
        "bounding_boxes": {"boxes": _normal(3, 4), "labels": _ids(3)},
    },
}


class Call(NamedTuple):
    """A row of the table.

    Attributes:
        kind: The name of a class of `keras.layers`.
        arguments: What it is made with, as Python.
        inputs: What it is called with: a key of `INPUTS`.
        outcome: What towers make of it: "trusted"; "proved", by reading operations;
            "at home", on the rows of all towers; "impossible", since Keras does not do
            it; "by design", where rows differ and docs/trust/exactness.md says so.
    """

    kind: str
    arguments: str
    inputs: str
    outcome: str

    def __str__(self):
        return " | ".join(self)


def table() -> list[Call]:
    """Reads the table: a line a row, its cells between bars."""
    return [Call(*line.split(" | ")) for line in TABLE.read_text().splitlines()]


def page(rows: list[Call]) -> str:
    """Returns a summary of the table as Markdown: what is not plainly on the towers."""
    kinds = {row.kind: [r for r in rows if r.kind == row.kind] for row in rows}
    outcomes = {kind: {row.outcome for row in kinds[kind]} for kind in kinds}
    usable = {kind: found - {"impossible"} for kind, found in outcomes.items()}
    apart = [kind for kind, found in usable.items() if found and found <= ON_TOWERS]
    home = [kind for kind, found in usable.items() if found == {"at home"}]
    some = [kind for kind in kinds if "at home" in usable[kind] and kind not in home]
    empty = [kind for kind, found in usable.items() if not found]
    design = [kind for kind in kinds if "by design" in usable[kind]]
    assert len(kinds) == sum(map(len, (apart, home, some, empty, design)))

    # Classes that differ from others in nothing share a row.
    cells = {}
    for kind in some:
        cells.setdefault(_at_home(kinds[kind]), []).append(kind)
    lines = [f"| {_names(names)} | {cell} |" for cell, names in cells.items()]
    return _PAGE.format(
        classes=len(kinds),
        calls=len(rows),
        count_apart=len(apart),
        apart=textwrap.fill(f"{_names(apart)}.", 100),
        count_some=len(some),
        some="\n".join(lines),
        count_home=len(home),
        home=_names(home),
        design=_names(design),
        empty=_names(empty),
        impossible=sum(row.outcome == "impossible" for row in rows),
    )


def _at_home(rows: list[Call]) -> str:
    """Returns the inputs that one device computes, with arguments where they matter."""
    cells = []
    for inputs in dict.fromkeys(row.inputs for row in rows):
        alike = [row for row in rows if row.inputs == inputs]
        home = [row for row in alike if row.outcome == "at home"]
        if not home:
            continue
        if len(home) == len(alike):
            cells.append(f"{inputs}")
        else:
            cells.append(f"{inputs}: " + ", ".join(f"`{r.arguments}`" for r in home))
    return "; ".join(cells)


def _names(kinds: list[str]) -> str:
    return ", ".join(kinds)


# Outcomes of rows that towers compute, each tower its own.
ON_TOWERS = {"trusted", "proved"}

_PAGE = """# Layers: every Keras layer, measured

Towers give the numbers of one device for every Keras layer except BatchNormalization.
To check your own model:

```bash
towers parity --dataset=csv:flowers.csv --model=my_model.py:build
```

A layer runs on the towers if it treats each example by itself. Otherwise one device
computes it, with all rows, and a line says so. For `Lambda` and your own
layers, Towers reads the operations in them.

| classes of `keras.layers` | outcome |
|---|---|
| {count_apart} | on the towers |
| {count_some} | on the towers, except for the calls listed below |
| {count_home} | on one device: {home} |
| 1 | {design}: differs [by design](exactness.md#what-differs-by-design) |
| 2 | {empty}: not for use by themselves |

A test compares the rows of a batch with those of its parts, for all {classes} classes
of Keras 3.16, in [{calls} calls](../../tests/towers/analysis/layers.txt).
Keras cannot do {impossible} of them. Layers that draw random numbers in
training are measured in inference only.

## On one device with some inputs or arguments

n is the number of examples, and "2 x" stands for two inputs. For pictures, (n, 8, 3) is
one picture without a batch. Arguments are named where they matter.

| class | computed on one device |
|---|---|
{some}

## On the towers

{apart}
"""


def classes() -> dict[str, type]:
    """Returns every class of `keras.layers` that is a layer, by its own name."""
    found = vars(layers).values()
    kinds = [c for c in found if inspect.isclass(c) and issubclass(c, layers.Layer)]
    return {kind.__name__: kind for kind in kinds}


def outcome(call: Call) -> str:
    """Finds out what towers make of a layer.

    Raises:
        AssertionError: Rows of a part differ from those of the whole, and towers would
            not know.
    """
    if call.inputs not in INPUTS:
        return "at home"  # what it computes is the user's own
    x = INPUTS[call.inputs]
    try:
        kind = classes()[call.kind]
        layer = eval(f"kind({call.arguments})", {"kind": kind, "layers": layers})
        apart = measured(layer, x)
    except Exception:
        return "impossible"
    if isinstance(layer, layers.BatchNormalization):
        return "by design"
    specs = keras.tree.map_structure(_spec, x)
    if apart and is_trusted(layer, tf.nest.flatten(specs)):
        return "trusted"
    try:
        found = read(layer, specs)
    except Exception:
        return "impossible"
    assert apart or found == "at home", (str(call), found)
    return found


def measured(layer: layers.Layer, x: Any) -> bool:
    """Whether rows of parts equal those of the whole, wherever nothing is random."""
    _called(layer, x, {})  # builds it
    if not layer._call_has_training_arg:
        return _keeps_rows_apart(layer, x, {}, _whole(layer, x, {}))
    inference, training = ({"training": mode} for mode in (False, True))
    first, second = (_whole(layer, x, mode) for mode in (inference, training))
    if not _keeps_rows_apart(layer, x, inference, first):
        return False
    # Where training changes nothing, not a bit, parts are as they were.
    same = first and second and all(map(np.array_equal, first, second))
    return same or _keeps_rows_apart(layer, x, training, second)


def _whole(layer, x, mode):
    """What a layer makes of all rows, `None` where it draws random numbers."""
    generators = [s for each in layer._flatten_layers() for s in each._seed_generators]
    with keras.StatelessScope() as scope:
        whole = _called(layer, x, mode)
    drawn = [scope.get_current_value(s.state) for s in generators]
    return whole if all(state is None for state in drawn) else None


def _keeps_rows_apart(layer, x, mode, whole):
    if whole is None:
        return True
    parts = []
    for rows in slice(PART), slice(PART, None):
        with keras.StatelessScope():
            part = keras.tree.map_structure(lambda a, rows=rows: a[rows], x)
            parts.append(_called(layer, part, mode))
    return all(
        w.ndim > 0
        and len(w) == ROWS
        and a.shape[1:] == b.shape[1:] == w.shape[1:]
        and _near(np.concatenate([a, b]), w)
        for a, b, w in zip(*parts, whole, strict=True)
    )


def _near(ours, theirs):
    if theirs.dtype.kind != "f":
        return np.array_equal(ours, theirs)
    return np.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def _called(layer, x, mode):
    x = keras.tree.map_structure(tf.convert_to_tensor, x)
    outputs = layer(*_arguments(layer, x), **mode)
    return [np.asarray(t) for t in tf.nest.flatten(outputs, expand_composites=True)]


def _arguments(layer, x):
    queries = layers.MultiHeadAttention, layers.GroupQueryAttention
    if isinstance(layer, queries):
        return x
    if isinstance(x, tuple) and not isinstance(layer, layers.HashedCrossing):
        return x
    return (x,)


def read(layer: layers.Layer, specs: Any) -> str:
    """What towers read in a layer, in training: an outcome."""
    mode = {"training": True} if layer._call_has_training_arg else {}
    found = {}
    # AugMix draws in Python which layers it is made of. With this seed, one of them is
    # Equalization, which is computed at home.
    random.seed(0)

    @tf.function(autograph=False)
    def trace(x):
        with recorded_layers() as calls, keras.StatelessScope():
            outputs = layer(*_arguments(layer, x), **mode)
        reader = Reader(x, calls, meets=lambda op: False)
        outputs = tf.nest.flatten(outputs, expand_composites=True)
        found["kinds"] = {reader.of(output) for output in outputs}
        found["one_each"] = all(
            output.shape[:1] == [None]
            and reader.blocks.of(output) is None
            and (
                reader.of(output) is not Dependence.ROWS
                or reader.counts.of(output) in (None, 1)
            )
            for output in outputs
        )

    trace.get_concrete_function(specs)
    rows = found["kinds"] <= {Dependence.ROWS, Dependence.PACKED}
    return "proved" if rows and found["one_each"] else "at home"


def _spec(array):
    kind = tf.string if array.dtype == object else array.dtype
    return tf.TensorSpec([None, *array.shape[1:]], kind)


if __name__ == "__main__":
    # What the installed Keras does not have stays as it is.
    rows = [
        row._replace(outcome=outcome(row)) if row.kind in classes() else row
        for row in table()
    ]
    TABLE.write_text("".join(f"{row}\n" for row in rows))
    PAGE.write_text(page(rows))

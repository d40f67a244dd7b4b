"""Follows the examples' axis where operations move axes."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.types import rule_for
from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    LAST,
    NONE,
    ROWS,
    SUM,
    UNKNOWN,
    Dependence,
)
from towers.analysis.static_values import integers

# By type of operation, what takes (op, inputs, axis) and returns where the axis of
# examples is afterwards. It returns `None` if that axis is split, or not known.
_RULES = {}


def with_examples_at(axis: int | None, rank: int | None = None) -> Dependence:
    """Returns the kind of what has the examples at an axis, in order.

    Args:
        axis: The axis; None if it is not known.
        rank: Number of axes; None if the last axis does not matter.
    """
    if axis is not None and axis > 1 and axis + 1 == rank:
        return LAST
    return {0: ROWS, 1: COLUMNS}.get(axis, UNKNOWN)


def axis_of(tensor: tf.Tensor, kind: Dependence) -> int | None:
    """Returns the axis of the examples; None if a tensor of this kind has none."""
    last = None if tensor.shape.rank is None else tensor.shape.rank - 1
    return {ROWS: 0, COLUMNS: 1, LAST: last}.get(kind)


def moves(op: tf.Operation) -> bool:
    """Whether an operation moves axes, and does nothing else; see `of_moved`."""
    return op.type in _RULES


def of_moved(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Tells how what an operation returns depends on the examples.

    Args:
        op: The operation, which moves axes.
        inputs: What it takes.
        kinds: How each input depends on the examples.
    """
    moved = 1 if op.type == "Split" else 0
    others = [kind for i, kind in enumerate(kinds) if i != moved]
    axis = axis_of(inputs[moved], kinds[moved])
    if axis is None or set(others) - {NONE}:
        return UNKNOWN
    return with_examples_at(_RULES[op.type](op, inputs, axis), op.outputs[0].shape.rank)


_rule = functools.partial(rule_for, _RULES)


@_rule("Transpose")
def _of_transposed(op, inputs, axis):
    order = integers(inputs[1])
    if order is None:
        return None
    return [each % len(order) for each in order].index(axis)


@_rule("Split")
def _of_split(op, inputs, axis):
    return _unless_parted(inputs[1], inputs[0], axis)


@_rule("SplitV")
def _of_sizes_split(op, inputs, axis):
    return _unless_parted(inputs[0], inputs[2], axis)


def _unless_parted(tensor, along, axis):
    along, rank = tf.get_static_value(along), tensor.shape.rank
    known = along is not None and rank is not None
    return axis if known and int(along) % rank != axis else None


@_rule("Unpack")
def _of_unpacked(op, inputs, axis):
    rank = inputs[0].shape.rank
    gone = op.get_attr("axis") % rank if rank else axis
    return None if gone == axis else axis - (gone < axis)


@_rule("Squeeze")
def _of_squeezed(op, inputs, axis):
    given, rank = op.get_attr("squeeze_dims"), inputs[0].shape.rank
    if rank is None or not given:
        return None
    gone = [each % rank for each in given]
    return None if axis in gone else axis - sum(each < axis for each in gone)


@_rule("ExpandDims")
def _of_expanded(op, inputs, axis):
    new, rank = tf.get_static_value(inputs[1]), inputs[0].shape.rank
    if new is None or rank is None:
        return None
    return axis + (int(new) % (rank + 1) <= axis)


def flipped(op: tf.Operation) -> tuple[bool, bool]:
    """Tells of a product of matrices which of the two are transposed."""
    names = (
        ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    )
    return op.get_attr(names[0]), op.get_attr(names[1])


def of_factor(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Tells how a product of matrices depends on the examples, if one of them does.

    Args:
        op: The product, of matrices or of batches of them, whose ranks are known.
        inputs: What it takes.
        kinds: Of one input ROWS, COLUMNS or LAST, of the other NONE.
    """
    cut = int(kinds[0] is NONE)
    other, axis = inputs[1 - cut].shape, axis_of(inputs[cut], kinds[cut])
    rank = max(inputs[cut].shape.rank, other.rank)
    new = rank - inputs[cut].shape.rank
    if axis < inputs[cut].shape.rank - 2:
        # It counts matrices, of which others may be one for all, or one for each.
        meets = axis + new - (rank - other.rank)
        apart = meets < 0 or other[meets] == 1
        return with_examples_at(axis + new, rank) if apart else UNKNOWN
    # The left matrix's rows stay, and the right one's columns.
    last = axis == inputs[cut].shape.rank - 1
    stays = last == (cut != flipped(op)[cut])
    return with_examples_at(rank - 2 + cut, rank) if stays else UNKNOWN


def of_einsum(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Tells how a sum of products depends on the examples.

    Args:
        op: The operation.
        inputs: What it takes.
        kinds: Of each input ROWS, COLUMNS or NONE; ROWS or COLUMNS of one at least.
    """
    equation = op.get_attr("equation").decode().replace(" ", "")
    if "..." in equation:
        equation = _spelled_out(equation, [t.shape.rank for t in inputs])
        if equation is None:
            return UNKNOWN
    terms, result = equation.split("->")
    terms = terms.split(",")
    letters, others = set(), ""
    for term, kind in zip(terms, kinds, strict=True):
        place = {ROWS: 0, COLUMNS: 1}.get(kind, len(term))
        letters |= {*term[place : place + 1]}
        others += term[:place] + term[place + 1 :]
    if len(letters) > 1:
        return COUPLED  # each with each
    (examples,) = letters
    if examples in others:
        return UNKNOWN
    return with_examples_at(result.index(examples)) if examples in result else SUM


def _spelled_out(equation, ranks):
    """Returns an equation with letters for its ellipsis; `None` if they are unknown."""
    terms = equation.split("->")[0].split(",")
    hidden = {
        None if rank is None else rank - len(term.replace("...", ""))
        for term, rank in zip(terms, ranks, strict=True)
        if "..." in term
    }
    if len(hidden) != 1 or None in hidden:
        return None
    return equation.replace("...", "αβγδεζηθ"[: hidden.pop()])

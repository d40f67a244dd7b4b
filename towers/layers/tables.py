"""Embedding tables over devices: which are cut, and where each lies.

A table that is cut has its rows, or its columns, divided over all devices; see
`sharded.py`. Towers look up rows where they lie, and each device updates its own.

By "auto", what is larger than a device's part is cut. All else stays whole, the largest
first, on the device with room where fewest rows are looked up; a trace with a batch's
shapes counts these. What is cut fills up the rest, around stages of any size.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from towers.devices.names import short
from towers.keras_adapter import optimizers
from towers.keras_adapter.layers import (
    EMBEDDING_CALL,
    embedding_table,
    layers_of,
)
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import bytes_of
from towers.layers import parameters, sharded, variables
from towers.layers.parameters import ShardedParameter
from towers.program import words

WAYS = "none", "auto", "rows", "columns"

# With "auto", a table is cut if it is larger, or if devices differ more without.
SMALL_BYTES, _UNEVEN = 2**20, 1.05
# A longer list is nothing to read.
_LISTED = 12


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where a table lies.

    Attributes:
        variable: The table.
        axis: 0 if its rows are divided over the devices, 1 if its columns are.
        devices: The devices; one has it whole.
        sizes: How many rows, or columns, each has.
    """

    variable: keras.Variable
    axis: int
    devices: tuple[str, ...]
    sizes: tuple[int, ...]


def left_out(model: keras.Model) -> dict[int, str]:
    """Says, by id of its table, why an embedding of a model is left at home."""
    reasons = {}
    for layer in _embeddings(model):
        table = embedding_table(layer)
        if layer.lora_enabled or layer.quantization_mode or not table.trainable:
            reasons[id(table)] = "it is frozen, adapted or quantized"
        if type(layer).call is not keras.layers.Embedding.call:
            reasons[id(table)] = "a class of its own looks up its rows"
        for part in ("regularizer", "constraint"):
            if getattr(layer, f"embeddings_{part}") is not None:
                reasons[id(table)] = f"its {part} takes it as a whole"
    return reasons


def _embeddings(model):
    return [
        layer
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.Embedding) and layer.built
    ]


def of(model: keras.Model) -> list[keras.Variable]:
    """Returns the tables of a built model that may lie on several devices."""
    found = {id(embedding_table(layer)) for layer in _embeddings(model)}
    wanted = found - left_out(model).keys()
    return [v for v in model.trainable_variables if id(v) in wanted]


def layout(
    model: keras.Model,
    devices: Sequence[str],
    way: str,
    places_of: Callable[[keras.Variable], Sequence[str]],
    looked_up: Mapping[int, int] = MappingProxyType({}),
    apart: Sequence[keras.Variable] = (),
) -> list[Placed]:
    """Decides where the tables of a built model are to lie.

    With "auto", those that are larger than what each device is to have are cut into
    rows; then the largest other ones, too, until all devices have about as many bytes.
    What is cut fills up what other variables leave. As far as that leaves a choice,
    each device looks up about as many numbers.

    Args:
        model: The model.
        devices: The devices, each once.
        way: One of `WAYS`, but for "none".
        places_of: Returns the devices of each other variable, and of its copies.
        looked_up: How many rows of each table a step looks up, by the `id` of the
            table, if that is known; see `look_ups`.
        apart: Tables that lie elsewhere.
    """
    of_others = {*map(id, apart)}
    tables = [table for table in of(model) if id(table) not in of_others]
    if way != "auto":
        axis = WAYS.index(way) - WAYS.index("rows")
        even = dict.fromkeys(devices, 1)
        return [_cut(table, axis, even) for table in tables]
    of_tables = {id(table) for table in [*tables, *apart]}
    load = dict.fromkeys(devices, 0)
    for variable in model.variables:
        for device in places_of(variable) if id(variable) not in of_tables else ():
            if device in load:
                load[device] += bytes_of(variable)
    ideal = (sum(load.values()) + sum(map(bytes_of, tables))) / len(devices)
    used = {id(t): looked_up.get(id(t), 0) * t.shape[1] for t in tables}
    ordered = sorted(tables, key=lambda t: (bytes_of(t), used[id(t)]), reverse=True)
    cut = {id(t) for t in ordered if bytes_of(t) > max(ideal, SMALL_BYTES)}
    most = ideal * _UNEVEN
    while True:
        large = [t for t in ordered if id(t) not in cut and bytes_of(t) > SMALL_BYTES]
        # What balances look-ups may not balance bytes, where bytes alone would do.
        for by in (used, {}) if looked_up else ({},):
            placed, loads = _place(ordered, cut, load, by, most)
            if max(loads.values()) <= most or not (by or large):
                return placed
        cut.add(id(large[0]))


def _place(tables, cut, load, used, most):
    """Places whole tables, the largest first; those that are cut fill up the rest.

    A whole one goes where fewest numbers are looked up, of the devices that then have
    at most `most` bytes; or else where most room is.

    Returns:
        Where they lie, and the bytes that each device has then.
    """
    load, placed, looked_up = dict(load), [], dict.fromkeys(load, 0)
    for table in tables:
        if id(table) not in cut:
            size = bytes_of(table)
            fits = [d for d in load if load[d] + size <= most] if used else ()
            device = min(
                fits or load, key=lambda d: (looked_up[d] if fits else 0, load[d])
            )
            placed.append(Placed(table, 0, (device,), (table.shape[0],)))
            load[device] += size
            looked_up[device] += used.get(id(table), 0)
    rest = [table for table in tables if id(table) in cut]
    full = level(load.values(), sum(map(bytes_of, rest)))
    room = {device: max(full - taken, 0) for device, taken in load.items()}
    for table in rest:
        placed.append(_cut(table, 0, room))
        for device, size in zip(placed[-1].devices, placed[-1].sizes, strict=True):
            load[device] += size * bytes_of(table) // table.shape[0]
    return placed, load


def look_ups(call: Callable[[], Any]) -> dict[int, int]:
    """Counts the rows that are looked up in each table, by its `id`.

    `call` calls a model, with tensors of known shapes.
    """
    found = collections.Counter()

    def note(keras_call, layer, ids):
        found[id(embedding_table(layer))] += ids.shape.num_elements() or 0
        return keras_call(layer, ids)

    with patched(EMBEDDING_CALL, note):
        call()
    return dict(found)


def level(loads: Iterable[int], more: int) -> float:
    """How much each has at most once `more` has filled up the least loaded.

    >>> level([5, 1, 2], 3)
    3.0
    """
    sums = itertools.accumulate(sorted(loads))
    # Of the least loaded ones: with one too few, or too many, the mean is larger.
    return min((total + more) / count for count, total in enumerate(sums, 1))


def _cut(table, axis, room):
    """Divides a table in proportion to the room that devices have."""
    count, total = table.shape[axis], sum(room.values())
    # Those before others have one more, if any has.
    ends = [-(-count * each // total) for each in itertools.accumulate(room.values())]
    ends[-1] = count
    sizes = [int(b - a) for a, b in itertools.pairwise([0, *ends])]
    has = [(device, n) for device, n in zip(room, sizes, strict=True) if n]
    return Placed(table, axis, *zip(*has, strict=True))


def put(placed: Sequence[Placed], optimizer: keras.optimizers.Optimizer | None) -> None:
    """Puts tables, and the slots that they have, where they are to lie."""
    for each in placed:
        slots = optimizers.slots_of(optimizer, each.variable) if optimizer else ()
        for variable in [each.variable, *slots]:
            if not _lies_there(variable, each):
                sharded.cut(variable, each.devices, each.axis, sizes=each.sizes)


def _lies_there(variable, placed):
    parts = sharded.of(variable)
    if not parameters.lies_there(parts, placed.devices, placed.axis):
        return False
    return tuple(shard.shape[parts.axis] for shard in parts.shards) == placed.sizes


def bring_home(model: keras.Model, home_of: Callable[[keras.Variable], str]) -> None:
    """Makes whole variables, where all others are, of those of a model that are cut."""
    with variables.replacing(model):
        for variable in variables.of(model):
            if sharded.of(variable) is not None:
                sharded.join(variable, home_of(variable))


def lines(
    model: keras.Model,
    home_of: Callable[[keras.Variable], str],
    copies: Sequence[tf.Variable],
) -> Iterator[str]:
    """Yields what to say of where tables lie, once there are slots and copies."""
    reasons, rows = left_out(model), []
    for variable in model.variables:
        reason = reasons.get(id(variable))
        if reason is not None and sharded.of(variable) is None:
            home = home_of(variable)
            yield f"The table {variable.path} stays on {home}, whole: {reason}."
        cut = sharded.of(variable)
        if cut is not None and not isinstance(cut, ShardedParameter):
            rows.append((variable.path, words.size(bytes_of(variable)), _where(cut)))
    divided = parameters.of(model.trainable_variables)
    if not rows and not divided:
        return
    wide = max((len(path) for path, *_ in rows), default=0)
    said = [f"  {path:{wide}}  {size:>11}  {where}" for path, size, where in rows]
    if len(said) > _LISTED:
        others = words.count(len(said) - _LISTED, "other table")
        said[_LISTED:] = [f"  and {others}"]
    if rows:
        yield "\n".join(["Embedding tables lie on the towers' devices:", *said])
    if divided:
        size = words.size(sum(map(bytes_of, divided)))
        count = f"{len(divided)} of {words.count(len(model.variables), 'variable')}"
        yield f"Each device has a part of {count}, which take {size}."
    held = bytes_by_device(model, copies)
    each = ", ".join(f"{device} {words.size(held[device])}" for device in sorted(held))
    yield f"Variables and optimizer slots take: {each}."


def _where(cut):
    devices = ", ".join(short(shard.device) for shard in cut.shards)
    if cut.elsewhere:
        return f"rows over all hosts, here over {devices}"
    if len(cut.shards) == 1:
        return f"whole on {devices}"
    return f"{('rows', 'columns')[cut.axis]} over {devices}"


def bytes_by_device(
    model: keras.Model, copies: Sequence[tf.Variable] = ()
) -> dict[str, int]:
    """Adds up the bytes of all that training changes, and of copies, by device."""
    held: dict[str, int] = collections.Counter()
    own = [place for each in variables.of(model) for place in sharded.places(each)]
    for place in [*own, *copies]:
        held[short(place.device)] += bytes_of(place)
    return dict(held)

"""Placement of embedding tables: which are sharded, and on which devices each lies.

A sharded table has its rows, or its columns, divided over all devices; see
`sharded.py`. Towers look up rows on the devices of the shards, and each device updates
its own shards.

With "auto", a table that is larger than a device's share of the memory is sharded. All
other tables stay whole, and are placed, the largest first, on the device with room and
the fewest look-ups; a trace with a batch's shapes counts the look-ups. Shards then fill
the remaining memory, around stages of any size.
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

# With "auto", only tables larger than `SMALL_BYTES` are sharded, until no device has
# more than `_UNEVEN` times its share.
SMALL_BYTES, _UNEVEN = 2**20, 1.05
# The most tables that a message lists.
_LISTED = 12


@dataclasses.dataclass(frozen=True)
class Placed:
    """The placement of a table.

    Attributes:
        variable: The table.
        axis: 0 if its rows are divided over the devices, 1 if its columns are.
        devices: The devices; a single device has the whole table.
        sizes: The number of rows, or columns, on each device.
    """

    variable: keras.Variable
    axis: int
    devices: tuple[str, ...]
    sizes: tuple[int, ...]


def left_out(model: keras.Model) -> dict[int, str]:
    """Returns why embeddings of a model stay at home, by the `id` of the table."""
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
    """Returns the tables of a built model that may be placed on several devices."""
    table_ids = {id(embedding_table(layer)) for layer in _embeddings(model)}
    wanted = table_ids - left_out(model).keys()
    return [v for v in model.trainable_variables if id(v) in wanted]


def layout(
    model: keras.Model,
    devices: Sequence[str],
    way: str,
    places_of: Callable[[keras.Variable], Sequence[str]],
    looked_up: Mapping[int, int] = MappingProxyType({}),
    apart: Sequence[keras.Variable] = (),
) -> list[Placed]:
    """Decides on which devices the tables of a built model are placed.

    With "auto", tables that are larger than each device's share are sharded by rows;
    then the largest others, too, until all devices have about as many bytes. Shards
    fill the memory that other variables leave. Within these limits, each device looks
    up about as many numbers.

    Args:
        model: The model.
        devices: The devices, without duplicates.
        way: One of `WAYS`, except for "none".
        places_of: Returns the devices of each other variable, and of its copies.
        looked_up: How many rows of each table a step looks up, by the `id` of the
            table, if known; see `look_ups`.
        apart: Tables that are placed elsewhere.
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
        # Balancing the look-ups may unbalance bytes, which are then balanced alone.
        for look_ups_of in (used, {}) if looked_up else ({},):
            placed, loads = _place(ordered, cut, load, look_ups_of, most)
            if max(loads.values()) <= most or not (look_ups_of or large):
                return placed
        cut.add(id(large[0]))


def _place(tables, cut, load, used, most):
    """Places whole tables, the largest first; sharded tables fill the rest.

    A whole table goes to the device with the fewest look-ups, among devices that then
    have at most `most` bytes; or else to the device with the most room.

    Returns:
        The placements, and the resulting bytes of each device.
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
    counts = collections.Counter()

    def note(keras_call, layer, ids):
        counts[id(embedding_table(layer))] += ids.shape.num_elements() or 0
        return keras_call(layer, ids)

    with patched(EMBEDDING_CALL, note):
        call()
    return dict(counts)


def level(loads: Iterable[int], more: int) -> float:
    """Returns the level at which `more` fills up the least loaded.

    >>> level([5, 1, 2], 3)
    3.0
    """
    sums = itertools.accumulate(sorted(loads))
    # To fill the n least loaded gives their mean; the right n gives the smallest mean.
    return min((total + more) / count for count, total in enumerate(sums, 1))


def _cut(table, axis, room):
    """Shards a table in proportion to the room on the devices."""
    count, total = table.shape[axis], sum(room.values())
    # If the sizes differ, the first shards have one more.
    ends = [
        -(-count * total_room // total)
        for total_room in itertools.accumulate(room.values())
    ]
    ends[-1] = count
    sizes = [int(b - a) for a, b in itertools.pairwise([0, *ends])]
    nonempty = [(device, n) for device, n in zip(room, sizes, strict=True) if n]
    return Placed(table, axis, *zip(*nonempty, strict=True))


def put(placed: Sequence[Placed], optimizer: keras.optimizers.Optimizer | None) -> None:
    """Moves tables and their slots to their placements."""
    for placement in placed:
        slots = optimizers.slots_of(optimizer, placement.variable) if optimizer else ()
        for variable in [placement.variable, *slots]:
            if not _lies_there(variable, placement):
                sharded.cut(
                    variable, placement.devices, placement.axis, sizes=placement.sizes
                )


def _lies_there(variable, placed):
    parts = sharded.of(variable)
    if not parameters.lies_there(parts, placed.devices, placed.axis):
        return False
    return tuple(shard.shape[parts.axis] for shard in parts.shards) == placed.sizes


def bring_home(model: keras.Model, home_of: Callable[[keras.Variable], str]) -> None:
    """Makes the sharded variables of a model whole again, on their home devices."""
    with variables.replacing(model):
        for variable in variables.of(model):
            if sharded.of(variable) is not None:
                sharded.join(variable, home_of(variable))


def lines(
    model: keras.Model,
    home_of: Callable[[keras.Variable], str],
    copies: Sequence[tf.Variable],
) -> Iterator[str]:
    """Yields messages about table placement, for built slots and copies."""
    reasons, rows = left_out(model), []
    for variable in model.variables:
        reason = reasons.get(id(variable))
        if reason is not None and sharded.of(variable) is None:
            home = home_of(variable)
            yield f"The table {variable.path} stays on {home}, whole: {reason}."
        cut = sharded.of(variable)
        if cut is not None and not isinstance(cut, ShardedParameter):
            rows.append((variable.path, words.size(bytes_of(variable)), _where(cut)))
    params = parameters.of(model.trainable_variables)
    if not rows and not params:
        return
    wide = max((len(path) for path, *_ in rows), default=0)
    messages = [f"  {path:{wide}}  {size:>11}  {where}" for path, size, where in rows]
    if len(messages) > _LISTED:
        others = words.count(len(messages) - _LISTED, "other table")
        messages[_LISTED:] = [f"  and {others}"]
    if rows:
        yield "\n".join(["Embedding tables lie on the towers' devices:", *messages])
    if params:
        size = words.size(sum(map(bytes_of, params)))
        count = f"{len(params)} of {words.count(len(model.variables), 'variable')}"
        yield f"Each device has a part of {count}, which take {size}."
    held = bytes_by_device(model, copies)
    by_device = ", ".join(
        f"{device} {words.size(held[device])}" for device in sorted(held)
    )
    yield f"Variables and optimizer slots take: {by_device}."


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
    """Returns the bytes of trained variables, slots and copies, by device."""
    held: dict[str, int] = collections.Counter()
    own = [
        tensor_variable
        for variable in variables.of(model)
        for tensor_variable in sharded.places(variable)
    ]
    for tensor_variable in [*own, *copies]:
        held[short(tensor_variable.device)] += bytes_of(tensor_variable)
    return dict(held)

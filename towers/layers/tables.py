"""Embedding tables over devices: which are cut, and where each lies.

A table that is cut has its rows, or its columns, divided evenly over all devices; see
`sharded.py`. Towers look up rows where they lie, and each device updates its own.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from towers.keras_adapter import optimizers
from towers.keras_adapter.layers import embedding_table, layers_of
from towers.layers import sharded, variables
from towers.program import words

WAYS = "none", "auto", "rows", "columns"

# With "auto", a table is cut if it is larger, or if devices differ more without.
_SMALL_BYTES, _UNEVEN = 2**20, 1.05
# A longer list is nothing to read.
_LISTED = 12


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where a table lies.

    Attributes:
        variable: The table.
        axis: 0 if its rows are divided over the devices, 1 if its columns are.
        devices: The devices; one has it whole.
    """

    variable: keras.Variable
    axis: int
    devices: tuple[str, ...]


def left_out(model: keras.Model) -> dict[int, str]:
    """Says, by id of its table, why an embedding of a model is left at home."""
    reasons = {}
    for layer in _embeddings(model):
        table = embedding_table(layer)
        if layer.lora_enabled or layer.quantization_mode or not table.trainable:
            reasons[id(table)] = "it is frozen, adapted or quantized"
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


def layout(
    model: keras.Model,
    devices: Sequence[str],
    way: str,
    home_of: Callable[[keras.Variable], str],
) -> list[Placed]:
    """Decides where the tables of a built model are to lie.

    With "auto", those that are larger than what each device is to have are cut into
    rows; then the largest other ones, too, until all devices have about as many bytes.

    Args:
        model: The model.
        devices: The devices, each once.
        way: One of `WAYS`, but for "none".
        home_of: Returns the device of each other variable.
    """
    found = {id(embedding_table(layer)) for layer in _embeddings(model)}
    wanted = found - left_out(model).keys()
    tables = [v for v in model.trainable_variables if id(v) in wanted]
    if way != "auto":
        axis = WAYS.index(way) - WAYS.index("rows")
        return [Placed(table, axis, devices) for table in tables]
    of_tables = {id(table) for table in tables}
    load = dict.fromkeys(devices, 0)
    for variable in model.variables:
        if id(variable) not in of_tables and home_of(variable) in load:
            load[home_of(variable)] += _bytes(variable)
    ideal = (sum(load.values()) + sum(map(_bytes, tables))) / len(devices)
    ordered = sorted(tables, key=_bytes, reverse=True)
    cut = {id(t) for t in ordered if _bytes(t) > max(ideal, _SMALL_BYTES)}
    while True:
        placed, loads = _place(ordered, cut, load)
        whole = [each for each in placed if len(each.devices) == 1]
        large = [each for each in whole if _bytes(each.variable) > _SMALL_BYTES]
        if max(loads.values()) <= ideal * _UNEVEN or not large:
            return placed
        cut.add(id(large[0].variable))


def _place(tables, cut, load):
    """Places the largest tables first: cut ones everywhere, others where is most room.

    Returns:
        Where they lie, and the bytes that each device has then.
    """
    load, placed = dict(load), []
    for table in tables:
        devices = tuple(load) if id(table) in cut else (min(load, key=load.get),)
        placed.append(Placed(table, 0, devices))
        for device in devices:
            load[device] += _bytes(table) // len(devices)
    return placed, load


def put(placed: Sequence[Placed], optimizer: keras.optimizers.Optimizer | None) -> None:
    """Puts tables, and the slots that they have, where they are to lie."""
    for each in placed:
        slots = optimizers.slots_of(optimizer, each.variable) if optimizer else ()
        for variable in [each.variable, *slots]:
            if not _lies_there(variable, each):
                sharded.cut(variable, each.devices, each.axis)


def _lies_there(variable, placed):
    cut = sharded.of(variable)
    if cut is None or cut.axis != placed.axis:
        return False
    count = min(len(placed.devices), variable.shape[placed.axis])
    found = [shard.device for shard in cut.shards]
    return len(found) == count and all(
        device.endswith(wanted)
        for device, wanted in zip(found, placed.devices, strict=False)
    )


def bring_home(model: keras.Model, home_of: Callable[[keras.Variable], str]) -> None:
    """Makes whole variables, where all others are, of those of a model that are cut."""
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
        if (reason := reasons.get(id(variable))) is not None:
            home = home_of(variable)
            yield f"The table {variable.path} stays on {home}, whole: {reason}."
        if (cut := sharded.of(variable)) is not None:
            rows.append((variable.path, words.size(_bytes(variable)), _where(cut)))
    if not rows:
        return
    wide = max(len(path) for path, *_ in rows)
    said = [f"  {path:{wide}}  {size:>11}  {where}" for path, size, where in rows]
    if len(said) > _LISTED:
        others = words.count(len(said) - _LISTED, "other table")
        said[_LISTED:] = [f"  and {others}"]
    yield "\n".join(["Embedding tables lie on the towers' devices:", *said])
    held = bytes_by_device(model, copies)
    each = ", ".join(f"{device} {words.size(held[device])}" for device in sorted(held))
    yield f"Variables and optimizer slots take: {each}."


def _where(cut):
    devices = ", ".join(_name(shard.device) for shard in cut.shards)
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
        held[_name(place.device)] += _bytes(place)
    return dict(held)


def _name(device):
    return device[device.rindex("/device") :]


def _bytes(variable: keras.Variable | tf.Variable) -> int:
    return variable.shape.num_elements() * tf.as_dtype(variable.dtype).size

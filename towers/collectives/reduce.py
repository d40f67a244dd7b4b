"""Adds the gradients of K towers, N each, into one set of N sums.

Each tower computes the gradient of its part of the global batch's loss (see
`towers/partition/trace.py`), so reduction only adds. A mean of means would be wrong for
unequal towers, and dividing sums at the end overflows early in float16.

`add` and `sum_gradients` run on the current device. `all_reduce` takes devices: it
packs dense gradients into a buffer for each type, and one of `ALGORITHMS` adds them.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.collectives import packing
from towers.devices.names import HOST, is_gpu, nccl_fits
from towers.keras_adapter import runtime

Gradient = tf.Tensor | tf.IndexedSlices | None

# Bytes added at once on a device that also needs memory for its own gradients.
_CHUNK_BYTES = 2**25


class Packed(NamedTuple):
    """Gradients as they were sent, packed.

    Attributes:
        places: Indices of the gradients, out of N.
        parts: For each type, the towers' buffers.
        sums: For each type, the sum of the buffers, on the first device that has it.
    """

    places: Sequence[int]
    parts: Sequence[Sequence[tf.Tensor]]
    sums: Sequence[tf.Tensor]


def sum_gradients(towers: Sequence[Sequence[Gradient]]) -> list[Gradient]:
    """Adds the gradients of all towers, variable by variable.

    Args:
        towers: K x N gradients, in the same order on each tower. A sparse gradient
            (`tf.IndexedSlices`) stays sparse; those of 16 bits are added in float32;
            `None`, for a variable that does not touch the loss, adds nothing.

    Returns:
        N sums.
    """
    return [*map(add, zip(*towers, strict=True))]


def all_reduce(
    towers: Sequence[Sequence[Gradient]],
    sources: Sequence[str],
    devices: Sequence[str],
    algorithm: str,
    members: Sequence[Sequence[str]] = (),
) -> tuple[list[list[Gradient]], Packed | None]:
    """Adds the gradients of all towers, and sends the sums to each device.

    Dense gradients are sent packed, except those of a single tower to its own device.
    Every device receives the same bits.

    Args:
        towers: The gradients of each tower that has some; see `sum_gradients`.
        sources: The device of each of these towers.
        devices: The devices that receive the sums.
        algorithm: One of `ALGORITHMS`. "device" adds on the first of `devices`.
        members: The devices of each host, if "nccl" is to add the gradients of several
            hosts; all gradients are then dense and floating.

    Returns:
        For each of `devices`, N sums; and the gradients that were sent packed.
    """
    first = towers[0]
    dense = [i for i in range(len(first)) if all(_is_dense(t[i]) for t in towers)]
    if len(towers) == 1 and {*devices} == {*sources} and len(members) < 2:
        sums = [_copies(gradient, devices) for gradient in first]
        return [list(of_device) for of_device in zip(*sums, strict=True)], None
    reduced = [{} for _ in devices]
    parts = _packed(towers, sources, dense)
    add_parts = ALGORITHMS[algorithm]
    if len(members) > 1:
        add_parts = functools.partial(_nccl, members=members)
    sums = [add_parts(buffers, devices) for buffers in parts]
    packed = Packed(dense, parts, [of_devices[0] for of_devices in sums])
    for k, device in enumerate(devices):
        with tf.device(device):
            buffers = [of_devices[k] for of_devices in sums]
            unpacked = packing.unpack(buffers, [first[i] for i in dense])
        reduced[k].update(zip(dense, unpacked, strict=True))
    for i in set(range(len(first))) - set(dense):
        with tf.device(devices[0]):
            total = add([gradients[i] for gradients in towers])
        for of_device, copy in zip(reduced, _copies(total, devices), strict=True):
            of_device[i] = copy
    return [[sums[i] for i in range(len(first))] for sums in reduced], packed


def _packed(towers, sources, places):
    """Returns, for each type, the towers' packed buffers of gradients at indices."""
    buffers = []
    for values, source in zip(towers, sources, strict=True):
        with tf.device(source):
            buffers.append(packing.pack([values[i] for i in places]))
    return [list(parts) for parts in zip(*buffers, strict=True)]


def _is_dense(gradient):
    return isinstance(gradient, tf.Tensor) and gradient.dtype.is_floating


def _copies(value, devices):
    copies = []
    for device in devices:
        with tf.device(device):
            copies.append(packing.copy(value))
    return copies


def _on_cpu(parts, devices):
    with tf.device(HOST):
        return _copies(add(parts), devices)


def _on_device(parts, devices):
    """Adds on the first device in chunks, as its memory has room for few parts."""
    sizes = _chunks(parts[0], _CHUNK_BYTES // parts[0].dtype.size)
    sums = []
    for pieces in zip(*(_split(part, sizes) for part in parts), strict=True):
        if len(sums) > 1:
            pieces = [_copy_after(sums[-2], piece) for piece in pieces]
        with tf.device(devices[0]):
            sums.append(add(pieces))
    with tf.device(devices[0]):
        return _copies(sums[0] if len(sums) == 1 else tf.concat(sums, axis=0), devices)


def _chunks(buffer, size):
    """Returns the sizes of a buffer's chunks: `size` numbers, the last one fewer."""
    full, rest = divmod(buffer.shape.num_elements(), size)
    return [size] * full + [rest] * (rest > 0 or not full)


def _split(part, sizes):
    if len(sizes) == 1:
        return [part]
    with tf.device(part.device):
        return tf.split(part, sizes)


def _copy_after(before, piece):
    # On the piece's own device, so that the piece is sent only then.
    with tf.device(piece.device), tf.control_dependencies([before]):
        return tf.identity(piece)


def _ring(parts, devices):
    """Reduce-scatter and all-gather: each device adds one chunk of the buffer.

    Each device sends and receives as much as in a ring (Patarasuk and Yuan 2009), but
    directly instead of via its neighbours.
    """
    unit, count = packing.aligned(parts[0].dtype), len(devices)
    units = parts[0].shape.num_elements() // unit
    sizes = [unit * (units // count + (k < units % count)) for k in range(count)]
    chunks, sums = [_split(part, sizes) for part in parts], []
    for k, device in enumerate(devices):
        with tf.device(device):
            sums.append(add([chunk[k] for chunk in chunks]))
    gathered = []
    for device in devices:
        with tf.device(device):
            gathered.append(tf.concat(sums, axis=0))
    return gathered


def _nccl(parts, devices, members=()):
    """Adds on the devices that have the parts, by an operation of TensorFlow's on each.

    With `members`, the parts on the devices of other hosts are added, too. Without
    GPUs, as in tests, TensorFlow sends the parts around a ring.
    """
    if len(parts) < len(devices):
        # All devices have to take part; batches this small are rare.
        return _on_device(parts, devices)
    kind, size = parts[0].dtype, parts[0].shape.num_elements()
    if not size:
        return parts  # TensorFlow cannot add empty tensors.
    # Models may have different devices, and each group has a key of its own.
    members = members or [devices]
    group = runtime.DeviceGroup(
        sum(map(len, members)), _key(f"towers {[*map(list, members)]}")
    )
    instance = _key(f"{size} {kind.name}")

    def add_all(*parts):
        sums = []
        for part, device in zip(parts, devices, strict=True):
            with tf.device(device):
                wide, order = packing.widened(part), _order(device)
                total = runtime.all_reduce(
                    wide, group, instance, order, nccl=is_gpu(device)
                )
                sums.append(packing.narrowed(total, part))
        return sums

    if tf.executing_eagerly():
        # Operations that wait for one another have to be in one graph. Only a user's
        # own eager loop on one host gets here.
        return tf.function(add_all, autograph=False)(*parts)
    return add_all(*parts)


def _key(text):
    return zlib.crc32(text.encode()) % 2**31


@functools.cache
def _order(device):
    """Returns the variable by which a device's collectives run in one order."""
    with tf.init_scope(), tf.device(device):
        return tf.Variable(0.0, trainable=False, name="order_of_sums")


# The algorithms that add packed gradients. Each takes `parts`, the towers' flat buffers
# of one type on their devices, and `devices`, which receive the sum. There may be fewer
# parts than devices, as towers without rows send none. Returns a sum on each device, of
# the type of the parts and with the same bits. Types of 16 bits are added in float32,
# as by `add`.
ALGORITHMS = {"cpu": _on_cpu, "device": _on_device, "ring": _ring, "nccl": _nccl}


def check_all_reduce(
    algorithm: str, variable_update: str, towers: Sequence[str]
) -> None:
    """Checks that towers support the algorithm; see `multi_gpu_model`."""
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"Received all_reduce_alg='{algorithm}'; expected one of "
            f"{['auto', *ALGORITHMS]}."
        )
    if variable_update != "replicated":
        raise ValueError(
            f"Received all_reduce_alg='{algorithm}' with variable_update="
            f"'{variable_update}'; it says how variable_update='replicated' adds "
            "gradients, so give that as well."
        )
    if algorithm == "nccl":
        check_nccl(towers, "all_reduce_alg")


def check_nccl(towers: Sequence[str], argument: str) -> None:
    """Checks that NCCL can add gradients; `argument` names the option."""
    if not nccl_fits(towers):
        raise ValueError(
            f"Received {argument}='nccl' for towers on {', '.join(towers)}; NCCL "
            "needs a whole GPU for each tower, so use 'ring'."
        )


def add(gradients: Sequence[Gradient]) -> Gradient:
    """Adds gradients of one variable; see `sum_gradients`."""
    gradients = [gradient for gradient in gradients if gradient is not None]
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    first = gradients[0]
    sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
    if any(sparse) and not all(sparse):
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    elif all(sparse):
        # Sparse gradients are added by concatenation: rows that several towers touched
        # appear several times, as within one batch. Indices of different types, from
        # ids of different types, become int64.
        indices = [g.indices for g in gradients]
        if len({index.dtype for index in indices}) > 1:
            indices = [tf.cast(index, tf.int64) for index in indices]
        return tf.IndexedSlices(
            values=tf.concat([g.values for g in gradients], axis=0),
            indices=tf.concat(indices, axis=0),
            dense_shape=first.dense_shape,
        )
    if first.dtype in (tf.float16, tf.bfloat16):
        total = tf.add_n([tf.cast(gradient, tf.float32) for gradient in gradients])
        return tf.cast(total, first.dtype)
    return tf.add_n(gradients)


def part_of_mean(mean: tf.Tensor, fraction: tf.Tensor) -> tf.Tensor:
    """Returns the contribution of a local batch's mean to the global batch's mean.

    The contribution of a tower without rows, which has no mean, is zero.
    """
    return tf.math.multiply_no_nan(mean, tf.cast(fraction, mean.dtype))

"""Decides whether a source is kept, in which form, and where."""

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from absl import logging

from towers.input_pipeline.cache import read, space
from towers.input_pipeline.cache.kept import KeptSource
from towers.input_pipeline.choices import CACHES, RECIPES
from towers.input_pipeline.images.recipes import takes_whole
from towers.input_pipeline.records.checks import check_image_shape
from towers.input_pipeline.sources.arrays import RowSource
from towers.input_pipeline.sources.base import IndexedSource, Source
from towers.machine import limits
from towers.program import words

_CALLED = {"pixels": "pixels", "encoded": "encoded images"}


def cached(
    source: Source,
    cache: str = "auto",
    folder: str | None = None,
    deterministic: bool = False,
    image_shape: tuple[int, ...] | None = None,
    recipe: str = "none",
    room: Callable[[str | None, bool], tuple[float, float]] = space.room,
    agree: Callable[[bool], bool] = bool,
) -> Source:
    """Keeps the examples of a source in memory or on disk, if they fit.

    The first epoch that reads the examples fills the memory. Later epochs take them by
    number: in a full shuffle, from any position, without reading or parsing files.
    Images of one size are kept as pixels and are not decoded again. Other images are
    kept as encoded files, unless `image_shape` gives all of them one size. Rows of a
    table are in memory since it was opened, if they fit. Files on disk are written by a
    pass over the data, before this returns.

    Args:
        source: a prepared source.
        cache: "memory" or "disk". "auto" uses the memory if a quarter of the free
            memory is enough. Otherwise it uses the disk, by the same measure, if there
            is a folder. "none" returns the source itself. On disk, only pixels are
            kept.
        folder: folder for the files of "disk", which later runs use as well.
        deterministic: whether only the data decide, because their order depends on
            where they are kept. "auto" then keeps up to 1 GB in memory, and nothing on
            disk.
        image_shape: (H, W, C) to which every image is resized. Images that differ in
            size, or that take more bytes than this, are then kept as pixels of this
            size. If these do not fit into memory, images that differ in size are kept
            as encoded files. None: there is no such size.
        recipe: the preparation of images. `image_shape` counts only if the recipe
            resizes before it does anything random; see ``recipes.takes_whole``.
        room: as ``space.room``; hosts that train together must decide alike.
        agree: tells whether a value is true on all of these hosts.

    Returns:
        A source of the same examples, or the source itself. A line in the log names the
        choice and its reason.

    Raises:
        ValueError: the request is impossible, or the disk is full.
        tf.errors.OpError: a record is bad; see ``find_bad_record``.
    """
    if not takes_whole(recipe):
        image_shape = None
    folder = folder and os.path.expanduser(folder)
    if source.table_sizes and cache == "auto":
        folder = None
    _check(source, cache, folder, image_shape)
    if isinstance(source, IndexedSource) and not source.encoded:
        return source
    # The source releases them, whether they are used or not.
    rows = source.in_memory()
    if cache == "none":
        return source
    fits = rows is not None and not (deterministic and rows.memory_bytes > limits.SMALL)
    if cache != "disk" and agree(fits):
        return _with_names(rows, source)
    shape = _pixels_shape(source, image_shape)
    if cache == "disk" and (shape is None or source.table_sizes):
        raise _no_pixels(source)
    plan = _plan(source, cache, shape, *room(folder, deterministic))
    if plan.where is not None and _has_doubles(plan.numbers):
        plan = plan._replace(where=None)
    kept_as = "numbers" if len(source.image_shape) == 1 else _CALLED[plan.what]
    place = {"memory": "kept in memory", "disk": f"kept in {folder}"}
    note = f"{words.size(plan.size)} of {kept_as} {place.get(plan.where, 'not kept')}"
    logging.info("%s: %s", source.name, note)
    return source if plan.where is None else _keep(source, plan, shape, folder, note)


class _Plan(NamedTuple):
    """A decision: whether examples are kept, in which form, and where.

    Attributes:
        what: "pixels" or "encoded", the form of images.
        where: in "memory" or on the "disk"; None if they are not kept.
        size: bytes that they take.
        numbers: the numbers of the records of each split; None if they are not kept.
    """

    what: str
    where: str | None
    size: int
    numbers: Mapping[str, np.ndarray] | None


def _check(
    source: Source, cache: str, folder: str | None, image_shape: tuple[int, ...] | None
) -> None:
    if cache not in CACHES:
        raise ValueError(f"cache is {cache!r}, expected one of {', '.join(CACHES)}")
    if image_shape is not None:
        check_image_shape(source, image_shape)
    if cache == "disk" and folder is None:
        raise ValueError("cache is 'disk', but there is no folder: name one")
    if folder is not None and os.path.isfile(folder):
        raise ValueError(f"folder is {folder}, which is a file: name a folder")


def _no_pixels(source: Source) -> ValueError:
    if source.table_sizes:
        return ValueError(
            f"cache is 'disk', but {source.name} has columns of categories, which are "
            "kept in memory only: expected 'auto', 'memory' or 'none'"
        )
    whole = ", ".join(repr(name) for name in RECIPES if takes_whole(name))
    return ValueError(
        f"cache is 'disk', but {source.name} has images of different sizes, or of a "
        "size that is not known: expected 'memory' or 'none', or a recipe that begins "
        f"by resizing all of them to one size ({whole})"
    )


def _plan(
    source: Source,
    cache: str,
    shape: tuple[int, ...] | None,
    memory: float,
    disk: float,
) -> _Plan:
    files, pixels, numbers = space.encoded_bytes(source), None, None
    sizes = source.splits.values()
    if shape is not None:
        # Counting may mean reading all of it.
        if None in sizes and (
            cache != "auto" or space.estimate(source, files, shape) <= max(memory, disk)
        ):
            numbers = _numbers(source)
            sizes = [*map(len, numbers.values())]
        if None not in sizes:
            pixels = sum(sizes) * space.image_bytes(shape)
    encoded = files if None in source.image_shape else None
    what, where = _decide(cache, pixels, encoded, memory, disk)
    if where is not None and numbers is None:
        numbers = _numbers(source)
    return _Plan(what, where, pixels if what == "pixels" else files, numbers)


def _numbers(source: Source) -> dict[str, np.ndarray]:
    """Returns the numbers of the records of each split, training first."""
    return {split: source.numbers(split) for split in read.in_order(source)}


def _has_doubles(numbers: Mapping[str, np.ndarray]) -> bool:
    """Tells whether a record comes twice, as in a split of overlapping parts."""
    return any(len(np.unique(some)) < len(some) for some in numbers.values())


def _keep(
    source: Source,
    plan: _Plan,
    shape: tuple[int, ...] | None,
    folder: str | None,
    note: str,
) -> RowSource | KeptSource:
    """Returns the kept source; for the disk, reads the source first."""
    if plan.where == "memory":
        shape = None if plan.what == "encoded" else shape
        kept = KeptSource(source, plan.numbers, shape, note)
        return _with_names(kept, source)
    splits = {split: len(some) for split, some in plan.numbers.items()}
    images, labels = read.map_pixels(source, (sum(splits.values()), *shape), folder)
    kept = RowSource(
        source.name,
        images,
        labels,
        splits,
        source.target,
        shape,
        source.origin,
        note,
    )
    return _with_names(kept, source)


def _with_names(kept: RowSource | KeptSource, source: Source) -> RowSource | KeptSource:
    """Gives the kept source all that is known of its origin."""
    kept.notes = source.notes
    kept.image_fields, kept.label_field = source.image_fields, source.label_field
    kept.table_sizes, kept.vocabularies = source.table_sizes, source.vocabularies
    kept.column_kinds = source.column_kinds
    kept.missing, kept.missing_columns = source.missing, source.missing_columns
    kept.moments = source.moments
    return kept


def _pixels_shape(
    source: Source, wanted: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Returns the shape in which all examples can be decoded, the smaller of two."""
    own = tuple(source.image_shape)
    if wanted is None or len(own) == 1:
        return None if None in own else own
    if None in own or space.image_bytes(wanted) < space.image_bytes(own):
        return tuple(wanted)
    return own


def _decide(
    cache: str, pixels: int | None, encoded: int | None, memory: float, disk: float
) -> tuple[str, str | None]:
    """Decides what to keep, and where.

    Args:
        cache: "auto", "memory" or "disk".
        pixels: Bytes of all pixels; None if they cannot be kept.
        encoded: Bytes of encoded images; None if pixels are kept instead.
        memory: Bytes that memory has room for.
        disk: Bytes that the disk has room for.

    Returns:
        "pixels" or "encoded"; and "memory", "disk", or None if they are not kept.
    """
    if cache == "disk":
        return "pixels", "disk"
    sizes = {"pixels": pixels, "encoded": encoded}
    sizes = {what: size for what, size in sizes.items() if size is not None}
    for what, size in sizes.items():
        if size <= memory:
            return what, "memory"
    if cache == "memory":
        return min(sizes, key=sizes.get), "memory"
    if pixels is not None and pixels <= disk:
        return "pixels", "disk"
    return ("encoded" if pixels is None else "pixels"), None

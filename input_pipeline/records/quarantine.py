"""Finds the bad records of a source, which training passes over."""

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from towers.input_pipeline.images import masks
from towers.input_pipeline.images.decode import decode_image
from towers.input_pipeline.records.checks import assert_good
from towers.input_pipeline.sources.base import Source, fingerprint
from towers.input_pipeline.sources.files.bad_records import check_records
from towers.input_pipeline.sources.files.record import FAULTS, BadRecordError, Record
from towers.machine import limits
from towers.program import progress, small_file, voice, whole_file
from towers.program.progress import EARLY_S, Progress

_AT_ONCE = 256


class Hosts(Protocol):
    """The hosts that look at the records together, each at a part of them.

    Attributes:
        count: the number of hosts.
        index: the index of this host.
    """

    count: int
    index: int

    def exchange(self, value: Any) -> list[Any]:
        """Returns the value of each host, as JSON."""


class _Alone:
    count, index = 1, 0

    def exchange(self, value):
        return [value]


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """The bad records of a source.

    Attributes:
        source: the name of the source.
        fingerprint: a digest of the source and its files, as they were.
        bad: the bad records, for each split.
        splits: the number of good records of each split.
    """

    source: str
    fingerprint: str
    bad: Mapping[str, Sequence[Record]]
    splits: Mapping[str, int]

    def __len__(self) -> int:
        """Returns the number of records that are passed over, as far as known."""
        return _count(itertools.chain(*self.bad.values()))


def inspect(
    source: Source,
    splits: Sequence[str],
    most: int,
    known: Sequence[Quarantine] = (),
    hosts: Hosts | None = None,
) -> Quarantine:
    """Reads and decodes all records of a source, and notes the bad ones.

    It takes the time of one epoch of reading, and where there is a bad record, a second
    look at them one by one.

    Args:
        source: a prepared source.
        splits: the splits to look at.
        most: the largest number of bad records to accept.
        known: earlier results. If one is for this source, and no file has changed
            since, nothing is read. With several hosts, the first host's results count.
        hosts: the hosts that call this together, and look at a part of the records
            each. All get the same result. None: there are no others.

    Raises:
        BadRecordError: there are more bad records than `most`, or a split has no good
            one.
    """
    hosts, key = hosts or _Alone(), fingerprint(source)
    same = [
        dataclasses.asdict(earlier)
        for earlier in known
        if earlier.fingerprint == key and [*earlier.splits] == [*splits]
    ]
    if same := hosts.exchange(same[:1])[0]:
        quarantine = _from_json(same[0])
        _check_count(source, [*itertools.chain(*quarantine.bad.values())], most)
        return quarantine
    bad, good = {}, {}
    for split in splits:
        # For pictures, these are only faults of labels.
        if source.faults is not None and not source.encoded:
            bad[split] = [*source.faults.get(split, ())]
            good[split] = source.good[split]
        else:
            bad[split], good[split] = _look_at(source, split, most, hosts)
        _check_count(source, [*itertools.chain(*bad.values())], most)
        if not good[split]:
            raise BadRecordError(
                f"{source.name} has no good record in its split {split}; the first bad "
                f"one is {bad[split][0]}"
            )
    return Quarantine(source.name, key, bad, good)


def _look_at(
    source: Source, split: str, most: int, hosts: Hosts
) -> tuple[list[Record], int]:
    """Returns the bad records of a split, and the number of good ones, on all hosts."""
    for path in source.files(split) if source.labels_need_checking else ():
        if next(source.walk(path), None) is None:
            voice.warn(f"{path} holds no record.")
    counts = hosts.exchange(_count_if_good(source, split, hosts))
    if None not in counts:
        return [], sum(counts)
    some, count = _sort(source, split, most, hosts)
    some = [dataclasses.asdict(record) for record in some]
    of_hosts = hosts.exchange([some, count])
    bad = [_record(entry) for some, _ in of_hosts for entry in some]
    bad.sort(key=lambda record: record.number)
    return bad, sum(count for _, count in of_hosts)


def write(quarantines: Sequence[Quarantine], path: str) -> None:
    """Writes the bad records of sources, for people and for ``read``."""
    whole_file.write_json(
        path, [dataclasses.asdict(of_source) for of_source in quarantines]
    )


def read(path: str) -> list[Quarantine]:
    """Reads the results of `write`; empty if the file is missing, or another kind."""
    try:
        return [_from_json(entry) for entry in small_file.read_json(path, list)]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        voice.warn(f"{path} cannot be read ({error}), so all records are read again.")
        return []


def _from_json(entry: dict[str, Any]) -> Quarantine:
    bad = {split: [*map(_record, some)] for split, some in entry.pop("bad").items()}
    return Quarantine(bad=bad, **entry)


def _record(entry: dict[str, Any]) -> Record:
    return Record(**{**entry, "gap": entry["gap"] and tuple(entry["gap"])})


@tf.autograph.experimental.do_not_convert
def _count_if_good(source: Source, split: str, hosts: Hosts) -> int | None:
    """Counts the records of this host's part of a split; None if one is bad."""
    try:
        paths = source.files(split)[hosts.index :: hosts.count]
        if not all(map(source.is_whole, paths)):
            return None
    except (OSError, tf.errors.OpError):  # a file is missing
        return None

    def parse(_, records):
        images, labels = source.parse(records)
        assert_good(images, labels, source.target, source.missing != "fail")
        return images, labels

    def decode(image, label):
        if label.dtype == tf.string:
            label = masks.decode(source.load_mask(label))
            assert_good(label, label, source.target)
        return decode_image(source.load(image), source.image_shape), label

    auto = tf.data.AUTOTUNE
    batches = source.batches(split, _AT_ONCE).shard(hosts.count, hosts.index)
    examples = batches.map(parse, auto).unbatch()
    if source.encoded:
        examples = examples.map(decode, auto)
    ones = examples.map(lambda *_: 1).batch(_AT_ONCE).prefetch(auto)
    size = source.splits[split]
    total = None if size is None else -(-size // hosts.count)
    try:
        with (
            tf.device("/CPU:0"),
            Progress(f"Checking {source.name}", total, "records", EARLY_S) as shown,
        ):
            for some in ones:
                shown.add(len(some))
            return shown.done
    except FAULTS:
        return None


def _sort(
    source: Source, split: str, most: int, hosts: Hosts
) -> tuple[list[Record], int]:
    """Returns bad records of this host's files of a split, and the number of good ones.

    It looks no further where there are more bad ones than `most`.
    """

    def of_file(path):
        bad, good = [], 0
        for record in check_records(source, path, split):
            if record.fault:
                bad.append(record)
                if _count(bad) > most:
                    break
            else:
                good += 1
        return bad, good

    bad, count = [], 0
    with concurrent.futures.ThreadPoolExecutor(limits.cpu_count()) as pool:
        paths = source.files(split)[hosts.index :: hosts.count]
        what = f"Looking for bad records in {source.name}"
        results = progress.over(pool.map(of_file, paths), what, len(paths), "files")
        for some, good in results:
            bad, count = bad + some, count + good
            if _count(bad) > most:
                pool.shutdown(cancel_futures=True)
                break
    return bad, count


def _count(bad: Iterable[Record]) -> int:
    # An unreadable part of a file may hold records of two splits.
    counts = {record.where: record.count or 1 for record in bad}
    return sum(counts.values())


def _check_count(source: Source, bad: Sequence[Record], most: int) -> None:
    if _count(bad) > most:
        raise BadRecordError(
            f"{source.name} has more bad records than the {most} to be passed over, "
            f"the first one being {bad[0]}"
        )

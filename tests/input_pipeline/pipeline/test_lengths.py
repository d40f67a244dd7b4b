"""Batches of rows of like length."""

import numpy as np
import pytest

from towers.input_pipeline import ArraySource, make_dataset, open_source

_BATCH = 8


def _csv(folder):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 100)
    rows = [f"{'x' * n},{n % 2}\n" for n in lengths]
    (folder / "a.csv").write_text("text,label\n" + "".join(rows))
    return open_source(
        f"csv:{folder}/a.csv", text_column="text", sequence_length=40, eval_fraction=0
    )


def _conll(folder):
    rng = np.random.default_rng(0)
    sentences = [
        "".join(f"w{k} t{k % 3}\n" for k in range(n)) for n in rng.integers(1, 60, 100)
    ]
    (folder / "a.txt").write_text("\n".join(sentences))
    return open_source(f"conll:{folder}/a.txt", sequence_length=40, eval_fraction=0)


def _read(source, **options):
    options = {"group_by_length": True, "seed": 3, **options}
    return [*make_dataset(source, "train", _BATCH, **options).as_numpy_iterator()]


def _rows(batches):
    """All rows, whatever their padding, in order."""
    found = []
    for tokens, *others in batches:
        for x, *ys in zip(tokens, *others, strict=True):
            size = np.count_nonzero(x)
            found.append(tuple(tuple(np.ravel(y)[:size].tolist()) for y in (x, *ys)))
    return found


def _assert_same(found, wanted):
    for batch, other in zip(found, wanted, strict=True):
        for part, theirs in zip(batch, other, strict=True):
            np.testing.assert_array_equal(part, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_csv, _conll])
def test_each_row_comes_once_with_little_padding(tmp_path, make):
    source = make(tmp_path)
    plain = _read(source, group_by_length=False)
    first, second = (_read(source, start_epoch=epoch) for epoch in (0, 1))
    assert sorted(_rows(first)) == sorted(_rows(second)) == sorted(_rows(plain))
    assert _rows(first) != _rows(second)
    # Only the last batch is short.
    assert [len(batch[0]) for batch in first] == [len(batch[0]) for batch in plain]
    for tokens, *others in first:
        longest = np.count_nonzero(tokens, axis=1).max()
        # Of 40, eighths.
        assert tokens.shape[1] == -(-longest // 5) * 5
        for each in others:
            assert each.ndim == 1 or each.shape == tokens.shape
    computed, before = (sum(b[0].size for b in found) for found in (first, plain))
    assert computed < 0.9 * before
    # The longest do not always come first.
    widths = [tokens.shape[1] for tokens, *_ in first]
    assert sorted(widths)[::-1] != widths


@pytest.mark.slow
def test_the_order_may_be_entered_anywhere(tmp_path):
    source = _csv(tmp_path)
    whole, following = _read(source), _read(source, start_epoch=1)
    _assert_same(_read(source), whole)
    rows = source.splits["train"]
    # Within what is sorted together (3 batches), at its end, and at the epoch's.
    for batches in (4, len(whole)):
        start = min(batches * _BATCH, rows)
        _assert_same(_read(source, start_record=start), whole[batches:])
    endless = make_dataset(
        *(source, "train", _BATCH),
        **dict(group_by_length=True, seed=3, repeat=True, start_record=16),
    )
    wanted = [*whole[2:], *following]
    _assert_same(endless.take(len(wanted)).as_numpy_iterator(), wanted)


def test_evaluation_has_one_order(tmp_path):
    source = _csv(tmp_path)
    first = _read(source, training=False)
    _assert_same(_read(source, training=False, seed=4), first)
    assert sorted(_rows(first)) == sorted(_rows(_read(source)))


def test_a_run_does_not_go_on_in_another_order(tmp_path):
    source = _csv(tmp_path)
    orders = [
        make_dataset(source, "train", 8, group_by_length=each).pipeline.order
        for each in (False, True)
    ]
    assert {n for n in orders[0] if orders[0][n] != orders[1][n]} == {
        "grouped by length"
    }


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_workers_of_a_service_group(tmp_path, service, deterministic):
    source = _conll(tmp_path)
    found = _read(source, data_service=service, deterministic=deterministic)
    here = _read(source)
    if deterministic:
        _assert_same(found, here)
    assert sorted(_rows(found)) == sorted(_rows(here))
    assert [len(tokens) for tokens, *_ in found] == [len(x) for x, *_ in here]


def test_pictures_have_no_length():
    source = ArraySource(np.zeros([9, 4, 4, 1], np.uint8), np.zeros(9, int))
    with pytest.raises(ValueError, match="has no padded rows of tokens"):
        make_dataset(source, "train", 8, group_by_length=True)

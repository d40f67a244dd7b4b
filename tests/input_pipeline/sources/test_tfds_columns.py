"""Sets of TFDS with columns, such as MovieLens, written by TFDS's own builder."""

from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests.input_pipeline.sources.test_tfds_targets import _Builder, _open
from tests.towers.predict.runs import finished, predicted
from towers.input_pipeline import make_dataset, open_source
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources.targets import Target
from towers.input_pipeline.sources.tfds.tfds_source import TFDSSource

JOBS = ["artist", "doctor", "writer"]


def _ratings(folder):
    """Writes files as those of MovieLens 100K: 3 users, 2 films, 30 ratings."""
    folder.mkdir()
    users = [f"{u}|{20 + u}|{'MF'[u % 2]}|{job}|9000{u}" for u, job in enumerate(JOBS)]
    films = [
        f"{m}|Film {m}|1-Jan-1995||url|" + "|".join("01"[g == m] for g in range(19))
        for m in range(2)
    ]
    ratings = [f"{n % 3}\t{n % 2}\t{1 + n % 5}\t{880000000 + n}" for n in range(30)]
    for name, lines in (("user", users), ("item", films), ("data", ratings)):
        (folder / f"u.{name}").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Where TFDS's own builder of MovieLens has written such files."""
    root = tmp_path_factory.mktemp("movielens")
    _ratings(root / "ml-100k")
    with mock.patch.object(
        tfds.download.DownloadManager, "download_and_extract", lambda *_: str(root)
    ):
        open_source("tfds:movielens/100k-ratings", data_dir=root / "tfds").prepare()
    return root / "tfds"


def _movielens(data_dir, **options):
    source = open_source("tfds:movielens/100k-ratings", data_dir=data_dir, **options)
    source.prepare()
    return source


@pytest.mark.slow
def test_movielens(data_dir):
    source = _movielens(data_dir)
    assert source.target == Target("numbers", 1, ("user_rating",))
    assert source.input_kind == "columns" and source.splits == {"train": 30}
    numbers = ["timestamp", "user_gender", "bucketized_user_age", "raw_user_age"]
    assert [*source.image_fields] == numbers
    sizes = {"movie_id": 3, "movie_title": 3, "user_id": 4, "user_occupation_text": 4}
    assert source.table_sizes == {
        **sizes,
        "user_zip_code": 4,
        # The classes of TFDS's builder, and none.
        "user_occupation_label": 23,
    }
    guessed, left = source.notes
    assert guessed.startswith("The target is the feature 'user_rating'; --label_col")
    assert left == (
        "Left out, because not a single number, text or class: movie_genres (Sequence)."
    )
    assert quarantine.inspect(source, ["train"], 0).splits == {"train": 30}
    ((x, y),) = make_dataset(source, "train", 30, training=False)
    seen = set()
    for row in range(30):
        words = {
            name: ("", *source.vocabularies[name])[each[row]]
            for name, each in x.items()
            if name != "dense"
        }
        time, male, bucket, age = x["dense"][row].numpy()
        user, film = int(words["user_id"]), int(words["movie_id"])
        seen.add((user, film, float(y[row, 0])))
        assert (age, bucket, male) == (20 + user, 18, user % 2 == 0)
        assert words["movie_title"] == f"Film {film}" and time // 1e6 == 880
        assert words["user_occupation_text"] == JOBS[user]
        label = {"doctor": "doctor/health care"}.get(JOBS[user], JOBS[user])
        assert words["user_occupation_label"] == label
    assert seen == {(n % 3, n % 2, 1.0 + n % 5) for n in range(30)}


@pytest.mark.slow
def test_named_features_and_a_part_of_the_ids(data_dir):
    names = {"feature_columns": ["raw_user_age", "user_id"]}
    source = _movielens(data_dir, **names, label_column="user_gender")
    assert source.target == Target("class", 2, ("False", "True"))
    assert source.image_shape == (1,) and source.table_sizes == {"user_id": 4}
    ((x, y),) = make_dataset(source, "train", 30)
    users = tf.gather([-1, 0, 1, 2], x["user_id"])
    np.testing.assert_array_equal(y, users % 2 == 0)
    # Of another run.
    known = {"user_id": ["2", "0"]}
    source = _movielens(data_dir, **names, vocabularies=known)
    ((x, _),) = make_dataset(source, "train", 30)
    assert {*zip(x["dense"][:, 0].numpy(), x["user_id"].numpy(), strict=True)} == {
        *[(20, 2), (21, 0), (22, 1)]
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"label_column": "rating"}, "label_column is 'rating', but .*'user_rating'"),
        ({"label_column": "movie_id"}, "has a Tensor there: expected numbers"),
        ({"label_column": "timestamp"}, r"whole ones only with --task=regression"),
        ({"feature_columns": ["movie_genres"]}, r"has movie_genres \(Sequence\): exp"),
        ({"target": "mask"}, "is not a set of labelled images"),
    ],
)
def test_what_is_no_column(data_dir, options, said):
    with pytest.raises(ValueError, match=said):
        _movielens(data_dir, **options)


def test_a_set_without_a_target_is_not_guessed(data_dir):
    with pytest.raises(
        ValueError, match=r"found movie_id .* the target with --label_c"
    ):
        open_source("tfds:movielens/100k-movies", data_dir=data_dir)


class TinyShips(_Builder):
    """As titanic: supervised keys of several features."""

    features: ClassVar = {
        "age": np.float32,
        "port": tfds.features.ClassLabel(names=["a", "b"]),
        "unused": np.float32,
        "survived": tfds.features.ClassLabel(names=["no", "yes"]),
    }
    keys = ({"age": "age", "port": "port"}, "survived")

    def one(self, index):
        # One port is not known.
        port = -1 if index == 7 else index % 2
        return {"age": index, "port": port, "unused": 0, "survived": index % 2}


class TinyReviews(_Builder):
    """As imdb_reviews: a text to be read."""

    features: ClassVar = {
        "text": tfds.features.Text(),
        "label": tfds.features.ClassLabel(num_classes=2),
    }
    keys = ("text", "label")


def test_supervised_keys_of_several_features(tmp_path):
    source = _open(TinyShips, tmp_path)
    assert source.notes == () and source.class_names == ("no", "yes")
    ((x, y),) = make_dataset(source, "train", 8)
    assert [*x] == ["dense", "port"]
    ages = x["dense"][:, 0].numpy().astype(int)
    np.testing.assert_array_equal(y, ages % 2)
    np.testing.assert_array_equal(x["port"], np.where(ages == 7, 0, 1 + ages % 2))


def test_a_text_to_be_read_is_no_category(tmp_path):
    with pytest.raises(ValueError, match="is not a set of labelled images"):
        TFDSSource(TinyReviews(data_dir=tmp_path), "tfds:tiny_reviews")


@pytest.mark.slow
def test_a_run_on_movielens(data_dir, tmp_path):
    flags = "--dataset=tfds:movielens/100k-ratings", f"--data_dir={data_dir}"
    parts = ("--splits=train[:80%],train[80%:]",)
    job = finished(
        *flags, *parts, "--model=dlrm", "--model_options=width=2", model_dir=tmp_path
    )
    assert job.setup.task.name == "regression"
    assert job.data.scaling.names == tuple(job.data.source.image_fields)
    columns = {
        **{"timestamp": 880000003, "user_gender": 1, "bucketized_user_age": 18},
        **{"raw_user_age": 20, "movie_id": "1", "movie_title": "Film 1"},
        **{"user_id": "0", "user_occupation_label": "artist"},
        **{"user_occupation_text": "artist", "user_zip_code": "90000"},
    }
    lines = ",".join(columns), ",".join(map(str, columns.values()))
    (tmp_path / "new.csv").write_text("\n".join(lines))
    (row,) = predicted(tmp_path, tmp_path / "new.csv")
    batches = [*job.data.training.take(1), *job.data.evaluation]
    x = {name: tf.concat([x[name] for x, _ in batches], 0) for name in batches[0][0]}
    scores = job.model(x).numpy()[:, 0]
    fits = ((x["user_id"] == 1) & (x["movie_id"] == 2)).numpy()
    # Of these, one was rated in that second.
    assert fits.sum() == 5
    assert np.isclose(scores[fits], float(row["value"]), rtol=1e-5).sum() == 1

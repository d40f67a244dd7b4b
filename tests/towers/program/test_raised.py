"""The user's own line in what TensorFlow says of an error in Python."""

import pytest
import tensorflow as tf

from towers.train import __main__


def _rows():
    yield 1.0
    raise KeyError("no such photograph")


def _mapped(x):
    raise RuntimeError(f"bad: {x}")


def _of_generator():
    return tf.data.Dataset.from_generator(
        _rows, output_signature=tf.TensorSpec([], tf.float32)
    )


def _of_map():
    data = tf.data.Dataset.range(2)
    return data.map(lambda x: tf.numpy_function(_mapped, [x], tf.int64))


@pytest.mark.parametrize(
    ("make", "function", "words"),
    [
        (_of_generator, _rows, "KeyError: 'no such photograph'"),
        (_of_map, _mapped, "RuntimeError: bad: 0"),
    ],
)
def test_the_line_that_raised(make, function, words):
    with pytest.raises(tf.errors.OpError) as caught:
        [*make()]
    line = function.__code__.co_firstlineno + (2 if function is _rows else 1)
    wanted = f"{__file__}:{line}, in {function.__name__}: {words}"
    assert __main__.raised_in_graph(str(caught.value)) == wanted


def test_an_error_of_tensorflow_has_no_line():
    with pytest.raises(tf.errors.OpError) as caught:
        tf.io.decode_png(b"no picture")
    assert __main__.raised_in_graph(str(caught.value)) is None

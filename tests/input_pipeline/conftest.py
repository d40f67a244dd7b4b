"""Test data, made with Pillow and TensorFlow's own writer."""

import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests import once
from towers.input_pipeline import open_source


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The digits, written once for all tests (which must not change the files)."""

    def make(path):
        open_source("digits", data_dir=path).prepare()
        return path

    path = once.make(tmp_path_factory, "digits", make)
    source = open_source("digits", data_dir=path)
    source.prepare()
    return source


@pytest.fixture(scope="session")
def encode():
    """Encodes a uint8 array as PNG or JPEG bytes."""

    def encode_image(pixels, image_format="PNG"):
        buffer = io.BytesIO()
        Image.fromarray(np.asarray(pixels)).save(buffer, image_format)
        return buffer.getvalue()

    return encode_image


@pytest.fixture(scope="session")
def example():
    """Serializes a tf.Example of bytes and integers."""

    def make_example(**fields):
        features = {
            key.replace("__", "/"): (
                tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
                if isinstance(value, bytes)
                else tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
            )
            for key, value in fields.items()
        }
        return tf.train.Example(
            features=tf.train.Features(feature=features)
        ).SerializeToString()

    return make_example


@pytest.fixture(scope="session")
def image_example(encode, example):
    """Serializes an image and a label under the default names."""

    def make_example(pixels, label):
        return example(image__encoded=encode(pixels), image__class__label=label)

    return make_example


@pytest.fixture(scope="session")
def write_tfrecord():
    """Writes serialized records to a TFRecord file."""

    def write(path, records):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
        return str(path)

    return write


@pytest.fixture(scope="session")
def grey():
    """An 8 by 8 coloured image of one value."""
    return lambda value: np.full([8, 8, 3], value, np.uint8)


@pytest.fixture(scope="module")
def service():
    """A dispatcher and two workers; gives the address."""
    from tensorflow.data.experimental import service

    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    address = dispatcher.target.partition("://")[2]
    # Before it ends, a worker waits for its next heartbeat: by default, for 30 s.
    config = service.WorkerConfig(address, heartbeat_interval_ms=500)
    workers = [service.WorkerServer(config) for _ in range(2)]
    yield dispatcher.target
    del workers, dispatcher

"""tf.data: the parts of a data set, and the threads and functions behind it."""

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.dataset_metadata_pb2 import Metadata
from tensorflow.core.framework.model_pb2 import ModelProto, NodeClass
from tensorflow.python.ops import script_ops

__all__ = [
    "Metadata",
    "ModelProto",
    "NodeClass",
    "dataset_of",
    "free_aside",
    "functions_of",
    "guard_python",
    "inputs_of",
    "metadata_of",
]


# Each iterator may hold full buffers of batches; if more are left, training waits.
_MOST_FREED, _MOST_LEFT, _MOMENT_S = 4, 4, 0.1
_known: weakref.WeakSet[tf.data.Iterator] = weakref.WeakSet()
# Tensors that discarded iterators leave behind, perhaps during a garbage collection.
_left: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()


def free_aside(iterator: tf.data.Iterator) -> None:
    """Lets a thread free an iterator's resources once the iterator is discarded.

    Otherwise training waits: TensorFlow 2.21 waits until a thread that tunes the data
    set wakes up, which sleeps for up to a minute. TensorFlow wakes that thread before
    it tells the thread to end (`StartCancel` in tsl/framework/cancellation.cc), so the
    thread may go to sleep again.
    """
    if iterator in _known:
        return
    _start_freeing()
    _known.add(iterator)
    behind = tf.nest.flatten(iterator, expand_composites=True)
    weakref.finalize(iterator, _leave, behind).atexit = False


def _leave(behind):
    if _left.qsize() < _MOST_LEFT:
        _left.put(behind)


@functools.cache
def _start_freeing():
    for k in range(_MOST_FREED):
        name = f"towers-free-{k}"
        threading.Thread(target=_free, name=name, daemon=True).start()


def _free():
    while True:
        behind = _left.get()
        # The caller that dropped the iterator releases it a moment later, and must not
        # be the last to do so.
        time.sleep(_MOMENT_S)
        del behind


def guard_python(wrap: Callable[[Callable], Callable]) -> None:
    """Wraps the caller of all functions of `tf.numpy_function` and `tf.py_function`.

    `Dataset.from_generator`, and so Keras's own data sets, use these functions.
    """
    registry = script_ops.FuncRegistry
    call, wrapped = registry.__call__, wrap(registry.__call__)

    @functools.wraps(call)
    def called(self, token, *arguments):
        # Generators may end at any time; TensorFlow reports the ones that could not.
        ends = getattr(self.get(token), "__name__", "") == "finalize_py_func"
        return (call if ends else wrapped)(self, token, *arguments)

    registry.__call__ = called


def dataset_of(iterator: tf.data.Iterator) -> tf.data.Dataset | None:
    """Returns the data set that an iterator reads."""
    return iterator._dataset


def functions_of(dataset: tf.data.Dataset) -> Sequence[Any]:
    """Returns the functions of a data set's last transformation.

    Each has a `function` with a `name` in bytes.
    """
    return dataset._functions()


def inputs_of(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """Returns the data sets that a data set's last transformation reads."""
    return dataset._inputs()


def metadata_of(dataset: tf.data.Dataset) -> Metadata:
    """Returns the metadata of a data set's last transformation, such as its name."""
    return dataset._metadata

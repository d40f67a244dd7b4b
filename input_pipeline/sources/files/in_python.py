"""Runs Python within a graph, where an error is no stack trace."""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from towers.program.python_calls import until_exit


def call(
    function: Callable[..., Sequence[np.ndarray]],
    arguments: Sequence[tf.Tensor],
    types: Sequence[tf.DType],
) -> list[tf.Tensor]:
    """Calls a function of arrays that returns arrays of some types.

    TensorFlow logs the stack of errors in Python, even of expected ones. So a
    ``ValueError`` becomes an InvalidArgumentError here.
    """

    @until_exit
    def run(*arguments):
        try:
            return b"", *function(*arguments)
        except ValueError as error:
            nothing = (np.empty([0], kind.as_numpy_dtype) for kind in types)
            return str(error).encode(), *nothing

    outputs = [tf.string, *types]
    fault, *results = tf.numpy_function(run, arguments, outputs, stateful=False)
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(fault, ""), [fault])]):
        return [tf.identity(result) for result in results]

"""The `replicated` builder: every tower has a copy of the variables, and updates it.

Each step, every tower computes its part of the gradient with its own copy; the parts
are added by all-reduce, packed; then every tower applies the same update. So the copies
stay equal, and only gradients travel. The recipe is that of Horovod (Sergeev and Del
Balso 2018) and of tf_cnn_benchmarks' `variable_update=replicated`.

The model's own variables are the first tower's copy, so whoever reads them finds them
current. Where they may have been changed from outside, the other copies are made anew:
at the start of `fit` and of each epoch, and before each call of training if a callback
runs in between that may change them (`listeners.py`).
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders.base import Values
from towers.builders.parameter_server import ParameterServer
from towers.collectives import packing, placing, reduce
from towers.devices import is_gpu
from towers.keras_adapter.optimizers import learning_rate_variable
from towers.keras_adapter.variables import swapped_values, take_identity
from towers.layers import overwritten


class Replicated(ParameterServer):
    """Towers that keep copies of the variables, and exchange gradients only.

    Attributes:
        all_reduce_alg: How gradients are added: a key of `reduce.ALGORITHMS`.
    """

    def __init__(self, *args: Any, all_reduce_alg: str = "auto", **kwargs: Any):
        """See `Builder`; `home` has to be the first tower's device."""
        super().__init__(*args, **kwargs)
        if all_reduce_alg == "auto":
            all_reduce_alg = "device" if is_gpu(self.home) else "cpu"
        self.all_reduce_alg = all_reduce_alg

    def reset_traces(self) -> None:
        """Forgets the copies, too; see `Builder.reset_traces`."""
        super().reset_traces()
        # The variables that towers have copies of, trainable ones first, and for each
        # tower but the first the copies.
        self._originals: Sequence[keras.Variable] = ()
        self._copies: Sequence[Sequence[tf.Variable]] = ()
        self._stale = True

    def mark_copies_stale(self) -> None:
        """Has the copies made anew before the next step."""
        super().mark_copies_stale()
        self._stale = True

    def create_variables(self, data: Any) -> None:
        """Creates the copies, too; see `Builder.create_variables`."""
        super().create_variables(data)
        if self._originals:
            return
        optimizer = self.model.optimizer
        self._originals = [
            *self.model.trainable_variables,
            *(optimizer.variables if optimizer is not None else ()),
        ]
        with tf.init_scope():
            self._copies = [self._copy(device) for device in self.devices[1:]]
        self._stale = False

    def train_function(
        self, scope: Callable[[], contextlib.AbstractContextManager]
    ) -> Callable[[Any], dict[str, tf.Tensor]]:
        """See `Builder.train_function`."""
        train = super().train_function(scope)
        broadcast = self.broadcast_variables
        if not self.model.run_eagerly:
            broadcast = tf.function(broadcast, autograph=False)

        def function(iterator):
            if (self._stale or self.callbacks_may_write) and self._originals:
                with scope():
                    broadcast()
                self._stale = False
            return train(iterator)

        return function

    def broadcast_variables(self) -> None:
        """Gives all copies the values of the model's own variables."""
        originals = [variable.value for variable in self._originals]
        if not originals:
            return
        with tf.device(self.home):
            values = [tf.convert_to_tensor(original) for original in originals]
            buffers = packing.pack(values)
        for device, copies in zip(self.devices[1:], self._copies, strict=True):
            with tf.device(device):
                received = packing.unpack(buffers, values)
                for copy, value in zip(copies, received, strict=True):
                    copy.assign(value)

    def copies(self) -> list[tf.Variable]:
        """Returns the copies of all towers but the first; see `Builder.copies`."""
        return [copy for copies in self._copies for copy in copies]

    def assign_state(self, state: Sequence[tf.Tensor | None]) -> None:
        """Assigns to the copies, too, what layers assign to trainable variables."""
        super().assign_state(state)
        # Before any training there are none.
        for device, copies in zip(self.devices[1:], self._copies, strict=False):
            with tf.device(device), tf.name_scope("state"):
                # The trainable ones come first in both.
                for copy, value in zip(copies, self._trainable(state), strict=False):
                    if value is not None:
                        copy.assign(value)

    def _trainable(self, values):
        return values[: len(self.model.trainable_variables)]

    def read_for_training(self) -> list[Values]:
        """Returns each tower's own parameters; see `Builder.read_variables`."""
        # Tables, too, are copied: those at home could be updated by home only.
        values = self.read_variables(look_up=False, send_params=False)
        for k, copy in enumerate(self._copies, start=1):
            with tf.device(self.devices[k]), tf.name_scope("read"):
                params = placing.read(self._trainable(copy), self.devices[k])
            values[k] = values[k]._replace(params=params)
        return values

    def sum_gradients(
        self,
        gradients: Sequence[Sequence[reduce.Gradient]],
        sources: Sequence[str],
        seen: Callable[[reduce.Packed], None] | None = None,
    ) -> list[list[reduce.Gradient]]:
        """Does so for each tower; see `ParameterServer.sum_gradients`."""
        return reduce.all_reduce(
            gradients,
            sources,
            self.devices,
            self.all_reduce_alg,
            overwritten.places(self.model),
            seen,
        )

    def update_weights(self, sums: Sequence[Sequence[reduce.Gradient]]) -> None:
        """Does so on each tower; see `ParameterServer.update_weights`."""
        with tf.device(self.home), tf.name_scope("apply"):
            self.apply_optimizer(sums[0])
        for k, copy in enumerate(self._copies, start=1):
            with tf.device(self.devices[k]), tf.name_scope(f"apply_{k}"):
                for variable, mine in zip(self._originals, copy, strict=True):
                    if _is_learning_rate(variable, self.model.optimizer):
                        mine.assign(variable.value)
                with swapped_values(self._originals, copy):
                    self.apply_optimizer(sums[k])

    def _copy(self, device):
        copies = []
        for variable in self._originals:
            original = variable.value
            with tf.device(device):
                copy = tf.Variable(original, name=variable.name, dtype=original.dtype)
            take_identity(copy, original)
            copies.append(copy)
        return copies


def _is_learning_rate(variable: keras.Variable, optimizer: Any) -> bool:
    # It is changed from outside all the time, and small.
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return variable is learning_rate_variable(optimizer)

"""The Keras door: `multi_gpu_model()` makes a Keras model train on towers.

Keras is the loop. What comes back is the model itself in everything but its three
steps, which a builder computes on towers; `fit` and its siblings, callbacks, metrics
and saving stay Keras's own.
"""

import contextlib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
import wrapt

from towers import devices
from towers._deprecated import accepts_old_names
from towers.builders.asynchronous import Asynchronous
from towers.builders.base import Builder
from towers.builders.guard import Guard, StoppedStep
from towers.builders.parameter_server import ParameterServer
from towers.builders.replicated import Replicated
from towers.collectives import reduce
from towers.devices import is_gpu
from towers.layers import variables
from towers.loop import listeners
from towers.model import auto
from towers.model.auto import Choice
from towers.model.compared import compared
from towers.model.first_call import FirstCall
from towers.model.fit_call import FitCall
from towers.model.variable_update import VariableUpdate
from towers.numerics import not_finite
from towers.tower.build import overrides
from towers.tower.errors import explained_shapes
from towers.tower.preprocess import Preprocess

BUILDERS: dict[str, type[Builder]] = {
    "asynchronous": Asynchronous,
    "parameter_server": ParameterServer,
    "replicated": Replicated,
}


@accepts_old_names
def multi_gpu_model(
    model: keras.Model,
    gpus: int | Sequence[int] | Sequence[str] | None = None,
    cpu_merge: bool | None = None,
    cpu_relocation: bool = False,
    *,
    variable_update: str = "parameter_server",
    local_parameter_device: str | None = None,
    split_ratios: Sequence[int] | None = None,
    loss_placement: str = "auto",
    strict: bool = True,
    packed: bool | None = None,
    all_reduce_alg: str = "auto",
    choice_file: str | None = None,
    max_staleness: int | None = None,
    preprocess: Callable[[Any, Any, bool], tuple[Any, Any]] | None = None,
    prefetch: int | None = None,
    check_numerics: bool | str | os.PathLike = False,
) -> "TowerModel":
    """Makes a model train, evaluate and predict on several devices.

    Each batch is divided among the devices. The results are those of one device with
    the whole batch. The returned model is compiled and fitted like any other. It shares
    its weights with `model`, which continues to work on one device. Saving either of
    the two saves `model`, an ordinary Keras model.

    The name and the first four arguments are those of Keras 2's `multi_gpu_model`.

    Examples:
        >>> parallel = multi_gpu_model(model, gpus=2)
        >>> parallel.compile(optimizer="adam", loss="mse")
        >>> parallel.fit(x, y, batch_size=64)
        >>> model.save("model.keras")

    Args:
        model: A Keras model. If it is compiled, it stays so.
        gpus: Number of GPUs, a list of their indices, or a list of device strings. By
            default all GPUs. Without a GPU, logical CPUs are used.
        cpu_merge: Whether gradients are added on the CPU (True) or on the first tower
            (False). By default where the variables are.
        cpu_relocation: Whether to move the variables to the CPU. By default they stay
            where Keras created them, which is the first GPU if there is one.
        variable_update: How the variables are updated. "parameter_server": on one
            device, once, by the sum of all gradients. "replicated": in a copy on each
            tower; the first tower's copy is the model's own variables. "asynchronous":
            on one device, by each tower's gradients, without waiting for the others.
            "auto": the first calls of training measure for some seconds whether
            "parameter_server" or "replicated" is faster, and then restore the
            variables. If nothing can be measured, and in deterministic or eager runs,
            "auto" is "replicated" on several GPUs and "parameter_server" otherwise.
        local_parameter_device: Device to move the variables to, instead of
            `cpu_relocation`: "cpu", "gpu" for the first tower's device, or a device
            string. "auto" leaves them there.
        split_ratios: Relative size of each tower's part of a batch, as positive
            integers, such as (2, 3, 3) if the first GPU has less memory. By default the
            parts are equal.
        loss_placement: Where the loss is computed. "tower": each tower computes the
            loss of its part, and any loss is treated as a mean over examples, including
            those that layers add. "gathered": the loss is computed once, on the outputs
            of all towers. "auto": on the towers if the loss is proved to be a mean or a
            sum over examples, and otherwise gathered. With `run_eagerly`, it is
            gathered.
        strict: Whether to refuse a model if towers would compute other numbers than one
            device. That is the case if a layer lets examples depend on one another, or
            assigns a value that cannot be combined from parts of a batch. If False,
            each tower computes with its part, and assigned values are averaged.
            BatchNormalization is never refused.
        packed: Whether variables and gradients travel between devices in one buffer for
            each type. By default if they travel between memories, which logical CPUs
            share.
        all_reduce_alg: How "replicated" adds gradients: on the "cpu"; on the first
            "device"; by "ring", each device a part; by "nccl", on several GPUs. "auto"
            is the first GPU, or else the CPU.
        choice_file: File in which "auto" keeps its choice. If the file exists, "auto"
            makes the same choice again.
        max_staleness: With "asynchronous", the most updates by other towers between a
            tower's reading the variables and its own update. By default no limit.
        preprocess: A function `preprocess(x, y, training)` that returns x and y with
            the same number of rows. Each tower applies it to its part of the batch,
            before the model. It can turn bytes into floats, or mix examples with random
            numbers of `tf.random`. The loss gets the y that it returns, and metrics get
            the original y. In prediction, y is `None`. `model` itself expects
            preprocessed inputs.
        prefetch: Number of batches that are copied to the towers ahead of use, while a
            step runs, if each call of training is one step. As many batches more than
            needed are taken from the data. By default 2 if a tower is on a GPU, and
            otherwise 0.
        check_numerics: Whether to stop at the first step of training with a loss or a
            gradient that is not finite. Nothing of the step is applied, and a
            `NotFiniteStep` says where the value came from. If it is a path, the batch
            and the variables are written there; see `towers.numerics.locate`. By
            default there is no check.

    Returns:
        A model that computes on towers.

    Raises:
        ValueError: If a device does not exist, the model cannot run on towers, or
            another argument has a wrong value.
    """
    _check_model(model)
    if loss_placement not in ("auto", "tower", "gathered"):
        raise ValueError(
            f"Received loss_placement={loss_placement!r}; expected 'auto', 'tower' or "
            "'gathered'."
        )
    if variable_update not in ("auto", *BUILDERS):
        raise ValueError(
            f"Received variable_update='{variable_update}'; expected one of "
            f"{['auto', *sorted(BUILDERS)]}."
        )
    towers = devices.resolve(gpus)
    split_ratios = _check_split_ratios(split_ratios, len(towers))
    if all_reduce_alg != "auto":
        check_all_reduce(all_reduce_alg, variable_update, towers)
    if max_staleness is not None:
        _check_max_staleness(max_staleness, variable_update)
    prefetch = _check_prefetch(prefetch, towers)
    if preprocess is not None:
        preprocess = _check_preprocess(preprocess)
    guard, numerics_file = _check_numerics(check_numerics)
    moved = local_parameter_device is not None or cpu_relocation
    named = {"cpu": devices.HOST, "gpu": towers[0]}
    home = named.get(local_parameter_device, local_parameter_device)
    if home is None and cpu_relocation:
        home = devices.HOST
    if variable_update == "replicated":
        home = _check_home_of_copies(home, towers)
    if home is None:
        home = _where(model, towers)
    (home,) = devices.resolve([home], "local_parameter_device")
    ways = functools.partial(
        auto.candidates, towers, _nccl_fits(towers), stays=moved and home != towers[0]
    )

    def make(choice: Choice) -> Builder:
        where = towers[0] if choice.variable_update == "replicated" else home
        variables.move(model, where)
        merge = where
        if cpu_merge is False:
            merge = towers[0]
        elif cpu_merge and is_gpu(where):
            merge = devices.HOST
        options = {"packed": packed, "preprocess": preprocess, "prefetch": prefetch}
        options["guard"] = guard
        if choice.variable_update == "replicated":
            options["all_reduce_alg"] = choice.all_reduce_alg
        if choice.variable_update == "asynchronous":
            options["max_staleness"] = max_staleness
        return BUILDERS[choice.variable_update](
            model,
            towers,
            where,
            merge,
            split_ratios,
            loss_placement,
            strict,
            **options,
        )

    if variable_update != "auto":
        chosen, ways = Choice(variable_update, all_reduce_alg), None
    else:
        chosen = ways(xla=False, synchronized=False)[0]
    update = VariableUpdate(model, make, chosen, ways, choice_file)
    return TowerModel(update, numerics_file)


class TowerModel(wrapt.CallableObjectProxy):
    """A Keras model whose steps run on towers: a proxy of the user's own model.

    Every attribute is that of the model, but for the loop's methods, which run with
    this object as their `self` and so find the builder's steps instead of the model's.
    """

    # What the loop keeps on its `self`, apart from the model's own of the same name.
    train_function = None
    test_function = None
    predict_function = None

    def __init__(self, update: VariableUpdate, numerics_file: str | None = None):
        """Makes a proxy of a model.

        Args:
            update: How its variables are updated.
            numerics_file: Where to write a step that is not finite, if anywhere.
        """
        super().__init__(update.model)
        self._self_update = update
        self._self_numerics_file = numerics_file
        self._self_call: FitCall | None = None
        self._reset_if_changed()

    @property
    def builder(self) -> Builder:
        """The builder, which knows towers and home. "auto" may put another here."""
        return self._self_update.builder

    @property
    def loss_placement(self) -> str | None:
        """Where the loss is computed, "tower" or "gathered"; `None` before a step."""
        return self.builder.loss_placed

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model; see `keras.Model.compile`."""
        bound = inspect.signature(keras.Model.compile).bind(self, *args, **kwargs)
        self.__wrapped__.compile(*args, **kwargs)
        self._self_update.xla_wish.tell(bound.arguments.get("jit_compile", "auto"))
        self._reset_if_changed()

    @property
    def jit_compile(self) -> bool:
        """False: XLA compiles each tower, and cannot compile the step around them."""
        return False

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self.__wrapped__.jit_compile = value
        self._self_update.xla_wish.tell(value)
        self._self_update.expect_change()

    def _reset_if_changed(self):
        if self._self_update.reset_if_changed():
            self.train_function = self.test_function = self.predict_function = None

    def make_train_function(self, force: bool = False) -> None:
        """Makes what `fit` calls with an iterator; see `keras.Model`."""
        self._reset_if_changed()
        if (call := self._self_call) is not None and call.skips is not None:
            self.train_function = call.skips
        elif force or self.train_function is None:
            if self._self_update.needs_first_call:
                self.train_function = self._first_call
            else:
                self.train_function = self._train_function(self.builder)

    def _first_call(self, iterator):
        update, call = self._self_update, self._self_call
        # In a loop of the user's, nobody knows.
        calls_left = (lambda: 0) if call is None else call.train_calls
        first = FirstCall(update, iterator, self._train_function, calls_left)
        self.train_function, logs = first.run()
        return logs

    def _train_function(self, builder):
        """Makes a builder's train function, which says what its guard has caught."""
        step_scope, guard = self._self_update.step_scope, builder.guard
        make = functools.partial(builder.train_function, step_scope)
        made = compared(make, lambda: builder, step_scope)

        def train(iterator):
            with self._explained():
                return made(iterator)

        if guard is None:
            return train

        def function(iterator):
            try:
                with guard.raises():
                    return train(iterator)
            except StoppedStep as error:
                stopped = error
            call, file = self._self_call, self._self_numerics_file
            options, place = (call.options, call.place) if call else ({}, "")
            with step_scope():
                raise not_finite.explain(builder, stopped, options, place, file)

        return function

    def make_test_function(self, force: bool = False) -> None:
        """Makes what `evaluate` calls with an iterator; see `keras.Model`."""
        self._make_compared("test", force)

    def make_predict_function(self, force: bool = False) -> None:
        """Makes what `predict` calls with batches; see `keras.Model`."""
        self._make_compared("predict", force)

    def _make_compared(self, kind, force):
        self._reset_if_changed()
        name = f"{kind}_function"
        if not force and getattr(self, name) is not None:
            return

        def make():
            kept = getattr(self, name)
            getattr(type(self.__wrapped__), f"make_{name}")(self, force=True)
            made = getattr(self, name)
            setattr(self, name, kept)

            def function(data):
                with self._explained():
                    return made(data)

            return function

        step_scope = self._self_update.step_scope
        setattr(self, name, compared(make, lambda: self.builder, step_scope))

    def _explained(self):
        if len(self.builder.devices) == 1:
            return contextlib.nullcontext()
        return explained_shapes(self.__wrapped__)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """See `keras.Model.fit`; with a `towers.callbacks.Checkpoint`, it goes on.

        A callback may run code around it, also where an exception ends it; see
        `FitCall`.
        """
        self._reset_if_changed()
        fit, update = type(self.__wrapped__).fit, self._self_update
        call = FitCall(self, fit, args, kwargs, update.create_variables)
        before, self._self_call = self._self_call, call
        builder = self.builder
        builder.callbacks_may_write = listeners.may_change_variables(call.callbacks)
        try:
            return call.run(notes_place=builder.guard is not None)
        finally:
            self._self_call = before
            if call.skips is not None:
                self.train_function = None

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """See `keras.Model.evaluate`."""
        if self._self_call is not None and self._self_call.skips is not None:
            return {}  # of an epoch that is skipped
        self._reset_if_changed()
        return type(self.__wrapped__).evaluate(self, *args, **kwargs)

    def reset_metrics(self) -> None:
        """Begins an epoch; see `keras.Model`."""
        self.builder.mark_copies_stale()
        self.__wrapped__.reset_metrics()

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on one global batch, on towers."""
        with self._self_update.step_scope():
            # Called from a loop of the user's, which may have changed variables.
            self.builder.broadcast_variables()
            return self.builder.train_step(data)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch, on towers."""
        with self._self_update.step_scope():
            return self.builder.test_step(data)

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch, on towers."""
        with self._self_update.step_scope():
            return self.builder.predict_step(data)

    def __reduce__(self):
        return self.__wrapped__.__reduce__()


def _loop_method(name):
    def method(self, *args, **kwargs):
        self._reset_if_changed()
        return getattr(type(self.__wrapped__), name)(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"See `keras.Model.{name}`."
    return method


for _name in (
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
):
    setattr(TowerModel, _name, _loop_method(_name))


def _check_model(model: Any) -> None:
    if isinstance(model, TowerModel):
        raise ValueError(
            "Received a model that multi_gpu_model() has made; expected the user's own "
            "Keras model, so pass the original one."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"Received a {type(model).__name__}; expected a keras.Model, so build one "
            "with Keras 3 (not tf_keras)."
        )
    kinds = "train", "test", "predict"
    for step in [f"{kind}_step" for kind in kinds] + [
        f"make_{kind}_function" for kind in kinds
    ]:
        if overrides(model, step):
            raise ValueError(
                f"{type(model).__name__} overrides `{step}`, which computes on one "
                "device; expected Keras's own, so override `compute_loss` or "
                "`compute_metrics` instead."
            )
    if tf.distribute.has_strategy():
        raise ValueError(
            f"Called in the scope of {type(tf.distribute.get_strategy()).__name__}; "
            "towers replace tf.distribute, so leave the scope first."
        )


def check_all_reduce(
    algorithm: str, variable_update: str, towers: Sequence[str]
) -> None:
    """Checks that a builder can add gradients that way; see `multi_gpu_model`.

    Raises:
        ValueError: If not.
    """
    if algorithm not in reduce.ALGORITHMS:
        raise ValueError(
            f"Received all_reduce_alg='{algorithm}'; expected one of "
            f"{['auto', *reduce.ALGORITHMS]}."
        )
    if variable_update != "replicated":
        raise ValueError(
            f"Received all_reduce_alg='{algorithm}' with variable_update="
            f"'{variable_update}'; it says how variable_update='replicated' adds "
            "gradients, so give that as well."
        )
    if algorithm == "nccl" and not _nccl_fits(towers):
        raise ValueError(
            f"Received all_reduce_alg='nccl' for towers on {', '.join(towers)}; NCCL "
            "needs several towers, each on a GPU of its own, so use 'ring'."
        )


def _nccl_fits(towers: Sequence[str]) -> bool:
    """Tells whether each of several towers has a GPU of its own, which none shares."""
    gpus = len(tf.config.get_visible_devices("GPU"))
    unsplit = gpus == len(tf.config.list_logical_devices("GPU"))
    return 1 < len(towers) <= gpus and unsplit and all(map(is_gpu, towers))


def _check_home_of_copies(home: str | None, towers: Sequence[str]) -> str:
    if (
        home is not None
        and devices.resolve([home], "local_parameter_device")[0] != towers[0]
    ):
        raise ValueError(
            f"Received local_parameter_device={home} with variable_update="
            "'replicated', where the variables are on each tower; expected none, or "
            f"the first tower's, {towers[0]}."
        )
    return towers[0]


def _check_split_ratios(ratios: Any, towers: int) -> tuple[int, ...]:
    if ratios is None:
        return (1,) * towers
    try:
        found = tuple(map(operator.index, ratios))
    except TypeError:
        found = ()
    if len(found) != towers or min(found) < 1:
        raise ValueError(
            f"Received split_ratios={ratios} for {towers} towers; expected a positive "
            "integer for each, such as (2, 3, 3)."
        )
    return found


def _check_max_staleness(bound: Any, variable_update: str) -> None:
    if variable_update != "asynchronous":
        raise ValueError(
            f"Received max_staleness={bound!r} and variable_update="
            f"'{variable_update}', whose towers wait for one another; expected None, "
            "or variable_update='asynchronous'."
        )
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
        raise ValueError(
            f"Received max_staleness={bound!r}; expected None, for any, or a number "
            "of updates, such as 0 to have them made in turn."
        )


def _check_prefetch(prefetch: Any, towers: Sequence[str]) -> int:
    if prefetch is None:
        # Between logical CPUs nothing is copied.
        return 2 if any(map(is_gpu, towers)) else 0
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(
            f"Received prefetch={prefetch!r}; expected None, or a number of batches, "
            "such as 0 to have none fetched ahead."
        )
    return prefetch


def _check_numerics(asked: Any) -> tuple[Guard | None, str | None]:
    if isinstance(asked, bool):
        return (Guard() if asked else None), None
    if not isinstance(asked, str | os.PathLike):
        raise ValueError(
            f"Received check_numerics={asked!r}; expected True, False, or where to "
            "write the batch of a step that is not finite, such as 'not_finite.npz'."
        )
    return Guard(), os.path.abspath(os.path.expanduser(asked))


def _check_preprocess(preprocess: Any) -> Preprocess:
    if not callable(preprocess):
        raise ValueError(
            f"Received preprocess={preprocess!r}; expected None, or a function "
            "`preprocess(x, y, training)` that returns x and y."
        )
    return Preprocess(preprocess)


def _where(model: keras.Model, towers: Sequence[str]) -> str:
    """The device that the model's variables are on; where it has none yet, will be."""
    if own := model.trainable_variables or model.variables:
        return own[0].value.device
    return towers[0] if is_gpu(towers[0]) else devices.HOST

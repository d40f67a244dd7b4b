"""The Keras door: `multi_gpu_model()` makes a Keras model train on towers.

Keras is the loop. What comes back is the model itself in everything but its three
steps, which a builder computes on towers; `fit` and its siblings, callbacks, metrics
and saving stay Keras's own.
"""

import contextlib
import functools
import inspect
import math
import operator
import os
import time
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
from towers.collectives import batch, reduce
from towers.devices import is_gpu
from towers.keras_adapter.losses import compile_config
from towers.keras_adapter.runtime import is_deterministic
from towers.layers import variables
from towers.loop import listeners
from towers.model import auto, first_call, fit_data
from towers.model.auto import Choice
from towers.model.fit_call import FitCall
from towers.numerics import not_finite
from towers.program.voice import say
from towers.tower import compare
from towers.tower.build import overrides
from towers.tower.errors import ModelError, explained_shapes
from towers.tower.preprocess import Preprocess
from towers.tower.run import is_synchronized

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
    return TowerModel(model, make, chosen, ways, choice_file, numerics_file)


class TowerModel(wrapt.CallableObjectProxy):
    """A Keras model whose steps run on towers: a proxy of the user's own model.

    Every attribute is that of the model, but for the loop's methods, which run with
    this object as their `self` and so find the builder's steps instead of the model's.
    """

    # What the loop keeps on its `self`, apart from the model's own of the same name.
    train_function = None
    test_function = None
    predict_function = None

    def __init__(
        self,
        model: keras.Model,
        make: Callable[[Choice], Builder],
        choice: Choice,
        ways: Callable[..., list[Choice]] | None = None,
        file: str | None = None,
        numerics_file: str | None = None,
    ):
        super().__init__(model)
        self._self_make = make
        self._self_ways = ways
        self._self_chosen = ways is None
        self._self_file = file
        # What `compile` was told of XLA, and what tells whether that was the last time.
        self._self_asked_xla = None, None
        # What is done about that, where no way is chosen for it.
        self._self_xla = None
        self._self_choice = choice
        self._self_builder = make(choice)
        self._self_seen = []
        self._self_numerics_file = numerics_file
        self._self_call: FitCall | None = None
        self._follow()

    @property
    def builder(self) -> Builder:
        """The builder, which knows towers and home. "auto" may put another here."""
        return self._self_builder

    @property
    def loss_placement(self) -> str | None:
        """Where the loss is computed, "tower" or "gathered"; `None` before a step."""
        return self._self_builder.loss_placed

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model; see `keras.Model.compile`."""
        bound = inspect.signature(keras.Model.compile).bind(self, *args, **kwargs)
        self.__wrapped__.compile(*args, **kwargs)
        self._ask_xla(bound.arguments.get("jit_compile", "auto"))
        self._follow()

    @property
    def jit_compile(self) -> bool:
        """False: XLA compiles each tower, and cannot compile the step around them."""
        return False

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self.__wrapped__.jit_compile = value
        self._ask_xla(value)
        self._self_seen = []  # so that it is followed

    def _ask_xla(self, asked):
        config = compile_config(self.__wrapped__)
        self._self_asked_xla = config, asked

    def _wants_xla(self):
        """Whether XLA is to compile towers and update, `None` for what is faster.

        Keras's own "auto" turns it on as soon as there is a GPU. Towers would be
        compiled for each device and each size of a share, so here it is tried.
        """
        model = self.__wrapped__
        config, asked = self._self_asked_xla
        wanted = model.compiled and model.jit_compile
        if config is not compile_config(model):
            # Compiled without us: Keras keeps only what it has made of the wish.
            asked = wanted
            if wanted and tf.config.list_physical_devices("GPU"):
                asked = "auto"
                line = (
                    f"Model '{model.name}' was compiled before multi_gpu_model() got "
                    "it, and Keras turns XLA on by itself where there is a GPU, so "
                    "the towers go without; if XLA is wanted, compile what "
                    "multi_gpu_model() returns, with jit_compile=True."
                )
                self._self_builder.say([line])
        if asked is None or asked == "auto":
            return None
        return bool(asked and wanted)

    def _follow(self):
        """Starts anew if the model was compiled or moved, through whichever object."""
        model = self.__wrapped__
        self._self_builder.mark_copies_stale()
        before, seen = self._self_seen, self._current()
        self._self_seen = seen
        if len(seen) == len(before) and all(map(operator.is_, seen, before)):
            return
        self.train_function = self.test_function = self.predict_function = None
        self._self_builder.reset_traces()
        self._self_xla = self._self_builder.xla = self._wants_xla()
        self._self_chosen = self._self_ways is None
        # A step count, a learning rate and means were created where the user was.
        variables.move(model, self._self_builder.home)

    def _current(self):
        model = self.__wrapped__
        compiled = compile_config(model)
        return [compiled, *(v.value for v in model.variables)]

    def make_train_function(self, force: bool = False) -> None:
        """Makes what `fit` calls with an iterator; see `keras.Model`."""
        self._follow()
        if (call := self._self_call) is not None and call.skips is not None:
            self.train_function = call.skips
        elif force or self.train_function is None:
            builder = self._self_builder
            if builder.on_gpus or builder.compiles_update or not self._self_chosen:
                self.train_function = self._first_call
            else:
                self.train_function = self._train_function()

    def _train_function(self):
        """Makes the builder's train function, which says what its guard has caught."""
        builder = self._self_builder
        made = self._comparing(lambda: builder.train_function(self._step))
        guard = builder.guard

        def train(iterator):
            with self._told():
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
            with self._step():
                raise not_finite.explain(builder, stopped, options, place, file)

        return function

    def _comparing(self, make):
        """Makes a loop's function compare rows on its first batch, if it has to.

        What a graph does not tell is asked for while it is traced, which is before it
        has read anything. It is made anew then: TensorFlow does not trace a function
        again that has failed.
        """
        function = make()
        steps = self.__wrapped__.steps_per_execution

        def call(data):
            nonlocal function
            # What `predict` hands over is a list; what else is read once.
            batches = None
            if not isinstance(data, list | tf.data.Iterator):
                batches = first_call.Batches(data, steps)
            wanted = set()
            while True:
                again = batches is not None and not isinstance(data, list)
                builder = self._self_builder
                try:
                    # Where TensorFlow is not told, it would take what a loop hands
                    # from step to step through the first GPU.
                    with tf.device(devices.HOST):
                        logs = function(batches.read() if again else data)
                except compare.BatchWanted as error:
                    if error.key in wanted:
                        raise
                    wanted.add(error.key)
                    if batches is None:
                        batches = first_call.Batches(data, steps)
                    with self._step():
                        builder.compare_first(batches.first, error)
                    function = make()
                else:
                    if wanted:
                        builder.compare_again_what_was_too_small()
                    return logs

        return call

    def _first_call(self, iterator):
        model = self.__wrapped__
        batches = first_call.Batches(iterator, model.steps_per_execution)
        ways = [] if self._self_chosen else self._ways()
        key, recalled = None, None
        if ways and not self._self_choice.adds_like(ways[0]):
            self._install(ways[0], batches)
        else:
            self._build_first(batches)
        if ways:
            key = _describe(model, self._self_builder, batches.first, ways)
            recalled = auto.recall(self._self_file, key, ways)
        if recalled is not None:
            self._install(recalled, batches)
            say(f"Updating the variables by {recalled}, as chosen before.")
        begun_s = time.perf_counter()
        compiles = self._self_builder.compiles_update
        self.train_function, logs = first_call.train_or_fall_back(
            self._self_builder,
            self._train_function,
            batches,
            self._simpler(batches) if not self._self_chosen else None,
        )
        start_s = time.perf_counter() - begun_s
        self._self_chosen = True
        if compiles and not self._self_builder.compiles_update:
            # What XLA cannot do for one way, it cannot for the others.
            self._self_xla, ways = False, [way for way in ways if not way.xla]
        used = self._self_choice._replace(xla=self._self_builder.xla)
        if len(ways) > 1 and recalled is None and used in ways:
            failed = not used.adds_like(ways[0])
            others = [way for way in ways if way != used]
            others = [w for w in others if not (failed and w.adds_like(ways[0]))]
            trials = self._choose([used, *others], batches, start_s)
            auto.remember(self._self_file, key, trials)
        return logs

    def _simpler(self, batches):
        """What to do if the first choice fails, such as NCCL on some machine."""
        first, simplest = self._self_choice, Choice()
        if first.variable_update == simplest.variable_update:
            return None

        def install(why):
            line = f"The variables are updated by {simplest}, as {first} fails: {why}"
            say(line)
            self._install(simplest, batches)
            return self._self_builder

        return install

    def make_test_function(self, force: bool = False) -> None:
        """Makes what `evaluate` calls with an iterator; see `keras.Model`."""
        self._make_compared("test", force)

    def make_predict_function(self, force: bool = False) -> None:
        """Makes what `predict` calls with batches; see `keras.Model`."""
        self._make_compared("predict", force)

    def _make_compared(self, kind, force):
        self._follow()
        name = f"{kind}_function"
        if force or getattr(self, name) is None:

            def make():
                kept = getattr(self, name)
                getattr(type(self.__wrapped__), f"make_{name}")(self, force=True)
                made = getattr(self, name)
                setattr(self, name, kept)

                def function(data):
                    with self._told():
                        return made(data)

                return function

            setattr(self, name, self._comparing(make))

    def _ways(self):
        """The ways to choose from; none where nothing may hang on time."""
        model = self.__wrapped__
        if model.run_eagerly or is_deterministic():
            return []
        return self._self_ways(self._wants_xla(), is_synchronized(model))

    def _choose(self, ways, batches, start_s):
        """Tries ways, the first of which is in use, and goes on with the best."""
        model, builder = self.__wrapped__, self._self_builder
        copies = {id(copy) for copy in builder.copies()}
        others = variables.beside(model, builder.graph)
        others = [variable for variable in others if id(variable) not in copies]
        made = {ways[0]: (builder, self.train_function, self._current())}
        guard = builder.guard
        # What is out of use goes at once, as each way may have copies of its own.
        builder = self.train_function = None

        def make(way):
            if way not in made:
                self._install(way, batches)
                function = self._train_function()
                made[way] = self._self_builder, function, self._current()
            return made[way][1]

        def drop(way):
            made.pop(way, None)
            ((self._self_builder, *_),) = made.values()

        with contextlib.nullcontext() if guard is None else guard.disarmed():
            trials = first_call.try_ways(
                ways, make, drop, batches, model, others, start_s, self._calls_left()
            )
        say(auto.table(trials))
        ((chosen, (self._self_builder, self.train_function, seen)),) = made.items()
        self._self_choice = chosen
        if any(map(operator.is_not, seen, self._current())):
            # The variables have been moved since.
            self._install(chosen, batches)
            self.train_function = self._train_function()
        self._self_builder.mark_copies_stale()
        return trials

    def _calls_left(self):
        """How many calls `fit` will make, at a guess; 0 in a loop of the user's."""
        if self._self_call is None:
            return 0
        parameters = inspect.signature(keras.Model.fit).parameters.values()
        given = {each.name: each.default for each in parameters}
        given |= self._self_call.options
        batches = given["steps_per_epoch"] or fit_data.count(given)
        batches = batches or auto.ASSUMED_BATCHES
        calls = math.ceil(batches / self.__wrapped__.steps_per_execution)
        return calls * max(given["epochs"] - given["initial_epoch"], 0)

    def _install(self, way, batches):
        watched = self._self_builder.callbacks_may_write
        self._self_choice = way
        self._self_builder = self._self_make(way)
        self._self_builder.xla = way.xla or self._self_xla
        self._self_builder.callbacks_may_write = watched
        self._build_first(batches)

    def _build_first(self, batches):
        self._build(batches.first)
        first = tf.nest.map_structure(batch.as_tensor, batches.first)
        self._self_builder.usual_rows = int(batch.batch_size(first))

    def _build(self, data):
        with self._step():
            self._self_builder.create_variables(data)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """See `keras.Model.fit`; with a `towers.callbacks.Checkpoint`, it goes on.

        A callback may run code around it, also where an exception ends it; see
        `FitCall`.
        """
        self._follow()
        fit = type(self.__wrapped__).fit
        call, before = FitCall(self, fit, args, kwargs, self._build), self._self_call
        builder, self._self_call = self._self_builder, call
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
        self._follow()
        return type(self.__wrapped__).evaluate(self, *args, **kwargs)

    def reset_metrics(self) -> None:
        """Begins an epoch; see `keras.Model`."""
        self._self_builder.mark_copies_stale()
        self.__wrapped__.reset_metrics()

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on one global batch, on towers."""
        with self._step():
            # Called from a loop of the user's, which may have changed variables.
            self._self_builder.broadcast_variables()
            return self._self_builder.train_step(data)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch, on towers."""
        with self._step():
            return self._self_builder.test_step(data)

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch, on towers."""
        with self._step():
            return self._self_builder.predict_step(data)

    def _told(self):
        if len(self._self_builder.devices) == 1:
            return contextlib.nullcontext()
        return explained_shapes(self.__wrapped__)

    @contextlib.contextmanager
    def _step(self):
        # Where TensorFlow is not told, it would choose the first GPU: for cutting a
        # batch that is on the host, and has to go to all of them.
        with tf.device(devices.HOST):
            try:
                yield
                # What was built in the meantime is not a change.
                self._self_seen = self._current()
            except ValueError as error:
                # TensorFlow has no public name for it.
                if type(error).__name__ != "InaccessibleTensorError":
                    raise
                raise ModelError(
                    f"Model '{self.__wrapped__.name}' keeps a tensor of one call for "
                    "later, in an attribute, or in a variable that it assigns inside "
                    "`tf.cond` or a `tf.function`; towers cannot carry it, so return "
                    "it as an output, or assign outside."
                ) from error

    def __reduce__(self):
        return self.__wrapped__.__reduce__()


def _loop_method(name):
    def method(self, *args, **kwargs):
        self._follow()
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


def _describe(model, builder, data, ways) -> dict[str, Any]:
    """All that a choice was made for, as JSON."""
    shapes = [str(t.shape) for t in tf.nest.flatten(data) if t is not None]
    return {
        "tensorflow": tf.__version__,
        "parameters": model.count_params(),
        "optimizer": type(model.optimizer).__name__,
        "policy": str(model.dtype_policy.name),
        "steps_per_execution": model.steps_per_execution,
        "batch": shapes,
        "devices": [*builder.devices],
        "local_parameter_device": builder.home,
        "split_ratios": [*builder.split_ratios],
        "candidates": [str(way) for way in ways],
    }


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

"""What all builders share: running the towers, test and predict steps, metrics.

A builder is three steps, those of a Keras model: each takes one global batch. How often
they are called, and what becomes of their results, is Keras's business.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis.rules import NoRuleError, Rules
from towers.builders import checks
from towers.builders.guard import Guard
from towers.collectives import batch, packing, placing, reduce
from towers.devices import HOST, is_gpu
from towers.keras_adapter.layers import TAGS, layers_of, set_tag
from towers.keras_adapter.models import compute_loss, loss_tracker
from towers.layers import embeddings, seeds, variables
from towers.loop import loop
from towers.loop.timers import StepTimers
from towers.program import voice
from towers.tower import build, compare, eager, passes
from towers.tower.errors import ModelError, UntraceableError
from towers.tower.passes import TowerResult
from towers.tower.preprocess import Preprocess
from towers.tower.run import (
    TowerCall,
    is_synchronized,
    refuse_stateful,
    run,
    run_in_replica_context,
    without_auto_control_deps,
)
from towers.tower.traced import Sized, Traced

# Above it, the start gets too long if towers are copied into the step's graph: with a
# ResNet-50 and 8 towers by a third, for steps that are 2% faster. See `Traced`.
_MANY_LAYERS = 100


class Values(NamedTuple):
    """The values of a model's variables, for one tower.

    Attributes:
        params: Of the trainable variables; `None` for tables that stay at home (see
            `embeddings.py`).
        state: Of the non-trainable variables.
    """

    params: Sequence[tf.Tensor | None]
    state: Sequence[tf.Tensor]


class Builder(abc.ABC):
    """Builds the steps that K towers take together.

    Subclasses say how the variables are updated, in `train_step`.

    Attributes:
        model: The user's model; its variables are the shared variables.
        devices: One device string for each tower.
        on_gpus: Whether one of them is a GPU.
        home: The device of the shared variables: updates, losses of gathered outputs
            and metrics are computed there.
        merge: The device on which gradients are added.
        split_ratios: How much of a batch each tower gets, relative to the others.
        loss_placement: Where the loss is to be computed: "auto", "tower" or "gathered".
        strict: Whether to refuse a model that towers are seen to compute differently.
        packed: Whether parameters and gradients travel in one buffer for each type;
            `None` for where it pays.
        preprocess: What towers do to their shares before the model sees them, if
            anything.
        prefetch: Batches that are fetched and placed ahead of a call of one step.
        guard: Stops a step of training that is not finite, if anything does.
        loss_placed: Where it is: "tower" or "gathered"; `None` before the first step.
        compiled: Whether XLA is known to compile the model: by training it once.
        callbacks_may_write: Whether a callback that may change variables runs between
            calls of training.
        usual_rows: How many examples the first batch of training has; `None` if that is
            not known yet.
        timers: Measures what the time of the steps of `train_function` goes to.
        graph: The graph that a step of `train_function` was last made in, if any.
    """

    def __init__(
        self,
        model: keras.Model,
        devices: Sequence[str],
        home: str,
        merge: str,
        shares: Sequence[int],
        loss_placement: str,
        strict: bool,
        packed: bool | None = None,
        preprocess: Preprocess | None = None,
        prefetch: int = 0,
        guard: Guard | None = None,
    ):
        self.model = model
        self.devices = tuple(devices)
        self.on_gpus = any(map(is_gpu, self.devices))
        self.home = home
        self.merge = merge
        self.split_ratios = tuple(shares)
        self.loss_placement = loss_placement
        self.strict = strict
        self.packed = packed
        self.preprocess = preprocess
        self.prefetch = prefetch
        self.guard = guard
        self.callbacks_may_write = False
        self.usual_rows = None
        self.timers = StepTimers(len(self.devices))
        self._said = set()
        self.reset_traces()

    def reset_traces(self) -> None:
        """Forgets what was found out about the model, which has changed."""
        self.loss_placed = None
        self.graph = None
        self._built_eagerly = False
        self._proofs = eager.Proofs()
        self._kept = ""
        self.compared = {}
        self.reads_tables = False
        self._xla = None
        self.compiled = False

    @abc.abstractmethod
    def train_step(
        self, data: Any, shares: Sequence[Any] | None = None
    ) -> dict[str, tf.Tensor]:
        """Trains on one global batch.

        Args:
            data: What Keras's `train_step` gets: x, (x, y) or (x, y, sample_weight),
                nests of tensors with one row an example.
            shares: What `place` made of it, if that was done ahead.

        Returns:
            The model's metrics, by name.
        """

    def train_function(
        self, scope: Callable[[], contextlib.AbstractContextManager]
    ) -> Callable[[Any], dict[str, tf.Tensor]]:
        """Makes the function that Keras's `fit` calls with an iterator over batches.

        Args:
            scope: Makes the context that steps are traced and run in.

        Returns:
            A function that takes as many batches as the model has steps in a call, and
            returns the logs of the last; see `loop.train_function`.
        """

        def step(data, shares, fetched):
            if not tf.executing_eagerly():
                self.graph = tf.compat.v1.get_default_graph()
            with scope(), self.timers.step(data, shares, fetched):
                return self.train_step(data, shares)

        def place(data):
            with scope():
                return self.place(data)

        def prepare(spec):
            with scope():
                self.create_variables(spec)

        model = self.model
        steps, eagerly = model.steps_per_execution, model.run_eagerly
        train = loop.train_function(prepare, place, step, steps, eagerly, self.prefetch)

        def function(iterator):
            if self.callbacks_may_write:
                self._proofs.forget()
            self.timers.reads(iterator)
            return train(iterator)

        return function

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch: forward on the towers, loss and metrics at home.

        Args:
            data: As for `train_step`.

        Returns:
            The model's metrics, by name.
        """
        # Targets are not cut.
        batch.check_rows(data)
        self.create_variables(data)
        data = keras.utils.unpack_x_y_sample_weight(data)
        rules = self.rules("test", data[0])
        forward = functools.partial(passes.forward, self.model, False, rules)
        shares, seen = self.preprocess_batch(data, training=False)
        x_shares = [share[0] for share in shares or self.place(data[:1])]
        results = self.run_towers(
            forward, rules, self.read_variables(), data[0], placed=x_shares
        )
        outputs = self.gather(results)
        self.assign_state(self.combine_state(results, rules))
        with tf.device(self.home):
            losses = self.sum_layer_losses(results)
            loss = self.whole_loss(seen, outputs, losses, training=False)
            return self.update_metrics(data, outputs, loss)

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch.

        Args:
            data: As for `train_step`; only x is used.

        Returns:
            The model's outputs: a nest of tensors, one row an example, in order.
        """
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        batch.check_rows((x,))
        if self.model.run_eagerly:
            self._build_eagerly((x, None, None))
        elif not self.model.built:
            seen = x
            if self.preprocess is not None:
                seen, *_ = self.preprocess.spec((x, None, None), training=False)
            with tf.init_scope(), tf.device(self.home):
                self.model(build.symbols(seen))
        rules = self.rules("predict", x)
        forward = functools.partial(passes.forward, self.model, False, rules)
        shares, _ = self.preprocess_batch((x, None, None), training=False)
        x_shares = [share[0] for share in shares or self.place((x,))]
        results = self.run_towers(
            forward, rules, self.read_variables(), x, placed=x_shares
        )
        self.assign_state(self.combine_state(results, rules))
        return self.gather(results)

    def cut(self, data: Any) -> list[Any]:
        """Cuts a batch, where it is.

        Args:
            data: A nest of tensors with one row an example.

        Returns:
            One such nest for each tower.
        """
        batch.check_rows(data)
        data = tf.nest.map_structure(batch.as_tensor, data)
        bounds = batch.share_bounds(batch.batch_size(data), self.split_ratios)
        return [batch.take(data, start, end) for start, end in bounds]

    def place(self, data: Any) -> list[Any]:
        """Cuts a batch, and copies each tower's share to its device.

        Args:
            data: A nest of tensors with one row an example.

        Returns:
            One such nest for each tower.
        """
        return [self.copy(k, share) for k, share in enumerate(self.cut(data))]

    def copy(self, k: int, share: Any) -> Any:
        """Copies tower `k`'s share of a batch to its device."""
        kept = self._kept_on_the_host(self.devices[k])
        with tf.device(self.devices[k]), tf.name_scope("place"):
            return packing.copy(share, kept)

    def _kept_on_the_host(self, device):
        """The types of what does not go to a GPU ahead of its use."""
        if not is_gpu(device) or is_gpu(self.home) or not self._looks_up():
            return ()
        # Indices of tables at home would only come back.
        return (tf.int32, tf.int64) if embeddings.tables(self.model) else ()

    def create_variables(self, data: Any) -> None:
        """Creates what Keras creates late: variables of model, metrics and optimizer.

        A tower cannot create a variable, so all have to exist before one is traced.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
        """
        # What is not known when the graph is built, it checks where the batch is cut.
        batch.check_rows(tf.nest.map_structure(_spec, data))
        model = self.model
        if not model.run_eagerly:
            with tf.init_scope(), tf.device(self.home):
                build.from_symbols(model, data, self.preprocess)
        elif any(isinstance(t, tf.TypeSpec) for t in tf.nest.flatten(data)):
            # A run goes on in an epoch, of which metrics are to be restored.
            with eager.aside(model, builds=True), tf.init_scope(), tf.device(self.home):
                build.from_symbols(model, data, self.preprocess)
        else:
            self._build_eagerly(data)
        if is_gpu(self.home):
            # Not all that was created there belongs there.
            with tf.init_scope():
                variables.move(model, self.home)

    def _build_eagerly(self, data):
        """Creates the model's variables; losses and metrics create theirs themselves.

        Keras builds symbolically, which is not Python as the user sees it.
        """
        model = self.model
        with tf.init_scope(), tf.device(self.home):
            unbuilt = not all(layer.built for layer in layers_of(model))
            if unbuilt and not self._built_eagerly:
                share, *_ = self.cut(data)
                build.by_a_call(model, share, self.preprocess)
            self._built_eagerly = True
            # A model that only predicts need not be compiled.
            optimizer = model.optimizer if model.compiled else None
            if optimizer is not None and not optimizer.built:
                optimizer.build(model.trainable_variables)

    def rules(self, step: str, data: Any) -> Rules:
        """Returns the rules for the towers of one step, to be read when it is traced.

        In eager execution they may have been read before, of such a batch.

        Args:
            step: Name of the step.
            data: What the towers get of the batch: a nest of tensors.
        """
        mean_loss = self.loss_placement == "tower"
        rules = Rules(len(self.devices), mean_loss, mean_state=not self.strict)
        if self.model.run_eagerly:
            return self._proofs.of(self.model, step, data, rules)
        return rules

    def place_loss(self) -> str:
        """Decides where to try to compute the loss: "tower" or "gathered"."""
        if self.loss_placement == "gathered" or self.loss_placed == "gathered":
            self.loss_placed = "gathered"
        elif build.overrides(self.model, "compute_loss"):
            self.gather_loss("its own compute_loss")
        elif self.together:
            self.gather_loss("layers that are synchronized")
        elif (
            len(self.devices) > 1
            and self.model.run_eagerly
            and self.loss_placement != "tower"
        ):
            # It is Python that sees the whole batch, and is called once.
            self.gather_loss("run_eagerly=True")
        else:
            self.loss_placed = "tower"
        return self.loss_placed

    def gather_loss(self, reason: str) -> None:
        """Has the loss computed on gathered outputs from now on, and says so.

        Args:
            reason: What hinders the towers.

        Raises:
            ValueError: If the user asked for the towers.
        """
        if self.loss_placement == "tower":
            raise ValueError(
                f"Received loss_placement='tower', but towers cannot compute the loss "
                f"of model '{self.model.name}', because of {reason}; use "
                "loss_placement='auto'."
            )
        self.loss_placed = "gathered"
        line = (
            f"The loss of model '{self.model.name}' is computed on gathered outputs, "
            f"because of {reason}."
        )
        self.say([line])

    def say(self, lines: Sequence[str], about: Any = None) -> None:
        """Says what has not been said before: each step finds the same.

        Args:
            lines: What to say.
            about: What it is about, if that is said once, whatever the words.
        """
        for line in lines:
            if (about or line) not in self._said:
                voice.say(line)
                self._said.add(about or line)

    @property
    def xla(self) -> bool:
        """Whether XLA compiles towers and update.

        `None`, the default, leaves the towers as they are, and has the update compiled
        where that is known to pay; False leaves both.
        """
        return bool(self._xla) and not self.model.run_eagerly

    @xla.setter
    def xla(self, value: bool | None) -> None:
        self._xla = value

    @property
    def compiles_update(self) -> bool:
        """Whether XLA compiles the update: where that is wished, or known to pay.

        It makes one kernel of the dozen that each variable needs, which a GPU is slower
        to start than to run; a CPU is not.
        """
        if self._xla is None:
            return is_gpu(self.home) and not self.model.run_eagerly
        return self.xla

    def mark_copies_stale(self) -> None:
        """Is told that variables, or the model, may have been changed from outside."""
        # Most builders read variables anew in each step, as they do not copy them.
        self._proofs.forget()

    def broadcast_variables(self) -> None:
        """Gives copies of the variables, if there are any, their values."""
        return

    def copies(self) -> list[tf.Variable]:
        """Returns the copies of the variables, if there are any."""
        return []

    def read_variables(
        self, look_up: bool = True, send_params: bool = True
    ) -> list[Values]:
        """Reads the variables at home, and hands each tower their values.

        Args:
            look_up: Whether towers may look up rows of tables that stay at home.
            send_params: Whether towers need the parameters, and not the state alone.

        Returns:
            The values for each tower. The random seeds among them are its own.
        """
        model = self.model
        tables = embeddings.tables(model) if look_up and self._looks_up() else ()
        with tf.device(self.home), tf.name_scope("read"):
            trainable = model.trainable_variables
            read = [v.value for v in trainable if id(v) not in tables]
            read = iter(placing.read(read, self.home))
            params = [None if id(v) in tables else next(read) for v in trainable]
            others = [v.value for v in model.non_trainable_variables]
            state = placing.read(others, self.home)
            sent = [*(params if send_params else ()), *state]
            packs = [self.packs(device) for device in self.devices]
            buffers = packing.pack(sent) if any(packs) else []
        values = []
        for k, device in enumerate(self.devices):
            mine = Values(params, state)
            if packs[k]:
                with tf.device(device), tf.name_scope("read"):
                    received = packing.unpack(buffers, sent)
                of_state = len(sent) - len(state)
                mine = Values(received[:of_state] or params, received[of_state:])
            with tf.device(HOST):
                seeded = seeds.of_tower(self.model, mine.state, k)
            values.append(mine._replace(state=seeded))
        return values

    def packs(self, device: str) -> bool:
        """Tells whether values travel packed between home and a device.

        That pays where they travel, from one memory to another. Between logical CPUs
        nothing is copied, unless it is packed.

        Args:
            device: A device string.
        """
        if self.packed is not None:
            return self.packed
        return (is_gpu(device) or is_gpu(self.home)) and device != self.home

    @property
    def together(self) -> bool:
        """Whether towers run together, as layers talk to one another."""
        return len(self.devices) > 1 and is_synchronized(self.model)

    def _looks_up(self):
        return not (
            self.reads_tables or self.model.run_eagerly or self.xla or self.together
        )

    def preprocess_batch(
        self, data: Any, training: bool, placed: Sequence[Any] | None = None
    ) -> tuple[Sequence[Any] | None, Any]:
        """Preprocesses a batch, each tower its share.

        Args:
            data: (x, y, sample_weight) of a whole batch.
            training: Whether this is a part of training.
            placed: What `place` made of it, if that was done ahead.

        Returns:
            The shares, `None` if that is left to `run`; and the whole batch, as the
            loss is to see it.
        """
        if self.preprocess is None:
            return placed, data
        placed = self.place(data) if placed is None else placed
        data = tf.nest.map_structure(batch.as_tensor, data)
        size = batch.batch_size(data)
        towers = [
            self.preprocess.on_tower(k, training) for k in range(len(self.devices))
        ]
        if not self.model.run_eagerly:
            xla = self.xla and (training or self.compiled)
            known = self._known_sizes(data, size, xla)

            def trace(each, rows=None, xla=False):
                spec = batch.share_spec(data, rows)
                return Traced(each, [spec], xla, False, self.on_gpus)

            for k, each in enumerate(towers):
                trace_it, mine = functools.partial(trace, each), known[k : k + 1]
                first = self._trace_first(trace_it, mine, size, xla)
                (towers[k],) = self._of_sizes(trace_it, first, mine, size, xla)
        bounds = batch.share_bounds(size, self.split_ratios)
        shares = [
            TowerCall(device, end - start, tf.ones([]), [rows])
            for device, rows, (start, end) in zip(
                self.devices, placed, bounds, strict=True
            )
        ]
        with tf.name_scope("preprocess"), without_auto_control_deps():
            results = run(towers, shares)
        outputs = {result.tower: result.outputs for result in results}
        with tf.device(self.home), tf.name_scope("gather"):
            sizes = [result.size for result in results]
            whole = batch.join(list(outputs.values()), sizes)
        # Towers known to be idle have no result.
        nothing = batch.take(outputs[0], 0, 0)
        return [outputs.get(k, nothing) for k in range(len(placed))], whole

    def _has_one_size(self, size):
        return len(self.devices) == 1 and isinstance(size, int)

    def _known_sizes(self, data, size, xla):
        """The sizes of shares that towers are traced for, each `None` for any.

        On a GPU, a tower that knows no size computes shapes, and the host waits for the
        GPU to read them. XLA compiles for one size at a time, which takes as long for
        the last batch as for the first.
        """
        towers = len(self.devices)
        if self._has_one_size(size):
            return [size]
        usual = size if isinstance(size, int) else self.usual_rows
        if usual is None or not batch.is_dense(data) or not (xla or self.on_gpus):
            return [None] * towers
        return [rows or None for rows in batch.cut(usual, self.split_ratios)]

    def _trace_first(self, trace, known, size, xla):
        """Traces a tower for any size, unless there is only one.

        Rules are read from it: a graph must not know the number of examples for that.
        """
        if self._has_one_size(size):
            return trace(size, xla)
        return trace(None, xla and not any(known))

    def _of_sizes(self, trace, first, known, size, xla):
        """Traces towers for the sizes that are known; `first` is for all others."""
        if self._has_one_size(size) or not any(known):
            return [first] * len(known)
        usual = {rows: trace(rows, xla) for rows in dict.fromkeys(known) if rows}
        if isinstance(size, int):
            return [usual.get(rows, first) for rows in known]
        return [Sized(usual[rows], first, rows) if rows else first for rows in known]

    def run_towers(
        self,
        function: Callable[..., TowerResult],
        rules: Rules,
        values: Sequence[Values],
        whole: Any,
        *extra: Any,
        placed: Sequence[Any] | None = None,
        training: bool = False,
        eagerly: Callable[..., TowerResult] | None = None,
    ) -> list[TowerResult]:
        """Runs a tower function on all towers, each with its share of a batch.

        Args:
            function: A function of `towers.tower`, its model bound. It takes params,
                state, share, fraction and `extra`.
            rules: The rules that the function reads or follows.
            values: The variables' values for each tower; see `read_variables`.
            whole: The batch to cut: a nest of tensors with one row an example.
            *extra: Tensors that all towers get alike.
            placed: What `place` or `preprocess_batch` made of the batch, if that was
                done ahead.
            training: Whether this is a part of training.
            eagerly: What towers call in eager execution, instead of `function`.

        Returns:
            The results of the towers that have a share, or may have one.
        """
        alone = len(self.devices) == 1
        if not alone:
            refuse_stateful(self.model)
            if training and self.strict:
                checks.check_variables(self.model)
        together = self.together
        in_python = self.model.run_eagerly
        # Keras gives arrays to eager steps.
        whole = tf.nest.map_structure(batch.as_tensor, whole)
        size = batch.batch_size(whole)
        bounds = batch.share_bounds(size, self.split_ratios)
        sizes = [end - start for start, end in bounds]
        fractions = batch.fractions(sizes)
        placed = self.place(whole) if placed is None else placed
        like = whole if self.preprocess is None else placed[0]
        reading = not rules.complete
        xla = self.xla and not together and (training or self.compiled)

        def trace(rows=None, xla=False):
            specs = [
                *_specs(values[0]),
                batch.share_spec(like, rows),
                tf.TensorSpec([], tf.float32),
                *_specs(extra),
            ]
            apart = self._apart()
            return Traced(function, specs, xla, apart, self.on_gpus)

        traced = None
        if in_python:
            if not rules.complete:
                self._prove(trace, rules)
        else:
            known = self._known_sizes(like, size, xla)
            if together:
                known = [None] * len(known)
            traced = self._trace_first(trace, known, size, xla)
            if traced.needs_tables:
                self.reads_tables = True
                values = self.read_variables()
                traced = self._trace_first(trace, known, size, xla)
            self._check_traced(traced, None if self._has_one_size(size) else rules)

        def share(k, rows, size, fraction):
            arguments = *values[k], rows, fraction, *extra
            return TowerCall(self.devices[k], size, fraction, arguments)

        shares = [
            share(k, *mine)
            for k, mine in enumerate(zip(placed, sizes, fractions, strict=True))
        ]

        def everything():
            rows = whole
            if self.preprocess is not None:
                rows = batch.join(placed, [each.size for each in shares])
            return share(0, rows, size, tf.ones([]))

        def inputs(data):
            return data[0] if function.func is passes.forward_backward else data

        if reading and rules.unread:
            # Unless a graph is traced, there are numbers to compare.
            numbers = None
            if not any(map(tf.is_symbolic_tensor, loop.flat(whole))):
                numbers = inputs(everything().arguments[2])
            spec = batch.share_spec(inputs(like), None)
            self._check_rows(rules, spec, numbers, training)
        if not in_python:
            if together:
                return run_in_replica_context(function, traced, shares, everything)
            return run(self._of_sizes(trace, traced, known, size, xla), shares)
        turns = eager.Turns(self.model)
        if together:
            results = run_in_replica_context(function, None, shares, everything)
            self.say(turns.lines_of_all(len(shares)))
        else:
            turn = functools.partial(turns.take, eagerly or function)
            results = run([turn] * len(shares), shares)
            self.say(turns.lines())
        self._kept = turns.kept() if len(results) > 1 else ""
        if not alone:
            checks.check_results(self.model, results)
        return results

    def _prove(self, trace, rules):
        """Reads the rules of eager towers from a graph, if one can be traced."""
        try:
            with eager.aside(self.model):
                traced = trace()
        except Exception as error:
            known = isinstance(error, ModelError | NoRuleError)
            if known and not isinstance(error, UntraceableError):
                raise
            said = eager.words(error.__cause__ or error)
            rules.give_up(f"a layer that only Python can run ({said})")
            line = (
                f"Model '{self.model.name}' cannot be traced as a graph ({said}), so "
                "it is not known whether its layers treat each example by itself. "
                "Towers assume that they do; towers.check_parity shows whether that "
                "is right."
            )
            self.say([line])
        else:
            self._check_traced(traced, rules)

    def _apart(self):
        # Passes over a gathered loss's towers are merged only where both are copied.
        layers = len(layers_of(self.model))
        return layers > _MANY_LAYERS and self.loss_placed != "gathered"

    def _check_traced(self, traced, rules):
        lines = checks.check_effects(self.model, traced.effects)
        if len(self.devices) > 1:
            self.say(lines)
        if rules is not None:
            if self.strict:
                checks.check_coupling(self.model, rules)
            checks.check_outputs(self.model, traced.returned.outputs)

    def _check_rows(self, rules, spec, x, training):
        """Compares rows where the graph does not tell that they are kept apart."""
        if not rules.unread:
            return
        name, culprit = self.model.name, str(rules.unread[0])
        if len(rules.unread) > 1:
            culprit += f" (and {len(rules.unread) - 1} more)"
        # Operations are named anew in each trace.
        about = rules.unread[0].layer or rules.unread[0].operation.type
        if not self.strict:
            line = (
                f"Model '{name}': {culprit} cannot be read, and nothing is compared "
                "with strict=False; each tower computes with its share."
            )
            self.say([line], about)
            return
        key = training, str(spec)
        if key not in self.compared:
            if x is None:
                raise compare.BatchWanted(name, culprit, training, key)
            self.compare(x, training, key)
        verdict = self.compared[key]
        if verdict.differs:
            raise ModelError(
                f"Model '{name}' makes an example's output depend on other examples, "
                f"by {culprit}, which cannot be read: on the first batch, {verdict}; "
                "expected a model that treats each example by itself, so pass "
                "strict=False to multi_gpu_model to accept other numbers than one "
                "device's."
            )
        line = f"Model '{name}': {culprit} cannot be read; {verdict}."
        self.say([line], about)
        if x is not None:
            self.compare_again_what_was_too_small()

    def compare_first(self, data: Any, wanted: compare.BatchWanted) -> None:
        """Compares rows as a graph has asked for; see `compare`.

        Args:
            data: A batch, as the data have it.
            wanted: What the graph has asked for.
        """
        x, _, _ = keras.utils.unpack_x_y_sample_weight(loop.without_optionals(data))
        # As in inference: nothing random is drawn.
        _, (x, _, _) = self.preprocess_batch((x, None, None), training=False)
        self.compare(x, wanted.training, wanted.key)

    def compare(self, x: Any, training: bool, key: Any) -> None:
        """Compares rows of a part of a batch with those of the whole.

        Args:
            x: The inputs of a batch, as the model sees them: a nest of tensors.
            training: Whether this is a part of training.
            key: The name of the verdict in `compared`.
        """
        x = tf.nest.map_structure(batch.as_tensor, x)
        size = int(batch.batch_size(x))
        values = self.read_variables(look_up=False)[0]

        def compared(rows):
            part = batch.take(x, 0, rows)
            with tf.device(self.devices[0]):
                return compare.compare(self.model, training, values, part)

        try:
            self.compared[key] = compared(size)
        except tf.errors.ResourceExhaustedError:
            # A tower has room for its share; one device may not have it for all.
            bounds = batch.share_bounds(size, self.split_ratios)
            largest = max(end - start for start, end in bounds)
            self.compared[key] = compared(min(size, max(2, largest)))

    def compare_again_what_was_too_small(self) -> None:
        """Forgets verdicts on batches of a single row, for a larger one to come."""
        self.compared = {k: v for k, v in self.compared.items() if v.rows > 1}

    def gather(self, results: Sequence[TowerResult]) -> Any:
        """Joins the towers' outputs at home, with their tags.

        Args:
            results: The towers' results.

        Returns:
            The outputs for the whole batch: a nest of tensors, one row an example.
        """
        sizes = [result.size for result in results]
        with tf.device(self.home), tf.name_scope("gather"):
            outputs = batch.join([r.outputs for r in results], sizes)
            tags = batch.join([r.tags for r in results], sizes)
        for name, values in zip(TAGS, tags, strict=True):
            for output, value in zip(
                tf.nest.flatten(outputs), tf.nest.flatten(values), strict=True
            ):
                set_tag(output, name, value)
        return outputs

    def sum_layer_losses(self, results: Sequence[TowerResult]) -> list[tf.Tensor]:
        """Adds the towers' parts of each loss that layers added."""
        by_loss = zip(*(result.losses for result in results), strict=True)
        return [tf.add_n(parts) for parts in by_loss]

    def combine_state(
        self, results: Sequence[TowerResult], rules: Rules
    ) -> list[tf.Tensor | None]:
        """Combines, at home, what the towers made of the model's variables.

        Args:
            results: The towers' results.
            rules: The rules that combine them.

        Returns:
            A value for each trainable and then each non-trainable variable, `None` for
            those that no tower changed.
        """
        count = len(self._variables())
        sources = [self.devices[result.tower] for result in results]
        with tf.device(self.home), tf.name_scope("state"):
            return reduce.combine_states(
                [result.state for result in results],
                [result.fraction for result in results],
                [rules[f"state {i}"] for i in range(count)],
                sources if any(map(self.packs, sources)) else (),
            )

    def assign_state(self, state: Sequence[tf.Tensor | None]) -> None:
        """Assigns to the model's variables what `combine_state` returned."""
        with tf.device(self.home), tf.name_scope("state"):
            for variable, value in zip(self._variables(), state, strict=True):
                if value is not None:
                    variable.assign(value)

    def _variables(self):
        return self.model.trainable_variables + self.model.non_trainable_variables

    def whole_loss(
        self, data: Any, outputs: Any, losses: Sequence[tf.Tensor], training: bool
    ) -> tf.Tensor:
        """Computes the loss of a whole batch from gathered outputs, as Keras does.

        Args:
            data: (x, y, sample_weight) of the whole batch.
            outputs: The gathered outputs.
            losses: The losses that layers added, of the whole batch.
            training: Whether this is training.

        Returns:
            The loss, a scalar.
        """
        if self._kept and build.overrides(self.model, "compute_loss"):
            raise ModelError(
                f"Model '{self.model.name}' keeps a tensor of one call for later, in "
                f"{self._kept}, and its own compute_loss would find only the last "
                "tower's share there; return the tensor as an output instead."
            )
        x, y, sample_weight = data
        return compute_loss(
            self.model, x, y, outputs, sample_weight, training=training, added=losses
        )

    def update_metrics(
        self, data: Any, outputs: Any, loss: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Updates the model's metrics with a whole batch, as Keras does.

        Args:
            data: (x, y, sample_weight) of the whole batch.
            outputs: The gathered outputs.
            loss: The loss of the whole batch.

        Returns:
            The metrics' results, by name.
        """
        x, y, sample_weight = data
        with tf.name_scope("metrics"):
            size = batch.batch_size(x)
            loss_tracker(self.model).update_state(loss, sample_weight=size)
            return self.model.compute_metrics(x, y, outputs, sample_weight)


def _spec(value):
    known = value is None or isinstance(value, tf.TypeSpec)
    return value if known else tf.type_spec_from_value(value)


def _specs(tensors):
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), list(tensors)
    )

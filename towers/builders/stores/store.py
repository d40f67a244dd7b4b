"""A store says where variables live, how towers read them and how they are updated.

`Store` keeps variables at home. Others are `Copies` (`copies.py`), with a copy on each
tower, and `Shards` (`shards.py`), with a shard on each. A new one is a subclass, and a
function in `strategies.py`. It overrides `create_copies`, `copies` and `copied` if
towers read copies; `broadcast` and `differ` if copies follow the model's own variables
only now and then; `_cut` if variables are in parts; and `apply` if it does more than
update the variables at home.

A step is traced as on one device. Where each variable is whole at home, or in copies,
the trace is complete: its reads, and its update, run where the variables are. Where
variables are in parts, the trace reads stand-ins for them, and contains the optimizer
as one operation (see `updates_apart` of `Trace`). For this operation, the store sends
the sum of gradients to each owner of variables, and each owner applies the optimizer to
the variables it owns.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.collectives import reduce
from towers.collectives.reduce import Gradient
from towers.devices.names import HOST, is_gpu
from towers.keras_adapter import optimizers
from towers.keras_adapter.layers import call_model
from towers.layers import sharded, substitutes, tables, variables
from towers.partition.call import Copied
from towers.partition.combined import REDUCE_SCOPE
from towers.partition.trace import OptimizerCall, Trace
from towers.plan import Plan
from towers.program import words
from towers.program.features import feature
from towers.tower.errors import ModelError


class Store:
    """Variables at home, updated once a step by the sum of all gradients.

    Embedding tables may be sharded over the towers' devices (`shard_embeddings`), and
    with stages the variables of each layer are at home on its stage.

    Attributes:
        stale: Whether the model's own variables may differ from their copies, or from
            those of other hosts.
    """

    def __init__(self, context: Context):
        """Takes the builder's context; knows nothing of the model yet."""
        self._context = context
        self.stale = True
        # Maps the `id` of each table to its number of look-ups in a step, once counted.
        self._looked_up: dict[int, int] | None = None

    # Where variables live.

    @property
    def divides(self) -> bool:
        """Whether variables, or their slots, may be in parts on several devices."""
        return self._context.shard_embeddings != "none"

    @property
    def copied_to(self) -> Sequence[Any]:
        """The towers that have copies of the variables."""
        return ()

    def cut(self, data: Any) -> None:
        """Cuts variables, and their slots, into parts, unless they are cut already.

        Args:
            data: A batch, or its `tf.TypeSpec`s; `None` if not known.
        """
        with variables.replacing(self._context.model):
            self._cut(data)

    def settle(self, data: Any, divided_anew: bool) -> None:
        """Moves variables, once all exist, to their devices, and prints where.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
            divided_anew: Whether layers have just been divided among stages.
        """
        context, plan = self._context, self._context.plan
        if divided_anew and self.divides:
            self.cut(data)
        if is_gpu(plan.home) or plan.pipeline.stages > 1:
            # Some variables created at home belong on other devices.
            with tf.init_scope():
                variables.move(context.model, plan.home_of)
        if context.model.optimizer is not None:
            # Another builder may have cut the slots.
            sharded.join_slots(context.model.optimizer, plan.home_of)
        self.create_copies()
        if self.divides:
            lines = tables.lines(context.model, plan.home_of, self.copies())
            context.say([*lines])

    def create_copies(self) -> None:
        """Creates copies, if towers need them and have none."""

    def copies(self) -> list[tf.Variable]:
        """Returns the copies of all towers."""
        return []

    def keep_whole(self, chosen: Sequence[keras.Variable]) -> None:
        """Joins variables in parts, and their slots, at home, where they stay whole."""
        context, model = self._context, self._context.model
        context.facts.kept_whole |= {*map(id, chosen)}
        with tf.init_scope(), variables.replacing(model):
            for variable in chosen:
                slots = []
                if getattr(model, "optimizer", None) is not None:
                    slots = optimizers.slots_of(model.optimizer, variable, True)
                for value in [variable, *slots]:
                    if sharded.of(value) is not None:
                        sharded.join(value, context.plan.home)

    # How towers read variables.

    def stand_ins(self) -> dict[int, Any]:
        """Returns the stand-ins that a traced step reads; see `sharded.stand_ins`."""
        return sharded.stand_ins(self._context.model.variables)

    @property
    def updates_apart(self) -> bool:
        """Whether a step leaves its update to `add` and `apply`.

        Otherwise, the trace contains the update, and neither method is called.
        """
        if self._context.plan.pipeline.stages > 1:
            return True
        return self.divides and bool(self.stand_ins())

    def copied(self, trace: Trace) -> Copied | None:
        """Returns the copies that a training step reads; `None` if there are none.

        Args:
            trace: The step; the variables that it creates exist.
        """
        del trace
        return None

    # How gradients update variables, where the trace leaves the update to the store.

    def add(
        self,
        update: OptimizerCall,
        parts: Sequence[Sequence[Gradient]],
        whole: Mapping[int, Gradient],
    ) -> list[list[Gradient]]:
        """Adds the gradients that an optimizer is to apply.

        Gradients of shards are added on the device of each shard.

        Args:
            update: The optimizer's call.
            parts: For each device, its part of each gradient of the call; `None` for
                gradients at home.
            whole: The gradients at home, by their indices in the call.

        Returns:
            For each copy of the variables, a gradient for each of `sharded.targets` of
            the trainable variables, `None` where there is none. Only the first copy has
            the gradients of shards; the others have the gradient's norm instead.

        Raises:
            ModelError: The call is not that of the model's optimizer for its trainable
                variables.
        """
        trained = self._context.model.trainable_variables
        chosen = self._places_in(update)
        of_devices = []
        for tower, part in zip(self._context.plan.replicas, parts, strict=True):
            # Each tower cuts its own gradients, and sends the parts to their owners.
            with tf.device(tower.device):
                gradients = [None if i is None else part[i] for i in chosen]
                of_devices.append(sharded.expand(trained, gradients))
        with tf.name_scope(REDUCE_SCOPE):
            sums = self._sums(of_devices)
        at_home = []
        for variable, i in zip(trained, chosen, strict=True):
            at_home += _of_targets(variable, whole.get(i))
        gradients = self._for_copies(at_home)
        return [
            [b if a is None else a for a, b in zip(*copies, strict=True)]
            for copies in zip(sums, gradients, strict=True)
        ]

    def apply(self, sums: Sequence[Sequence[Gradient]]) -> None:
        """Applies the optimizer to the sums that `add` has returned, on each owner."""
        context, plan = self._context, self._context.plan
        if all(gradient is None for gradient in sums[0]):
            raise ModelError(
                f"No variable of model '{context.model.name}' has a gradient; expected "
                "a loss that depends on one, so look for integers, argmax or "
                "stop_gradient between the variables and the outputs."
            )
        with updating_in_place(plan.home, plan.pipeline.stages), tf.name_scope("apply"):
            self._apply_here(sums[0])

    # Between two steps.

    @functools.cached_property
    def hosts_parts(self) -> Any:
        """The variables that several hosts divide; `None` if this host is alone."""
        if self._context.plan.hosts.count == 1:
            return None
        spread = feature("collectives.spread.hosts_parts")
        return spread.HostsParts(self._context.model)

    def follow_first_host(self) -> None:
        """Assigns the first host's values to the model, its optimizer and metrics."""
        model, hosts = self._context.model, self._context.plan.hosts
        if hosts.count == 1:
            return
        all_variables = [*variables.of(model), *variables.plain(model).values()]
        # No host has a whole variable that hosts divide.
        undivided = [v for v in all_variables if not sharded.across_hosts(v)]
        feature("collectives.first_host").follow_first_host(hosts, undivided)

    def follow_learning_rates(self) -> None:
        """Copies learning rates, which callbacks change, to all towers."""

    def differ(self) -> bool:
        """Returns whether copies may differ from the model's variables."""
        return False

    def broadcast(self) -> None:
        """Assigns the values of the model's own variables to all copies."""

    # Parts of `cut` and `add` that other stores override.

    def _cut(self, data: Any) -> None:
        """Cuts variables and their slots into parts; see `cut`."""
        if self._context.shard_embeddings != "none":
            self._cut_tables(data)

    def _add_on_devices(
        self, plan: Plan, gradients: Sequence[Sequence[Gradient]]
    ) -> Sequence[Sequence[Gradient]]:
        """Adds the towers' gradients of one stage; returns the sums for each copy."""
        return [_sum(plan, gradients, plan.home)]

    def _hand_out(
        self, plan: Plan, sums: Sequence[Gradient]
    ) -> Sequence[Sequence[Gradient]]:
        """Returns the sums of one stage, which home has, for each copy."""
        return [sums]

    # Helpers that are not overridden.

    @property
    def _optimizer(self):
        model = self._context.model
        return model.optimizer if model.compiled else None

    def _places_in(self, update):
        """Returns the index of each trainable variable in a call of the optimizer."""
        model = self._context.model
        indices = {id(variable): i for i, variable in enumerate(update.variables)}
        trained = model.trainable_variables
        if update.optimizer is not model.optimizer or (
            indices.keys() - {*map(id, trained)}
        ):
            raise ModelError(
                f"Model '{model.name}' applies an optimizer of its own, with variables "
                "or a state in parts on several devices; expected `self.optimizer` for "
                "the model's trainable variables, or each variable whole: "
                "variable_update='replicated' without shard_optimizer_state, "
                "shard_embeddings='none', stages=1."
            )
        return [indices.get(id(variable)) for variable in trained]

    def _sums(self, of_devices):
        """Adds the towers' gradients of all targets; returns the sums for each copy."""
        trained, in_parts = self._context.model.trainable_variables, {}
        for i, device in sharded.devices(trained).items():
            with tf.device(device):
                in_parts[i] = reduce.add([gradients[i] for gradients in of_devices])
        others = [
            [None if i in in_parts else g for i, g in enumerate(gradients)]
            for gradients in of_devices
        ]
        if self._context.plan.hosts.count == 1:
            return _with_parts(self._by_stage(self._add_on_devices, others), in_parts)
        return self._for_copies(self._over_hosts(others, in_parts))

    def _over_hosts(self, others, in_parts):
        """Adds the gradients of all hosts.

        Where each host has all parts of a variable, its whole gradient is all-reduced.
        Where hosts divide it, each part is sent to the host that updates it.

        Returns:
            The sum for each target.
        """
        trained = self._context.model.trainable_variables
        hosts, timers = self._context.plan.hosts, self._context.timers
        (sums,) = self._by_stage(lambda plan, g: [_sum(plan, g, plan.merge)], others)
        with tf.device(HOST):
            sums = [in_parts.get(i, total) for i, total in enumerate(sums)]
            gradients = sharded.whole(trained, sums)
            begun = timers.begin_sum(gradients)
            sent, of_owners = {}, {}
            for i, parts in sharded.updated_by_hosts(trained).items():
                if gradients[i] is not None and parts.is_given(gradients[i]):
                    sent.setdefault(parts.give, []).append(i)
            away = {i for indices in sent.values() for i in indices}
            totals = [None if i in away else g for i, g in enumerate(gradients)]
            dense = [total for total in totals if isinstance(total, tf.Tensor)]
            totals = hosts.all_reduce(totals, "gradients", dense)
            for give, indices in sent.items():
                divided = [sharded.of(trained[i]) for i in indices]
                received = give(hosts, divided, [gradients[i] for i in indices])
                of_owners |= zip(indices, received, strict=True)
            timers.end_sum(begun, totals)
            of_targets = []
            for i, (variable, total) in enumerate(zip(trained, totals, strict=True)):
                of_targets += of_owners.get(i) or _of_targets(variable, total)
        return of_targets

    def _for_copies(self, gradients):
        """Returns the gradients of targets, which home has, for each copy."""
        trained = self._context.model.trainable_variables
        in_parts = {i: gradients[i] for i in sharded.devices(trained)}
        others = [None if i in in_parts else g for i, g in enumerate(gradients)]
        copies = self._by_stage(lambda plan, s: self._hand_out(plan, s[0]), [others])
        return _with_parts(copies, in_parts)

    def _by_stage(self, function, gradients):
        """Calls a function for each stage, and joins the gradients for each copy.

        Args:
            function: Takes the plan of the stage, and lists of its gradients; returns
                gradients for each copy.
            gradients: Lists of gradients of all targets.
        """
        targets = sharded.targets(self._context.model.trainable_variables)
        copies: list[list[Gradient]] = []
        for indices, plan in self._context.plan.by_stage(targets):
            of_stage = [[of_one[i] for i in indices] for of_one in gradients]
            made = function(plan, of_stage)
            copies += [[None] * len(targets) for _ in made[len(copies) :]]
            for copy, sums in zip(copies, made, strict=False):
                for i, gradient in zip(indices, sums, strict=True):
                    copy[i] = gradient
        return copies

    def _apply_here(self, gradients):
        """Applies the optimizer on the current device."""
        context, model = self._context, self._context.model

        def update(gradients):
            with substitutes.updates():
                sharded.apply(model.optimizer, gradients, model.trainable_variables)

        # XLA compiles for one device.
        wanted = context.xla or context.compiles_update
        wanted = wanted and not sharded.devices(model.trainable_variables)
        if wanted and (context.xla or self._may_compile(gradients)):
            update = tf.function(update, autograph=False, jit_compile=True)
        update(gradients)

    def _may_compile(self, gradients):
        """Returns whether XLA may compile an update without the user's request."""
        sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        if sparse:
            line = (
                f"XLA does not compile the update of model '{self._context.model.name}'"
                ", as it would do so anew for each size of its sparse gradients."
            )
            self._context.say([line])
        return not sparse

    # Embedding tables in parts.

    def _cut_tables(self, data):
        """Moves tables, and their slots, to their devices.

        Returns:
            The `id`s of tables that are in parts, or not at home.
        """
        context, optimizer = self._context, self._optimizer
        model, way, plan = context.model, context.shard_embeddings, context.plan
        why = optimizer and sharded.why_not_cut(optimizer)
        if why and way != "auto":
            raise ModelError(
                f"Received shard_embeddings='{way}' with {why}; expected an optimizer "
                "that updates each number by itself, such as Adagrad or Adam, or "
                "shard_embeddings='none'."
            )
        if why:
            line = (
                f"The embedding tables are where all variables are, because of {why}."
            )
            context.say([line])
            with tf.init_scope():
                plan.pipeline.placement.keeps_all()
                tables.bring_home(model, plan.home_of)
            return set()
        with tf.init_scope():
            places_of = plan.places_of(bool(self.copied_to))
            looked_up = self._look_ups(data) if way == "auto" else {}
            divided = self._divide_tables(optimizer)
            placed = tables.layout(
                *(model, plan.table_devices, way, places_of, looked_up, divided)
            )
            tables.put(placed, optimizer)
        return {*map(id, divided), *(id(table.variable) for table in placed)}

    def _divide_tables(self, optimizer):
        """Divides tables among several hosts; returns these tables."""
        context, plan = self._context, self._context.plan
        way = context.shard_embeddings
        if plan.hosts.count == 1:
            return ()
        spread = feature("collectives.spread.tables")
        why = spread.refusal(plan, way)
        if why is not None:
            line = (
                f"Each of the {plan.hosts.count} hosts has whole tables, divided over "
                f"{words.count(len(plan.table_devices), 'device')} of its own: {why}."
            )
            context.say([line])
        return spread.divide(context.model, plan, way, optimizer)

    def _look_ups(self, data):
        """Counts the rows that a step looks up in each table, once; keyed by `id`."""
        context, model = self._context, self._context.model
        known = data is not None and not model.run_eagerly
        if self._looked_up is None and known and len(tables.of(model)) > 1:
            call = tf.function(call_model, autograph=False)
            try:
                x, *_ = context.micro_batch_spec(data)
                with keras.StatelessScope():
                    self._looked_up = tables.look_ups(
                        lambda: call.get_concrete_function(model, x, training=False)
                    )
            except Exception as error:
                # The user's model may raise any exception.
                self._looked_up = {}
                line = (
                    f"The tables of model '{model.name}' are placed by their bytes "
                    "alone, as the rows that it looks up cannot be counted: "
                    f"{words.error_sentence(error)}"
                )
                context.say([line])
        return self._looked_up or {}


@contextlib.contextmanager
def updating_in_place(device: str, stages: int) -> Iterator[None]:
    """Inside, places the operations of an update.

    Keras applies the optimizer under one device. With one stage, and in eager
    execution, that is `device`. With several stages, each operation is placed on the
    device of its largest input, and on `device` if it has none.
    """

    def place(operation):
        if operation.device:
            return operation.device
        placed = [(_elements(t), _device(t)) for t in operation.inputs]
        return max(
            (candidate for candidate in placed if candidate[1]), default=(0, device)
        )[1]

    if stages == 1 or tf.executing_eagerly():
        with tf.device(device):
            yield
        return
    with tf.device(None), tf.compat.v1.device(place):
        yield


def _device(tensor):
    if tensor.device:
        return tensor.device
    # A read of a variable, and an input from outside, have no device of their own.
    if tensor.op.type == "ReadVariableOp":
        return _device(tensor.op.inputs[0])
    captures = getattr(tensor.graph, "captures", ())
    return next((_device(out) for out, inside in captures if inside is tensor), "")


def _elements(tensor):
    # A handle of a variable stands for its value.
    if tensor.dtype == tf.resource:
        return math.inf
    return tensor.shape.num_elements() or 0


def _sum(plan, gradients, target):
    """Adds the towers' gradients of one stage; the sums end on the target device."""
    sources = [tower.device for tower in plan.replicas]
    if any(map(plan.packs, sources)):
        devices = plan.merge, target
        return reduce.all_reduce(gradients, sources, devices, "device")[0][1]
    with tf.device(plan.merge):
        return reduce.sum_gradients(gradients)


def _with_parts(copies, in_parts):
    """Inserts gradients of shards into the lists of copies; only the first updates."""
    norms = {}
    if len(copies) > 1:
        norms = {i: sharded.norm(gradient) for i, gradient in in_parts.items()}
    return [
        [(norms if k else in_parts).get(i, total) for i, total in enumerate(sums)]
        for k, sums in enumerate(copies)
    ]


def _of_targets(variable, gradient):
    """Expands a variable's gradient, which all hosts have, to each of its targets."""
    parts = sharded.of(variable)
    if gradient is not None and parts is not None and parts.elsewhere:
        return parts.parts_of(gradient)
    return sharded.expand([variable], [gradient])

"""Traces a function of a batch once, unchanged, and records the origin of operations.

The function is the user's: a `train_step`, a loss, or anything else that TensorFlow can
trace. It reads and assigns variables as on one device. Only five things are replaced:
gradients are taken of each tower's part of the target, without needless arithmetic of
shapes; layers look up rows of a table without reading the table; BatchNormalization and
the optimizers use fused kernels; an optimizer's `apply` becomes a call of one function;
and other called functions are traced in place, so that all operations are in one graph.

The input specs have an unknown number of rows. With a known number, Keras would divide
by a constant, and a mean would look like a sum. The call of an optimizer stays one
operation, so that the dozen operations for each variable need not be read and placed;
the copies of the variables call the same function with their own handles. Trusted
layers, and gradients of sums and means, are regions: their results are known although
no rule exists for many of their operations. If a tensor within a region is needed
outside, the function is traced again, without regions.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.analysis.dependence import Reader
from towers.analysis.kinds import (
    COUPLED,
    MEAN,
    NONE,
    ROWS,
    SUM,
    UNKNOWN,
    Dependence,
    Edge,
    Total,
)
from towers.analysis.layer_calls import key, recorded_layers
from towers.analysis.operations import BLOCK_PRODUCTS
from towers.analysis.rows import Decided
from towers.collectives.batch import FRACTION
from towers.keras_adapter.graphs import (
    FUNCTION_CALL,
    GRADIENT,
    GRADIENT_SCOPE,
    STOP_RECORDING,
    calls_functions,
    colocated_with,
    gradient_module,
    is_compiled,
    made_in,
    nodes_of,
    run_in_place,
)
from towers.keras_adapter.layers import LAYER_CALL, layers_of, stateless_scope_here
from towers.keras_adapter.optimizers import (
    APPLY,
    SCALE_LOSS,
    all_variables,
    known_variables,
)
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import swapped_values, value_behind
from towers.layers import sharded, substitutes
from towers.tower.errors import ModelError

# Keras's own recurrent cells and layers assign no weights; those of users might.
_CELLS = (keras.layers.GRUCell, keras.layers.LSTMCell, keras.layers.SimpleRNNCell)
_LAYERS = (
    *(keras.layers.ConvLSTM1D, keras.layers.ConvLSTM2D, keras.layers.ConvLSTM3D),
    *(keras.layers.GRU, keras.layers.LSTM, keras.layers.SimpleRNN),
)
_FLOAT8 = [
    f"{of}_{what}"
    for of in ("inputs", "kernel", "outputs_grad")
    for what in ("scale", "amax_history")
]
# Operations whose gradients do not take their inputs.
_PASS_ON = set(
    "AddN AddV2 Cast ExpandDims Identity Neg Pack Reshape Shape Squeeze Sub".split()
)
# Returns whether an operation takes the whole batch's value of an input.
IsTotal = Callable[[tf.Operation, int], bool]


class Region(NamedTuple):
    """Operations whose results are known as a whole, without reading each operation.

    Attributes:
        outputs: The keys of the results.
        layer: The layer that the operations belong to; `None` for a gradient.
    """

    outputs: Sequence[Any]
    layer: keras.layers.Layer | None = None


class OptimizerCall(NamedTuple):
    """A call of an optimizer's `apply`.

    Attributes:
        optimizer: The optimizer.
        variables: The variables that the optimizer updates.
        gradients: The gradient of each variable: dense, sparse or `None`.
    """

    optimizer: keras.optimizers.Optimizer
    variables: Sequence[keras.Variable]
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]


class Trace:
    """A function of a batch, traced once.

    Attributes:
        graph: The graph of the function.
        batch: The nest of input tensors for the batch.
        fraction: The input tensor for the tower's fraction of the batch, a scalar.
        returned: The tensors that the function returns.
        reader: Determines how tensors depend on the examples.
        added: The keys of gradients of variables, which are summed over the towers
            whatever operation takes them.
        gradients: The keys of these, and of the values of sparse gradients.
        indices: The keys of the indices of sparse gradients.
        compiled: Whether a function that the step calls asks for XLA.
        reads_gradients: Whether a gradient is read operation by operation.
        targets: The tensors that were differentiated, such as a loss before loss
            scaling.
        labels: The part of the model that each operation was made for, if requested.
        lookups: The table of each operation that looks up rows, by its name.
        updates: The optimizer calls, by the names of their operations.
        updates_apart: Whether the caller applies the optimizers itself.
        loss_scales: The names of operations that make a loss scale, if gradients have
            to be divided by that value.
        regions: The outermost region of an operation, by its name.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        spec: Any,
        knows_regions: bool = True,
        updates_apart: bool = False,
        decided: Decided | None = None,
        parts: Mapping[int, int] | None = None,
        keeps_loss_scale: bool = False,
        at_home: Container[str] = (),
    ):
        """Traces a function.

        Args:
            function: Takes a batch.
            spec: The `tf.TypeSpec`s of a local batch, with an unknown number of rows.
            knows_regions: Whether layers and gradients become regions. If not, each of
                their operations is read by itself.
            updates_apart: Whether the caller applies the optimizers itself. The
                function then only records which variables they update.
            decided: Tensors that earlier traces have found to be each tower's own;
                `None` if there are none.
            parts: The part of each layer, as for `Labels`; `None` to record no labels.
            keeps_loss_scale: Whether others may change the scale of a
                `LossScaleOptimizer` between the loss and the update.
            at_home: The names of operations that home runs, on the rows of all towers.
        """
        self.labels = None if parts is None else Labels(parts)
        self._knows_regions, self._decided = knows_regions, decided
        self._at_home = at_home
        self.updates_apart = updates_apart
        self._keeps_loss_scale = keeps_loss_scale
        # The scale of the last loss, by the `id` of the optimizer.
        self._scales: dict[int, tf.Tensor] = {}
        self.loss_scales: set[str] = set()
        self.updates: dict[str, OptimizerCall] = {}
        self.regions: dict[str, Region] = {}
        self.added: dict[Any, Dependence] = {}
        self.compiled = self.reads_gradients = False
        self.targets: list[tf.Tensor] = []
        self._unscaled: dict[Any, tf.Tensor] = {}
        self.gradients: set[Any] = set()
        self.indices: set[Any] = set()
        self._records_all = True

        def step(batch, fraction):
            self.graph = tf.compat.v1.get_default_graph()
            self.batch, self.fraction = batch, fraction
            # TensorFlow traces a function that creates variables twice.
            self.regions.clear()
            self.added.clear()
            self.targets.clear()
            self.gradients.clear()
            self.indices.clear()
            self.updates.clear()
            self._scales.clear()
            self.loss_scales.clear()
            if self.labels is not None:
                self.labels.forget()
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._reading(batch))
                stack.enter_context(self._in_one_graph())
                self.lookups = stack.enter_context(substitutes.in_variables())
                stack.enter_context(substitutes.argmax())
                stack.enter_context(substitutes.batch_normalization())
                stack.enter_context(substitutes.updates())
                stack.enter_context(patched(SCALE_LOSS, self._scale_loss))
                for apply in APPLY:
                    stack.enter_context(patched(apply, self._apply))
                return function(batch)

        labelling = contextlib.nullcontext()
        if self.labels is not None:
            labelling = self.labels.noting_layers()
        with tf.device(None), labelling:
            traced = tf.function(step, autograph=False)
            self.concrete = traced.get_concrete_function(
                spec, tf.TensorSpec([], FRACTION)
            )
        self.returned = [*map(_source, self.concrete.outputs)]

    def fed(self, data: Any) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """Yields each input tensor of the batch with its value in the given data.

        Args:
            data: A batch, or a tower's part of one. A value of another type than in the
                trace, as batches are sent, is cast on the device that has it.
        """
        inputs = tf.nest.flatten([self.batch], expand_composites=True)
        values = tf.nest.flatten([data], expand_composites=True)
        for tensor, value in zip(inputs, values, strict=True):
            if tensor is not None:
                yield tensor, _as_traced(value, tensor.dtype)

    def packed(self, values: Sequence[tf.Tensor | None]) -> Any:
        """Packs values in the structure of the function's results.

        A result is `None` if any of its components is, such as its indices.
        """
        return _packed(self.concrete.structured_outputs, iter(values))

    def gradients_of(self, operations: Iterable[str]) -> set[Any]:
        """Returns the keys of gradients that the named operations may take.

        These are the gradients that a tape returns, and those passed to an optimizer,
        which a user may have changed in between.
        """
        updates = (self.graph.get_operation_by_name(n) for n in operations)
        updates = (op for op in updates if op.name in self.updates)
        passed = {key(t) for op in updates for t in op.inputs if t.dtype.is_floating}
        return self.gradients | passed

    @contextlib.contextmanager
    def _reading(self, batch) -> Iterator[None]:
        def stop(original, tape):
            # The graph does not show which operations a tape has recorded.
            self._records_all = False
            return original(tape)

        with recorded_layers() as calls:
            self.reader = Reader(
                *(batch, calls if self._knows_regions else {}),
                meets=self._is_read,
                decided=self._decided,
                at_home=self._at_home,
            )
            # This reader asks for no totals, so that it may read within gradients.
            self._apart = Reader(batch, calls, meets=lambda op: False)
            self._calls = calls
            if not self._knows_regions:
                with patched(GRADIENT, self._gradient_by_hand):
                    yield
                return
            # The fraction differs between towers, and has no value outside a gradient.
            self.reader.know({key(self.fraction): UNKNOWN})
            with (
                patched(LAYER_CALL, self._call),
                patched(GRADIENT, self._gradient),
                patched(STOP_RECORDING, stop),
            ):
                yield

    @contextlib.contextmanager
    def _in_one_graph(self):
        """Traces called functions in place within the context."""

        def call(original, function, *args, **kwargs):
            if not self._here():
                return original(function, *args, **kwargs)
            self.compiled |= is_compiled(function)
            return run_in_place(function, *args, **kwargs)

        with patched(FUNCTION_CALL, call):
            yield

    def _scale_loss(self, original, optimizer, loss):
        """Multiplies a loss by the scale of an optimizer, and records both."""
        if not self._here():
            return original(optimizer, loss)
        if self._keeps_loss_scale:
            scale = tf.identity(original(optimizer, tf.ones([])))
            self._scales[id(optimizer)] = scale
            self.loss_scales.add(scale.op.name)
            scaled = keras.ops.multiply(loss, scale)
        else:
            scaled = original(optimizer, loss)
        if tf.is_symbolic_tensor(scaled):
            self._unscaled[key(scaled)] = loss
        return scaled

    def _apply(self, original, optimizer, grads, trainable_variables=None):
        """Wraps the updates of an optimizer in one function of the gradients."""
        unknown = trainable_variables is None and not optimizer.built
        if self.updates_apart and not self._here():
            _check_whole(optimizer)
        if not self._here() or not grads or unknown:
            return original(optimizer, grads, trainable_variables)
        if trainable_variables is None:
            variables = known_variables(optimizer)
        else:
            variables = [*trainable_variables]
        if any(map(sharded.of, variables)):
            _check_cut(optimizer)
        if self.updates_apart or any(map(sharded.of, variables)):
            _check_each_once(optimizer, variables)
        if not optimizer.built:
            with sharded.slots_like_variables():
                optimizer.build(variables)

        def apply(gradients, scale):
            if scale is not None:
                factor = optimizer.scale_loss(tf.ones([])) / scale
                gradients = [
                    gradient
                    if variable.overwrite_with_gradient
                    else _scaled(factor, gradient)
                    for gradient, variable in zip(gradients, variables, strict=True)
                ]
            if not self.updates_apart:
                gradients = sharded.expand(variables, gradients)
                targets = sharded.targets(variables)
                return original(
                    optimizer, *sharded.each_missing_once(gradients, targets)
                )
            for variable in [*variables, *all_variables(optimizer)]:
                for value in sharded.places(variable):
                    value.assign(value)

        arguments = [*map(_as_gradient, grads)], self._scales.get(id(optimizer))
        specs = tf.nest.map_structure(tf.type_spec_from_value, arguments)
        called = tf.function(apply, autograph=False).get_concrete_function(*specs)
        variables_of_call = [*variables, *all_variables(optimizer)]
        known = {
            id(value.handle) for v in variables_of_call for value in sharded.places(v)
        }
        if effects.changed(called.graph) - known:
            # The call has further effects, which must not be repeated for each copy.
            return original(optimizer, grads, trainable_variables)
        with made_in(self.graph) as created:
            called(*arguments)
        update = OptimizerCall(optimizer, variables, arguments[0])
        self.updates |= {op.name: update for op in created if calls_functions(op)}
        return None

    def _is_read(self, op):
        """Checks whether an operation is read by itself, outside all regions."""
        return op.name not in self.regions

    def _here(self):
        return tf.compat.v1.get_default_graph() is self.graph

    def _call(self, original, layer, *args, **kwargs):
        if not self._here():
            return original(layer, *args, **kwargs)
        with made_in(self.graph) as created, _weights_read_once(layer):
            outputs = original(layer, *args, **kwargs)
        keys = [
            key(t)
            for t in tf.nest.flatten(outputs, expand_composites=True)
            if tf.is_symbolic_tensor(t)
        ]
        calls = [self._calls[output] for output in keys if output in self._calls]
        if any(call.trusted and call.layer is layer for call in calls):
            region = Region(keys, layer)
            self.regions.update((op.name, region) for op in created)
        return outputs

    def _gradient(
        self,
        original,
        tape,
        target,
        sources,
        output_gradients=None,
        unconnected_gradients=tf.UnconnectedGradients.NONE,
    ):
        """Takes the gradient of each tower's part of the target, if there is one."""
        original = functools.partial(sharded.gradient, original)
        flat, flat_sources = tf.nest.flatten(target), tf.nest.flatten(sources)
        symbolic = all(map(tf.is_symbolic_tensor, flat))
        if self._here():
            targets = filter(tf.is_symbolic_tensor, flat)
            self.targets += [self._unscaled.get(key(t), t) for t in targets]
        upstream = [None] * len(flat)
        if output_gradients is not None:
            upstream = tf.nest.flatten(output_gradients)
        if self._here() and symbolic and self._records_all:
            starts = source_keys(self.graph, sources)
            flat, upstream = terms(flat, upstream, starts, self.reader.of)
        kinds = [*map(self.reader.of, flat)] if symbolic else []
        of_sources = [
            self.reader.of(source) if tf.is_symbolic_tensor(source) else NONE
            for source in (flat_sources if self._here() else ())
        ]
        if (
            not self._here()
            or not {*of_sources} <= {NONE, ROWS}
            or not {*kinds} & {MEAN, ROWS, SUM}
            or not {*kinds} <= {MEAN, NONE, ROWS, SUM}
            or self._crosses(flat, flat_sources)
            or not all(map(self._fits, flat, kinds, upstream))
            or any(map(is_custom, operations_behind(flat)))
            or (totals := totals_within(flat, self.is_total, self.reader.totals))
            is None
        ):
            # Each operation of the gradient is read by itself, as any other operation.
            self.reads_gradients |= self._here()
            if symbolic and self._here() and (own := self.reader.own) is not None:
                begin = source_keys(self.graph, sources)
                known = self.is_total, self.reader.totals
                own.contested |= hindering(flat, *known, begin)
                own.contested |= {*map(key, flat)} & {*self.reader.extremes}
            return self._gradient_by_hand(
                *(original, tape, target, sources),
                *(output_gradients, unconnected_gradients),
            )
        with made_in(self.graph) as created:
            seeds = [
                *map(functools.partial(_seed, self.fraction), flat, kinds, upstream)
            ]
            with substitutes.gradients(self._rows_per_example):
                of_tape = original(tape, flat, sources, seeds, unconnected_gradients)
            pairs = zip(tf.nest.flatten(of_tape), flat_sources, strict=True)
            parts = [
                [self._kept(part, source) for part in self._parts_of(gradient, source)]
                for gradient, source in pairs
            ]
            pairs = zip(parts, flat_sources, strict=True)
            uses = [_overwriting_uses(first, source) for (first, *_), source in pairs]
        if self.labels is not None:
            self.labels.note_gradients(created)
        known = self._note_kinds(flat, parts, flat_sources, of_sources)
        self.reader.know(known)
        region = Region([*known])
        self.regions.update((op.name, region) for op in created)
        for op in created:
            for i, tensor in enumerate(op.inputs):
                if key(tensor) in totals:
                    self.reader.totals[Edge(op.name, i)] = totals[key(tensor)]
        for use in itertools.chain(*uses):
            # Each tower computes its own value; home takes the largest.
            self.reader.know({key(use): NONE})
            self.reader.extremes[key(use)] = Total(use, COUPLED)
        gradients = [
            tf.add_n(values) if values else _joined(of_source)
            for of_source, values in zip(parts, uses, strict=True)
        ]
        return tf.nest.pack_sequence_as(of_tape, gradients)

    def _rows_per_example(self, tensor):
        """Returns how many rows a tensor has per example, or `None` if unknown."""
        if self._apart.of(tensor) is not ROWS:
            return None
        return self._apart.counts.of(tensor)

    def _gradient_by_hand(self, original, tape, target, sources, *args, **kwargs):
        """Takes a gradient whose operations are read one by one."""
        own = self.reader.own
        original = functools.partial(sharded.gradient, original)
        if (own is None and self.labels is None) or not self._here():
            return original(tape, target, sources, *args, **kwargs)
        with made_in(self.graph) as created:
            gradients = original(tape, target, sources, *args, **kwargs)
        if self.labels is not None:
            self.labels.note_gradients(created)
        if own is None:
            return gradients
        own.by_hand.update(op.name for op in created)
        targets = [*filter(tf.is_symbolic_tensor, tf.nest.flatten(target))]
        for tensor in [t for op in operations_behind(targets) for t in op.outputs]:
            self.reader.of(tensor)
            own.send_home(tensor)
        return gradients

    def decide(self) -> Decided | None:
        """Returns decisions about each tower's own tensors, for another trace."""
        own, reader = self.reader.own, self.reader
        return own and own.decide(reader.totals, reader.extremes, self._in_gradient)

    def _in_gradient(self, op):
        region = self.regions.get(op.name)
        return region is not None and region.layer is None

    def _fits(self, target, kind, given):
        """Checks whether a tower has a target and the gradient given for it."""
        if key(target) in self.reader.extremes or key(target) in self.added:
            return False
        if given is None or not tf.is_symbolic_tensor(given):
            return True
        if key(given) in self.reader.extremes or key(given) in self.added:
            return False
        return self.reader.of(given) in ({NONE, ROWS} if kind is ROWS else {NONE})

    def _kept(self, gradient, source):
        """Returns a gradient; all its rows if the indices depend on a total."""
        sparse = isinstance(gradient, tf.IndexedSlices)
        if sparse and self._rows_of(gradient.indices, source) not in (NONE, ROWS):
            dense = tf.convert_to_tensor(gradient)
            rows = tf.range(tf.shape(dense)[0])
            return tf.IndexedSlices(dense, rows, tf.shape(dense))
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            gradient = self._of_lookups(gradient)
        elif hasattr(source, "handle"):
            # TensorFlow does not infer the shape of every product; packing needs the
            # shape.
            gradient.set_shape(source.shape)
        with made_in(self.graph) as created:
            kept = tf.identity(gradient)
        for op in created:
            if (table := self.lookups.get(op.inputs[0].op.name)) is not None:
                self.lookups[op.name] = table
        return kept

    def _parts_of(self, gradient, source):
        """Divides a sparse gradient into rows that the batch names, and fixed rows.

        The towers' slices of the former are concatenated, those of the latter added: an
        optimizer that squares slices sees as many of them as on one device.

        Returns:
            The parts in the order of the gradient's slices; of other gradients, one.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            return [gradient]
        indices = _index_parts(gradient.indices)
        kinds = {self._rows_of(unshifted, source) for unshifted, _ in indices}
        values = _value_parts(gradient.values, len(indices))
        if kinds != {NONE, ROWS} or values is None:
            return [gradient]
        return [
            tf.IndexedSlices(
                tf.concat(columns, axis=1) if len(columns) > 1 else columns[0],
                part if start is None else part + start,
                gradient.dense_shape,
            )
            for columns, (part, start) in zip(values, indices, strict=True)
        ]

    def _of_lookups(self, gradient):
        """Returns a sparse gradient whose indices are the row numbers as looked up.

        The indices that TensorFlow computes depend on the shape of the tower's values.
        """
        index_parts = joined_parts(gradient.indices)
        value_parts = joined_parts(gradient.values)
        ids = [t.op.inputs[0] for t in index_parts if t.op.type == "Reshape"]
        are_lookups = all(t.op.name in self.lookups for t in ids)
        are_reshaped = all(t.op.type == "Reshape" for t in value_parts)
        if not (
            are_lookups
            and are_reshaped
            and len(ids) == len(value_parts) == len(index_parts)
        ):
            return gradient
        table = self.lookups[ids[0].op.name]
        with made_in(self.graph) as created:
            indices = tf.concat([tf.reshape(t, [-1]) for t in ids], axis=0)
        self.lookups.update((op.name, table) for op in created)
        shape = [-1, *table.shape[1:]]
        value_parts = tf.concat(
            [tf.reshape(t.op.inputs[0], shape) for t in value_parts], axis=0
        )
        return tf.IndexedSlices(value_parts, indices, gradient.dense_shape)

    def _rows_of(self, indices, source):
        """Returns how the indices of a sparse gradient depend on the examples."""
        kind = self._apart.of(indices)
        cut = next(sharded.sources_of([source])) is not source
        # The rows were looked up, each in its shard.
        return ROWS if cut and kind is not NONE else kind

    def _note_kinds(self, targets, parts, sources, kinds):
        """Records how gradients depend on the examples; returns this by their keys."""
        known, own = {}, self.reader.own
        is_own = own is not None and any(target in own for target in targets)
        every = [
            (gradient, source, kind)
            for of_source, source, kind in zip(parts, sources, kinds, strict=True)
            for gradient in of_source
        ]
        for gradient, source, kind in every:
            sparse = isinstance(gradient, tf.IndexedSlices)
            if sparse and self._rows_of(gradient.indices, source) is NONE:
                # The indices are the same on each tower, as for a table of positions.
                self.added[key(gradient.values)] = SUM
                self.gradients.add(key(gradient.values))
                known |= {key(gradient.values): NONE, key(gradient.indices): NONE}
            elif sparse:
                # The rows of all towers, concatenated, are those of the batch.
                known |= {key(gradient.values): ROWS, key(gradient.indices): ROWS}
                self.gradients.add(key(gradient.values))
                self.indices.add(key(gradient.indices))
                if gradient.dense_shape is not None:
                    known[key(gradient.dense_shape)] = NONE
            elif gradient is not None:
                known[key(gradient)] = kind
                if kind is ROWS:
                    self.reader.blocks.same(gradient, source)
                    if is_own:
                        own.like(gradient, source)
                else:
                    self.added[key(gradient)] = SUM
                    self.gradients.add(key(gradient))
        return known

    def _crosses(self, targets, sources):
        """Checks whether totals on the gradient's path depend on the sources.

        The gradient of a tower's part then is not a part of the gradient.
        """
        totals = totals_taken(targets, self.is_total).values()
        return flows_to([*totals], source_keys(self.graph, sources))

    def is_total(self, op: tf.Operation, index: int) -> bool:
        """Checks whether an operation takes the whole batch's value of an input."""
        tensor = op.inputs[index]
        if Edge(op.name, index) in self.reader.totals:
            return True
        if key(tensor) in self.reader.extremes:
            return True
        # Within a gradient of a gradient, each tower has its own part.
        return key(tensor) in self.added and not self._in_gradient(op)


def _index_parts(indices):
    """Returns the parts of indices, each with a shift that is still to be added.

    The shift is the start of a shard, to whose rows several look-ups refer; `None`
    without one.
    """
    parts = []
    for part in joined_parts(indices):
        if part.op.type != "AddV2":
            parts.append((part, None))
            continue
        of_shard, start = part.op.inputs
        parts += [(unshifted, start) for unshifted in joined_parts(of_shard)]
    return parts


def _value_parts(values, count):
    """Returns the values of each of `count` look-ups, in columns if shards have these.

    Returns `None` if the parts are not those of look-ups.
    """
    parts = joined_parts(values)
    shards, left = divmod(len(parts), count)
    if left or (shards > 1 and tf.get_static_value(values.op.inputs[-1]) != 1):
        return None
    return [parts[k::count] for k in range(count)]


def _joined(parts):
    """Joins the parts of a gradient: slices are concatenated; a single part stays."""
    if len(parts) == 1:
        return parts[0]
    values = tf.concat([part.values for part in parts], axis=0)
    indices = tf.concat([part.indices for part in parts], axis=0)
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def _check_cut(optimizer):
    if (why := sharded.why_not_cut(optimizer)) is not None:
        raise ModelError(
            f"Received shard_embeddings with a step that applies {why}, to a table; "
            "expected an optimizer that updates each number by itself, such as Adagrad "
            "or Adam, or shard_embeddings='none'."
        )


def _check_each_once(optimizer, variables):
    """Raises if a call has two gradients of a variable: its owner applies one."""
    counts = collections.Counter(map(id, variables))
    twice = [variable for variable in variables if counts[id(variable)] > 1]
    if twice:
        raise ModelError(
            f"Received a step that applies {type(optimizer).__name__} to variable "
            f"'{twice[0].path}' twice in one call, with variables in parts or in "
            "stages; expected each variable once in a call, or two calls."
        )


def _check_whole(optimizer):
    """Raises if a call in a branch or a loop has sharded state."""
    if any(sharded.of(variable) is not None for variable in all_variables(optimizer)):
        raise ModelError(
            f"Received a step that applies {type(optimizer).__name__} in a branch or a "
            "loop, with its slots in parts on several devices; expected `apply` "
            "outside, or variables that are whole, as with "
            "variable_update='replicated' and shard_embeddings='none'."
        )


def _as_gradient(gradient):
    known = gradient is None or isinstance(gradient, tf.IndexedSlices)
    return gradient if known else tf.convert_to_tensor(gradient)


def _scaled(factor, gradient):
    if gradient is None:
        return None
    return tf.math.scalar_mul(tf.cast(factor, gradient.dtype), gradient)


def _overwriting_uses(gradient, source):
    """Returns the gradients of each use, if they overwrite the variable."""
    if gradient is None or not getattr(source, "overwrite_with_gradient", False):
        return []
    return largest_of_each_use(gradient)


def _seed(fraction, target, kind, given):
    """Returns the gradient of the batch's target with respect to a tower's part."""
    if kind in (ROWS, SUM):
        return tf.ones_like(target) if given is None else given
    fraction = tf.cast(fraction, target.dtype)
    if given is None:
        return tf.broadcast_to(fraction, tf.shape(target))
    return fraction * given


def _as_traced(value, dtype):
    if value.dtype == dtype:
        return value
    if tf.executing_eagerly():
        scope = tf.device(value.device)
    else:
        scope = tf.compat.v1.get_default_graph().colocate_with(value)
    with scope:
        return tf.cast(value, dtype)


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor behind an output, without identities that only wait."""
    while tensor.op.type == "Identity" and tensor.op.control_inputs:
        tensor = tensor.op.inputs[0]
    return tensor


def _packed(structure, values):
    def one(like):
        parts = [
            next(values) if tf.is_symbolic_tensor(part) else part
            for part in tf.nest.flatten(like, expand_composites=True)
        ]
        if any(part is None for part in parts):
            return None
        return tf.nest.pack_sequence_as(like, parts, expand_composites=True)

    return tf.nest.map_structure(one, structure)


# Recurrent layers read their weights once, before the loop.


@contextlib.contextmanager
def _weights_read_once(layer: keras.layers.Layer) -> Iterator[None]:
    """Reads the weights of a recurrent layer once, for a call within the context.

    The loop of Keras would read the weights in each iteration, which a tower on another
    device would have to wait for. Layers with other cells than Keras's are left alone.
    """
    if not layer.built or not _is_kerass(layer) or stateless_scope_here() is not None:
        yield
        return
    weights = layer.weights
    values = [tf.convert_to_tensor(value_behind(weight)) for weight in weights]
    with swapped_values(weights, values):
        yield


def _is_kerass(layer):
    if type(layer) in _LAYERS:
        return True
    cell = layer.cell if type(layer) is keras.layers.RNN else None
    cells = cell.cells if type(cell) is keras.layers.StackedRNNCells else [cell]
    return all(type(member) in _CELLS for member in cells)


# Variables that are overwritten with their gradient, as in Keras's float8.
#
# A layer that computes in 8 bits keeps a scale and a history of largest absolute values
# (amax), for its inputs, its kernel and the gradient of its outputs (delayed scaling,
# as in NVIDIA's Transformer Engine). The new values arrive as the variables' gradients.
# The scale follows from the old history, so it is the same on all towers. The new
# history is the old one with the largest absolute value of the batch, which is the
# largest of the towers' values. A tower's gradients are of the size that they have on
# one device, so this holds for the history of gradients, too. Keras also takes the
# largest value when it accumulates gradients.
#
# If a model uses a layer twice, one device adds the results of both uses. A tower
# therefore keeps the uses apart: the maximum is taken for each use, and the maxima are
# added.


def overwritten_unlike_float8(model: keras.Model) -> list[keras.Variable]:
    """Returns overwritten variables outside float8, with an unknown reduction."""
    known = {
        id(getattr(layer, name, None))
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)
        for name in _FLOAT8
    }
    variables = model.trainable_variables
    return [v for v in variables if v.overwrite_with_gradient and id(v) not in known]


def largest_of_each_use(gradient: tf.Tensor) -> list[tf.Tensor]:
    """Returns the gradient of each use of a variable, as a maximum.

    Args:
        gradient: The sum over all uses, in a graph.
    """
    waiting, largest = [gradient], []
    while waiting:
        current = waiting.pop()
        if current.op.type in ("AddN", "AddV2", "Identity"):
            waiting += current.op.inputs
        else:
            largest.append(tf.reduce_max(current[tf.newaxis], axis=0))
    return largest


# Operations that the gradient of some tensors flows through, and the terms of sums.
#
# The gradient of a sum is the sum of the terms' gradients. A masked mean is a quotient
# of towers' parts, and a norm of weights is the same on each tower: the tape therefore
# differentiates the terms, each with its own factor.


def operations_behind(tensors: Sequence[tf.Tensor]) -> Iterator[tf.Operation]:
    """Yields the operations through which the gradient of some tensors flows."""
    waiting, seen = [tensor.op for tensor in tensors], set()
    while waiting:
        op = waiting.pop()
        if op.name not in seen and op.type != "StopGradient":
            seen.add(op.name)
            yield op
            waiting += [t.op for t in op.inputs if not t.dtype.is_integer]


def flows_to(tensors: Sequence[tf.Tensor], keys: Collection[Any]) -> bool:
    """Checks whether the gradient of some tensors flows to one of the given keys."""
    return any(
        key(tensor) in keys
        for op in operations_behind(tensors)
        for tensor in (*op.inputs, *op.outputs)
    )


def source_keys(graph: tf.Graph, sources: Any) -> set[Any]:
    """Returns the keys of the tensors of variables and other sources in a graph."""
    sources = [*sharded.sources_of(tf.nest.flatten(sources))]
    handles = {id(source.handle) for source in sources if hasattr(source, "handle")}
    symbolic = {key(source) for source in sources if tf.is_symbolic_tensor(source)}
    return symbolic | {
        key(inside) for outside, inside in graph.captures if id(outside) in handles
    }


def totals_taken(
    tensors: Sequence[tf.Tensor], is_total: IsTotal
) -> dict[Any, tf.Tensor]:
    """Returns the totals that operations behind some tensors take, by their keys."""
    return {
        key(tensor): tensor
        for op in operations_behind(tensors)
        for i, tensor in enumerate(op.inputs)
        if is_total(op, i)
    }


def totals_within(
    targets: Sequence[tf.Tensor], is_total: IsTotal, known: Mapping[Edge, Total]
) -> dict[Any, Total] | None:
    """Returns the totals behind some tensors, which their gradients take as well.

    Returns `None` if an operation whose gradient takes its inputs takes a tower's part
    of one of these. `known` has the totals that are not plain sums.
    """
    behind, parts = {}, set()
    for op in operations_behind(targets):
        for i, tensor in enumerate(op.inputs):
            if is_total(op, i):
                edge, total = Edge(op.name, i), Total(tensor, SUM)
                behind[key(tensor)] = known.get(edge, total)
            elif op.type not in _PASS_ON:
                parts.add(key(tensor))
    return None if parts & behind.keys() else behind


def hindering(
    targets: Sequence[tf.Tensor],
    is_total: IsTotal,
    known: Mapping[Edge, Total],
    begin: Collection[Any],
) -> set[Any]:
    """Returns the keys of totals that keep a gradient from being a sum over towers.

    These are the totals that depend on the sources, whose keys are `begin`; or all, if
    `totals_within` returns `None`.
    """
    totals = totals_taken(targets, is_total)
    if totals_within(targets, is_total, known) is None:
        return {*totals}
    return {name for name, tensor in totals.items() if flows_to([tensor], begin)}


def joined_parts(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that were concatenated to a tensor, or the tensor itself."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    if tensor.op.type != "ConcatV2":
        return [tensor]
    inputs = tensor.op.inputs[:-1]
    return [part for joined in inputs for part in joined_parts(joined)]


def is_custom(op: tf.Operation) -> bool:
    """Checks whether a user has defined the gradient of an operation.

    The search includes branches and loops.
    """
    return any(
        node.op == "IdentityN"
        and "_gradient_op_type" in node.attr
        and not _is_known(gradient_module(node))
        for node in nodes_of(op)
    )


def _is_known(module):
    return module in BLOCK_PRODUCTS or module.startswith(("keras.", "tensorflow."))


def terms(
    targets: Sequence[tf.Tensor],
    given: Sequence[tf.Tensor | None],
    source_keys: Collection[Any],
    kind: Callable[[tf.Tensor], Dependence],
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Splits targets into terms that each tower can differentiate.

    A scalar that is a sum of several kinds, such as a quotient of totals, a mean and a
    norm of weights, is no tower's part of a target. Its terms are.

    Args:
        targets: The tensors to differentiate.
        given: The gradient given for each target; `None` for one.
        source_keys: The keys of the sources of the gradient.
        kind: Determines how a tensor depends on the examples.

    Returns:
        The terms, and the gradients given for them.
    """
    pairs = []
    for target, factor in zip(targets, given, strict=True):
        leaves = [*_leaves(target, factor, source_keys, kind)]
        if kind(target) is MEAN and all(
            kind(leaf) is MEAN or not flows_to([leaf], source_keys)
            for leaf, _ in leaves
        ):
            leaves = [(target, factor)]
        pairs += leaves
    return [term for term, _ in pairs], [factor for _, factor in pairs]


def _leaves(target, given, source_keys, kind):
    waiting = [(target, given)]
    while waiting:
        term, factor = waiting.pop()
        operands = None
        # A mean that is a quotient of parts has no terms that are parts of a mean.
        linear = kind(term) is NONE or (
            kind(term) is MEAN and {*map(kind, term.op.inputs)} <= {MEAN, NONE}
        )
        # A source of the gradient must not be split.
        if term.shape.rank == 0 and linear and key(term) not in source_keys:
            operands = _terms_of(term.op, factor, source_keys)
        if operands is None:
            yield term, factor
        else:
            waiting += operands


def _terms_of(op, factor, source_keys):
    """Returns the terms of a sum or a multiple, each with its factor; or `None`."""
    if op.type in ("AddN", "AddV2"):
        return [(term, factor) for term in op.inputs]
    if op.type == "Identity":
        return [(op.inputs[0], factor)]
    if op.type == "Sub":
        minus = tf.cast(-1, op.inputs[1].dtype) if factor is None else -factor
        return [(op.inputs[0], factor), (op.inputs[1], minus)]
    if op.type not in ("Mul", "RealDiv"):
        return None
    left, right = op.inputs
    if op.type == "Mul" and not flows_to([left], source_keys):
        left, right = right, left
    if flows_to([right], source_keys):
        return None
    if op.type == "RealDiv":
        return [(left, (1 if factor is None else factor) / right)]
    return [(left, right if factor is None else right * factor)]


# Labels: the part of a model that each operation of a traced step was made for.
#
# The operations that a layer makes belong to the layer's part, and so do the operations
# of their gradients. TensorFlow records which operation a gradient operation is
# colocated with; the names of a tape's operations contain the forward scope. All other
# operations, such as an addition between two layers or the loss, belong to the last of
# the parts that their inputs come from; see `towers/stages/phases.py`.


class Labels:
    """Records the part of the model that each operation of a step was made for.

    Attributes:
        parts: The part of each operation that a layer of a part has made, by name.
        backward: The names of the operations of the gradient.
        beside: The names of the operations that a gradient operation belongs to, as far
            as these are known, by its name.
        enclosed: The names of layers that are called inside an operation, such as a
            loop or a branch.
    """

    def __init__(self, layers: Mapping[int, int]):
        """Starts without records; `layers` has the part of each layer, by its `id`."""
        self.parts: dict[str, int] = {}
        self.backward: set[str] = set()
        self.beside: dict[str, list[str]] = {}
        self.enclosed: dict[str, None] = {}
        self._layers = layers
        self._within = False

    @contextlib.contextmanager
    def noting_layers(self) -> Iterator[None]:
        """Records the operations of layers while a step is traced in the context."""
        outside = tf.compat.v1.get_default_graph()

        def call(original, layer, *args, **kwargs):
            part = self._layers.get(id(layer))
            if part is None or self._within:
                return original(layer, *args, **kwargs)
            graph = tf.compat.v1.get_default_graph()
            if getattr(graph, "outer_graph", outside) is not outside:
                self.enclosed[layer.name] = None
                return original(layer, *args, **kwargs)
            self._within = True
            try:
                with made_in(graph) as created:
                    return original(layer, *args, **kwargs)
            finally:
                self._within = False
                self.parts.update((op.name, part) for op in created)

        with patched(LAYER_CALL, call):
            yield

    def forget(self) -> None:
        """Discards the records, as the step is traced once more."""
        for records in (self.parts, self.backward, self.beside, self.enclosed):
            records.clear()

    def _of_scope(self, name, scopes):
        """Returns the forward operations of the scope in a gradient operation's name.

        Returns none if these belong to several parts.
        """
        _, tape, name = name.rpartition(GRADIENT_SCOPE)
        of_scopes = (scopes[scope] for scope in _scopes(name) if scope in scopes)
        operations = next(of_scopes, []) if tape else []
        return (
            operations if len({self.parts[scope] for scope in operations}) == 1 else []
        )

    def note_gradients(self, made: Sequence[tf.Operation]) -> None:
        """Records the operations of a gradient, the last ones of their graph."""
        self.backward.update(op.name for op in made)
        scopes = collections.defaultdict(list)
        for name in self.parts:
            for scope in _scopes(name):
                scopes[scope].append(name)
        for op in made:
            self.beside[op.name] = colocated_with(op) or self._of_scope(op.name, scopes)
        for op in reversed(made):
            if not self.beside[op.name]:
                # A sum of gradients, say, belongs with the operation that takes the
                # sum.
                consumers = (
                    consumer.name for t in op.outputs for consumer in t.consumers()
                )
                forward = (
                    self.beside[consumer]
                    for consumer in consumers
                    if consumer in self.beside
                )
                self.beside[op.name] = next(filter(None, forward), [])
        # The lists in which a forward loop stores values for its gradient are forward
        # operations.
        operations = made[0].graph.get_operations() if made else []
        waiting = operations[: len(operations) - len(made)]
        while waiting:
            for tensor in waiting.pop().inputs:
                if tensor.op.name in self.backward:
                    self.backward.remove(tensor.op.name)
                    waiting.append(tensor.op)


def _scopes(name):
    """Yields the scopes of an operation, the innermost first."""
    while "/" in name:
        name, _, _ = name.rpartition("/")
        yield name

"""TensorFlow's graphs: operations, their definitions and order, and functions."""

import contextlib
import hashlib
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
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.framework.op_def_pb2 import OpDef
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import context, forwardprop_util
from tensorflow.python.eager.polymorphic_function import (
    atomic_function,
    autograph_util,
)
from tensorflow.python.eager.polymorphic_function.concrete_function import (
    ConcreteFunction,
)
from tensorflow.python.framework import (
    auto_control_deps_utils,
    op_def_registry,
    ops,
    registry,
)
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def
from tensorflow.python.ops import handle_data_util, math_grad

from towers.keras_adapter.patching import Target

__all__ = [
    "BROADCAST_AXES",
    "FUNCTION_CALL",
    "GRADIENT",
    "GRADIENT_FUNCTION",
    "GRADIENT_SCOPE",
    "FunctionDef",
    "GraphDef",
    "NodeDef",
    "PartFunction",
    "add_call",
    "add_copy",
    "calls_functions",
    "colocated_with",
    "function_definition",
    "function_graph",
    "gradient_module",
    "has_tangents",
    "is_compiled",
    "is_placed",
    "is_stateful",
    "is_vectorized",
    "keep_functions",
    "made_in",
    "makers",
    "may_change",
    "nodes_of",
    "operation_definition",
    "run_in_place",
    "run_independently",
    "runs_anyway",
    "without_auto_control_deps",
    "written",
]

GRADIENT = Target(tf.GradientTape, "gradient")
"""`GradientTape.gradient(target, sources, output_gradients, unconnected_gradients)`."""

GRADIENT_FUNCTION = Target(registry.Registry, "lookup")
"""`Registry.lookup(kind)` returns a function of an operation and gradients.

A tape looks up there how to differentiate a kind of operation.
"""

BROADCAST_AXES = Target(math_grad, "SmartBroadcastGradientArgs")
"""`SmartBroadcastGradientArgs(x, y, grad)`, of an operation that broadcasts.

For each input, it returns the input's shape, the axes to sum the gradient over, and
whether to sum and reshape the gradient at all.
"""

STOP_RECORDING = Target(tf.GradientTape, "stop_recording")
"""`GradientTape.stop_recording()`."""

GRADIENT_SCOPE = "gradient_tape/"
"""The scope of a gradient's operations, before the scope of the operation itself."""

FUNCTION_CALL = Target(type(tf.function(lambda: None)), "__call__")
"""`__call__` of the functions that `tf.function` returns."""


@contextlib.contextmanager
def made_in(graph: tf.Graph) -> Iterator[list[tf.Operation]]:
    """Yields a list, to which the operations made in the context are added."""
    before, created = len(graph.get_operations()), []
    try:
        yield created
    finally:
        created.extend(graph.get_operations()[before:])


def is_stateful(operation: tf.Operation) -> bool:
    """Checks whether running an operation twice may differ from running it once."""
    return operation._is_stateful


def is_vectorized() -> bool:
    """Checks whether the caller runs in the body of `tf.vectorized_map`.

    TensorFlow replaces operations of the body by batched ones for all elements, so
    their shapes must be the same for each element.
    """
    graph = tf.compat.v1.get_default_graph()
    scopes = [tf.get_current_name_scope()]
    while (graph := getattr(graph, "outer_graph", None)) is not None:
        scopes.append(graph.get_name_scope())
    return any(
        name.startswith("loop_body") for scope in scopes for name in scope.split("/")
    )


def calls_functions(operation: tf.Operation) -> bool:
    """Checks whether an operation calls functions, such as a branch or a loop."""
    return any(True for _ in _called([operation.node_def]))


def nodes_of(operation: tf.Operation) -> Iterator[NodeDef]:
    """Yields the nodes of an operation, and of all functions that it calls."""
    waiting, seen = [operation.node_def], set()
    while waiting:
        node = waiting.pop()
        yield node
        for name in {*_called([node])} - seen:
            seen.add(name)
            waiting += function_definition(name).node_def


def is_compiled(function: Any) -> bool:
    """Checks whether a function of `tf.function` asks for XLA."""
    return bool(function._jit_compile)


def run_in_place(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the function given to `tf.function`, as TensorFlow does in a trace.

    AutoGraph converts it, unless `tf.function` was told not to.
    """
    inner, status = function.python_function, ag_ctx.Status.DISABLED
    if function._autograph:
        options = function._experimental_autograph_options
        inner = autograph_util.py_func_from_autograph(inner, options)
        status = ag_ctx.Status.ENABLED
    with ag_ctx.ControlStatusCtx(status=status):
        return inner(*args, **kwargs)


def run_independently(operations: Iterable[tf.Operation]) -> None:
    """Lets operations of the graph being built wait for no other stateful operation.

    TensorFlow orders stateful operations automatically in a `tf.function`. Outside of
    one, this does nothing.
    """
    if tf.executing_eagerly():
        return
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    if manager is None:
        return
    for operation in operations:
        manager.run_independently(operation)


@contextlib.contextmanager
def without_auto_control_deps(handles: Collection[tf.Tensor] = ()) -> Iterator[None]:
    """Keeps calls with random numbers or checks in the context from waiting.

    TensorFlow would make towers wait for one another, in the order of the calls.

    Args:
        handles: The handles of variables that the calls read. An operation that changes
            one of them later waits for all calls, even if it needs no gradient, such as
            weight decay.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    created = [op for op in graph.get_operations()[before:] if is_stateful(op)]
    run_independently(created)
    with tf.control_dependencies(created):
        for handle in handles:
            with tf.device(handle.device):
                # For TensorFlow, this is the read that a change has to wait for.
                tf.raw_ops.VariableShape(input=handle)


def may_change(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs of an operation that it may change.

    Variables that a called function only reads are left out.
    """
    try:
        only_read = {*operation.get_attr("_read_only_resource_inputs")}
    except ValueError:
        only_read = set()
    inputs = enumerate(operation.inputs)
    return [tensor for i, tensor in inputs if i not in only_read]


def written(operation: tf.Operation) -> list[int]:
    """Returns the indices of the inputs that are handles of variables it may change."""
    if not any(tensor.dtype == tf.resource for tensor in operation.inputs):
        return []
    _, changed = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return [i for i, tensor in enumerate(operation.inputs) if tensor in changed]


def runs_anyway(graph: tf.Graph) -> dict[str, bool]:
    """Returns the operations that a function always runs, used or not.

    Args:
        graph: The graph of a traced function.

    Returns:
        For the name of each operation, whether it does more than read a variable.
    """
    reads = auto_control_deps_utils.RESOURCE_READ_OPS
    return {op.name: op.type not in reads for op in graph.control_outputs}


def operation_definition(kind: str) -> OpDef | None:
    """Returns the definition of a type of operation; `None` if there is none."""
    return op_def_registry.get(kind)


def function_definition(name: str | bytes) -> FunctionDef:
    """Returns the definition of a function that some graph calls.

    Raises:
        tf.errors.NotFoundError: There is no such function.
    """
    return context.context().get_function_def(name)


def function_graph(
    name: str | bytes, given: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]
) -> tf.Graph:
    """Returns the graph of a function that some graph calls.

    The graph has `inputs` and `outputs`, lists of tensors.

    Args:
        name: The function's name.
        given: The inputs of the call, whose handles tell the shapes of variables.
        shapes: The shapes of the inputs.

    Raises:
        tf.errors.NotFoundError: There is no such function.
    """
    definition = function_definition(name)
    # In a graph that is being built, TensorFlow would look for the functions that this
    # one calls there, and not among all.
    with context.eager_mode():
        nodes, names = function_def_to_graph_def(definition, [*shapes])
    for node in nodes.node:
        node.attr.pop("_class", None)
    graph = FuncGraph(definition.signature.name)
    with graph.as_default():
        for tensor, shape in zip(given, shapes, strict=True):
            inside = tf.compat.v1.placeholder(tensor.dtype, shape, "towers_given")
            if tensor.dtype == tf.resource:
                handle_data_util.copy_handle_data(tensor, inside)
            graph.inputs.append(inside)
        # Imported nodes take these tensors in place of the traced inputs.
        arguments = [
            names[argument.name] for argument in definition.signature.input_arg
        ]
        results = [
            names[definition.ret[argument.name]]
            for argument in definition.signature.output_arg
        ]
        fed = dict(zip(arguments, graph.inputs, strict=True))
        graph.outputs = tf.graph_util.import_graph_def(nodes, fed, results, name="")
    return graph


def makers(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor | tf.Operation]:
    """Returns the tensors or operations to wait for until some tensors are available.

    This is the call of a `PartFunction`, if TensorFlow does not order its calls, or
    else the tensor: an operation that waits for another function's call may run before
    the tensor is available, as TensorFlow inlines the function into the caller's graph.
    """
    waits = [t.op if _calls_part(t.op) else t for t in tensors]
    return [*{id(source): source for source in waits}.values()]


def _calls_part(operation):
    if operation.type != "PartitionedCall":
        return False
    return operation.get_attr("f").name.startswith(_PART)


def has_tangents(tensors: Iterable[tf.Tensor]) -> bool:
    """Checks whether a `tf.autodiff.ForwardAccumulator` tracks one of some tensors."""
    return bool(forwardprop_util.pack_tangents([*tensors]).tangents)


def colocated_with(operation: tf.Operation) -> list[str]:
    """Returns the names of operations beside which an operation must run.

    For a gradient, these are the operations that it is the gradient of.
    """
    try:
        groups = operation.get_attr("_class")
    except ValueError:
        return []
    return [group.decode().removeprefix("loc:@") for group in groups]


def gradient_module(node: NodeDef) -> str:
    """Returns the module that defines the custom gradient of an `IdentityN`.

    Returns "" if the module is unknown.
    """
    try:
        kind = node.attr["_gradient_op_type"].s.decode()
        function = ops.gradient_registry.lookup(kind)
        for name in ("tape_grad_fn", "grad_fn"):
            index = function.__code__.co_freevars.index(name)
            function = function.__closure__[index].cell_contents
    except (AttributeError, LookupError, TypeError, ValueError):
        return ""
    return function.__module__ or ""


def add_copy(part: GraphDef, operation: tf.Operation, inputs: Iterable[str]) -> NodeDef:
    """Adds a copy of an operation, without colocation, to a part of a graph.

    Args:
        part: The part.
        operation: The operation.
        inputs: The names of the copy's inputs.

    Returns:
        The copy.
    """
    node = part.node.add()
    node.CopyFrom(operation.node_def)
    node.attr.pop("_class", None)
    del node.input[:]
    node.input.extend(inputs)
    return node


def add_call(
    part: GraphDef,
    operation: tf.Operation,
    function: tf.types.experimental.ConcreteFunction,
    inputs: Iterable[str],
) -> None:
    """Adds a call of a function that replaces an operation, under its name."""
    definition = function.function_def
    context.context().add_function_def(definition)
    part.library.function.append(definition)
    node = part.node.add(name=operation.name, op="PartitionedCall")
    node.input.extend(inputs)
    node.attr["f"].func.name = definition.signature.name
    for name, types in (
        ("Tin", definition.signature.input_arg),
        ("Tout", definition.signature.output_arg),
    ):
        node.attr[name].list.type.extend(argument.type for argument in types)


def keep_functions(part: GraphDef, graph: tf.Graph) -> None:
    """Adds the functions that a part of a graph calls, so that the part can be copied.

    TensorFlow would drop the functions with the graph.
    """
    seen = {function.signature.name for function in part.library.function}
    waiting, library = list(_called(part.node)), None
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if library is None:
            functions = graph.as_graph_def().library.function
            library = {function.signature.name: function for function in functions}
        part.library.function.append(library[name])
        context.context().add_function_def(library[name])
        waiting += _called(library[name].node_def)


def is_placed(part: GraphDef) -> bool:
    """Checks whether an operation of a graph, or of its functions, names its device.

    A function runs on its caller's device. A function that also runs on other devices
    must be inlined: if an operation in it fails, TensorFlow may crash, or wait forever
    (tensorflow#62523).
    """
    functions = (function.node_def for function in part.library.function)
    return any(node.device for nodes in (part.node, *functions) for node in nodes)


def _called(nodes: Iterable[NodeDef]) -> Iterator[str]:
    """Yields the names of the functions that nodes call."""
    for node in nodes:
        for attribute in node.attr.values():
            if attribute.HasField("func"):
                yield attribute.func.name
            yield from (function.name for function in attribute.list.func)


def traced(
    function: Callable[..., Any],
    *specs: tf.TypeSpec,
    xla: bool = False,
    stays: bool = False,
) -> Callable[..., Any]:
    """Traces a function whose operations run on the caller's device.

    Args:
        function: The function.
        specs: The specs of its inputs.
        xla: Whether XLA compiles the function, again for each device and each size.
        stays: Whether calls stay function calls. Otherwise TensorFlow inlines the
            function into the caller's graph.
    """
    options = {"experimental_attributes": {"_noinline": True}} if stays else {}
    with tf.device(None):
        function = tf.function(
            function, autograph=False, jit_compile=xla or None, **options
        )
        concrete = function.get_concrete_function(*specs)
    return _named_by_content(concrete) if xla else concrete


def _named_by_content(
    concrete: tf.types.experimental.ConcreteFunction,
) -> tf.types.experimental.ConcreteFunction:
    """Returns a traced function under a name that depends on its content alone.

    TensorFlow numbers names by all that was traced before. The name is part of the key
    under which TensorFlow keeps XLA's results on disk.
    """
    known, renamed = context.context(), {}
    traced_as = concrete.inference_fn
    name = _rename(traced_as.definition, renamed)
    called = [
        atomic_function.AtomicFunction(inner, known, None)
        for inner in renamed.values()
        if inner != name
    ]
    function = atomic_function.AtomicFunction(
        name,
        known,
        concrete.function_type,
        called,
        traced_as.call_options,
        cached_graph=concrete.graph,
    )
    # The graph is now the new function's.
    concrete._garbage_collector.release()
    return ConcreteFunction(function, shared_func_graph=False)


def _rename(definition, renamed):
    """Makes copies of a function and of those that it calls, named by their content.

    Args:
        definition: The function.
        renamed: The new names, by the old ones. Those of the copies are added.

    Returns:
        The new name.
    """
    copy = FunctionDef()
    copy.CopyFrom(definition)
    old, copy.signature.name = copy.signature.name, ""
    # Attributes that are numbered, too, and of which XLA makes nothing.
    for argument in copy.arg_attr.values():
        argument.attr.pop("_user_specified_name", None)
    for node in copy.node_def:
        node.attr.pop("_gradient_op_type", None)
        node.ClearField("experimental_debug_info")
        for attribute in node.attr.values():
            functions = [attribute.func] if attribute.HasField("func") else []
            for inner in [*functions, *attribute.list.func]:
                if inner.name not in renamed:
                    _rename(function_definition(inner.name), renamed)
                inner.name = renamed[inner.name]
    content = copy.SerializeToString(deterministic=True)
    copy.signature.name = f"{_COMPILED}{hashlib.sha256(content).hexdigest()[:16]}"
    context.context().add_function_def(copy)
    renamed[old] = copy.signature.name
    return renamed[old]


class PartFunction:
    """A function of a part of a graph, which the graph being built may call.

    TensorFlow gets the definition of the function directly. A trace would create each
    operation again in Python, which takes about as long as the first time.
    """

    def __init__(
        self,
        part: GraphDef,
        feeds: Sequence[tuple[str, tf.DType]],
        makes: Sequence[tf.Tensor],
        written: Container[str],
        runs: Mapping[str, bool],
        gated: Collection[str] | None = None,
        stays: bool = False,
    ):
        """Makes the function.

        Args:
            part: The part, with the functions that it calls.
            feeds: The names of the inputs, and their types.
            makes: The results: tensors of another graph with the same operations.
            written: The names in `feeds` of handles that the function may write to.
            runs: See `runs_anyway`; may contain operations that are not in the part.
            gated: The names in `feeds` that wait for a boolean scalar, which is then
                the first input; `None` for a function without such a gate.
            stays: Whether calls stay function calls. Otherwise TensorFlow inlines the
                function into the caller's graph.
        """
        self._makes = makes
        self._types = [tensor.dtype.as_datatype_enum for tensor in makes]
        first = 0 if gated is None else 1
        self._only_reads = [
            i + first
            for i, (name, dtype) in enumerate(feeds)
            if dtype == tf.resource and name not in written
        ]
        definition = FunctionDef()
        signature = definition.signature
        signature.name = f"{_PART}{next(_COUNT)}"
        definition.attr["_noinline"].b = stays
        if gated is not None:
            signature.input_arg.add(name=_GATE, type=tf.bool.as_datatype_enum)
            # TensorFlow drops a control dependency on the argument itself.
            _add_identity(definition, f"{_GATE}_copy", _GATE, tf.bool)
        names = {}
        for name, dtype in feeds:
            argument = names[name] = name.removesuffix(":0")
            signature.input_arg.add(name=argument, type=dtype.as_datatype_enum)
            if gated is not None and name in gated:
                # An operation that takes only a variable would not wait for the call's
                # control inputs, as TensorFlow inlines the function.
                waits = [f"^{_GATE}_copy"]
                copy = f"{argument}_copy"
                names[name] = _add_identity(definition, copy, argument, dtype, waits)
        for node in part.node:
            names.update(_outputs(node))
        acts = False
        for node in part.node:
            copy = definition.node_def.add()
            copy.CopyFrom(node)
            del copy.input[:]
            copy.input.extend(names.get(name, name) for name in node.input)
            if node.name in runs:
                signature.control_output.append(node.name)
                definition.control_ret[node.name] = node.name
                acts |= runs[node.name]
        # As in traced functions, the results are available when all operations with a
        # side effect have run.
        if acts:
            ran = definition.node_def.add(name=f"{_DONE}_ran", op="NoOp")
            ran.input.extend(f"^{name}" for name in signature.control_output)
        signature.is_stateful = self._is_stateful = any(
            operation_definition(node.op).is_stateful for node in part.node
        )
        if not self._is_stateful:
            # If TensorFlow ordered the calls, they would wait for one another.
            done = definition.node_def.add(name=_DONE, op="NoOp")
            done.input.extend(f"^{name}" for name in {t.op.name: 0 for t in makes})
            signature.control_output.append(_DONE)
            definition.control_ret[_DONE] = _DONE
        for i, tensor in enumerate(makes):
            name, value = f"{_DONE}_{i}", names[tensor.name]
            if acts:
                waits = [f"^{_DONE}_ran"]
                value = _add_identity(
                    *(definition, f"{name}_copy", value, tensor.dtype, waits)
                )
            signature.output_arg.add(name=name, type=self._types[i])
            definition.ret[name] = value
        known = context.context()
        known.add_function_def(definition)
        called = [
            atomic_function.AtomicFunction(function.signature.name, known, None)
            for function in part.library.function
        ]
        # TensorFlow drops the function with this object and with the graphs that call
        # the function.
        self._function = atomic_function.AtomicFunction(
            signature.name, known, None, called
        )

    def __call__(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Calls the function, on the device of the scope.

        Args:
            values: The inputs; the gate comes first if there is one.

        Returns:
            The results.
        """
        known = context.context()
        if known.executing_eagerly():
            count = len(self._types)
            return known.call_function(self._function.name, [*values], count) or []
        graph = tf.compat.v1.get_default_graph()
        graph._add_function_recursive(self._function)
        call = atomic_function.partitioned_call_op(
            *(self._function.name, values, self._is_stateful, self._types),
            known.function_call_options.as_attrs()["config_proto"],
        )
        # The attribute lets other readers of these variables run without waiting.
        ops.set_int_list_attr(call, _READ_ONLY, self._only_reads)
        for output, like in zip(call.outputs, self._makes, strict=True):
            output.set_shape(like.shape)
        return [*call.outputs]


_COUNT = itertools.count()
_PART, _GATE, _DONE = "towers_part_", "towers_gate", "towers_made"
_COMPILED = "towers_compiled_"
_READ_ONLY = auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR


def _add_identity(definition, name, value, dtype, waits=()):
    """Adds a copy of a value to a function, and returns the name of the result."""
    node = definition.node_def.add(name=name, op="Identity")
    node.input.extend([value, *waits])
    node.attr["T"].type = dtype.as_datatype_enum
    return f"{name}:output:0"


def _outputs(node):
    """Yields the names of a node's results in a graph, and in a function."""
    names = []
    for result in operation_definition(node.op).output_arg:
        count = 1
        if result.number_attr:
            count = node.attr[result.number_attr].i
        elif result.type_list_attr:
            count = len(node.attr[result.type_list_attr].list.type)
        names += [f"{node.name}:{result.name}:{i}" for i in range(count)]
    return ((f"{node.name}:{i}", name) for i, name in enumerate(names))


def before(operation: tf.Operation, known: Container[str]) -> Iterator[str]:
    """Yields the names of known operations that an operation has to wait for.

    `known` holds names. Waits of unknown operations on the way are followed.
    """
    waiting, seen = [*operation.control_inputs], set()
    while waiting:
        earlier = waiting.pop()
        if earlier.name in seen:
            continue
        seen.add(earlier.name)
        if earlier.name in known:
            yield earlier.name
        else:
            # An example are results of a check, which no operation takes.
            waiting += earlier.control_inputs
            waiting += [tensor.op for tensor in earlier.inputs]

"""Which part of a model each operation of a traced step was made for.

An operation that a layer makes belongs to the layer's part, and the operations of its
gradient do, too. TensorFlow notes what they are the gradient of; those of a tape are
named for it. All others, such as an addition between two layers or the loss, belong to
the last of the parts that they take something from; see `phases.py`.
"""

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from towers.keras_adapter.graphs import GRADIENT_SCOPE, colocated_with, made_in
from towers.keras_adapter.layers import LAYER_CALL
from towers.keras_adapter.patching import patched


class Labels:
    """Notes, while a step is traced, what each operation was made for.

    Attributes:
        parts: The part of each operation that a layer of one has made, by name.
        backward: The names of the operations of the gradient.
        beside: For each of them, the names of operations that it is the gradient of, as
            far as it is known.
        enclosed: The names of layers that are called inside of an operation, such as a
            loop or a branch.
    """

    def __init__(self, layers: Mapping[int, int]):
        """Notes nothing yet; `layers` has the part of each layer, by its `id`."""
        self.parts: dict[str, int] = {}
        self.backward: set[str] = set()
        self.beside: dict[str, list[str]] = {}
        self.enclosed: dict[str, None] = {}
        self._layers = layers
        self._within = False

    @contextlib.contextmanager
    def noting_layers(self) -> Iterator[None]:
        """Inside, a step is traced."""
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
                with made_in(graph) as made:
                    return original(layer, *args, **kwargs)
            finally:
                self._within = False
                self.parts.update((op.name, part) for op in made)

        with patched(LAYER_CALL, call):
            yield

    def forget(self) -> None:
        """Forgets what was noted, as the step is traced once more."""
        for noted in (self.parts, self.backward, self.beside, self.enclosed):
            noted.clear()

    def _of_scope(self, name, scopes):
        """The operations of the scope that one of a tape's gradient is named for.

        There are none if these are of several parts.
        """
        _, tape, name = name.rpartition(GRADIENT_SCOPE)
        of_scopes = (scopes[each] for each in _scopes(name) if each in scopes)
        found = next(of_scopes, []) if tape else []
        return found if len({self.parts[each] for each in found}) == 1 else []

    def note_gradients(self, made: Sequence[tf.Operation]) -> None:
        """Notes the operations of a gradient, the last ones of their graph."""
        self.backward.update(op.name for op in made)
        scopes = collections.defaultdict(list)
        for name in self.parts:
            for scope in _scopes(name):
                scopes[scope].append(name)
        for op in made:
            self.beside[op.name] = colocated_with(op) or self._of_scope(op.name, scopes)
        for op in reversed(made):
            if not self.beside[op.name]:
                # Such as a sum of gradients: it is for what takes it.
                takers = (each.name for t in op.outputs for each in t.consumers())
                found = (self.beside[each] for each in takers if each in self.beside)
                self.beside[op.name] = next(filter(None, found), [])
        # A loop is given the lists that it is to keep its values in for its gradient.
        every = made[0].graph.get_operations() if made else []
        waiting = every[: len(every) - len(made)]
        while waiting:
            for tensor in waiting.pop().inputs:
                if tensor.op.name in self.backward:
                    self.backward.remove(tensor.op.name)
                    waiting.append(tensor.op)


def _scopes(name):
    """The scopes that an operation is in, the innermost first."""
    while "/" in name:
        name, _, _ = name.rpartition("/")
        yield name

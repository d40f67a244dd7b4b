"""Rules by which the towers' values make the whole batch's: a mean, a sum, or alike.

Which rule a value follows is read from the graph of a tower (see `dependence.py`),
once, when the tower is traced.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from towers.analysis.dependence import Culprit, Reader
from towers.analysis.kinds import Dependence
from towers.analysis.layer_calls import parts, recorded_layers

_RULES = Dependence.NONE, Dependence.MEAN, Dependence.SUM


class NoRuleError(ValueError):
    """Local batches' values do not make the batch's; the text says what hinders it."""


class Rules:
    """The rules for what one tower function returns, by name.

    Attributes:
        complete: Whether all have been read, so that eager towers may follow them.
        coupling: The operation that makes an output depend on several examples; `None`
            where none is seen to.
        unread: What could not be read, and may make an output depend on several
            examples.
    """

    def __init__(self, towers: int, mean_loss: bool = False, mean_state: bool = False):
        """Starts without a rule.

        Args:
            towers: Number of towers. With one, its values are the batch's.
            mean_loss: Whether losses without a rule are taken for means over examples.
            mean_state: Whether variables without a rule are.
        """
        self.complete = towers == 1
        self.coupling: str | None = None
        self.unread: list[Culprit] = []
        self._alone = towers == 1
        self._mean_loss = mean_loss
        self._mean_state = mean_state
        self._reader = None
        self._unread = "a value that was not there when it was looked for"
        self._found: dict[str, Dependence] = {}

    @contextlib.contextmanager
    def reading(self, local_batch: Any) -> Iterator[None]:
        """Inside, a tower is traced; rules are read from its graph.

        Tensors of the local batch have one row an example, in a number that the graph
        does not know.
        """
        if self.complete:
            yield
            return
        with recorded_layers() as calls:
            self._reader = Reader(local_batch, calls)
            try:
                yield
            finally:
                self._reader = None
        self.complete = True

    def give_up(self, reason: str) -> None:
        """Is told that nothing can be read, as there is no graph, and why."""
        self.complete, self._unread = True, reason

    def part(
        self, name: str, loss: tf.Tensor, fraction: tf.Tensor, alike: bool = False
    ) -> tf.Tensor:
        """Returns a tower's part of a loss; the towers' parts add up to the whole.

        Args:
            name: A name to know the loss by.
            loss: The loss of the tower's local batch: a scalar.
            fraction: Size of the local batch over that of the global batch.
            alike: Whether it is the same on all towers, if it cannot be read.

        Raises:
            NoRuleError: If the loss cannot be put together from parts.
        """
        rule = self._rule(name, loss, self._mean_loss, alike)
        return loss if rule is Dependence.SUM else loss * tf.cast(fraction, loss.dtype)

    def state(self, name: str, value: tf.Tensor, alike: bool = False) -> None:
        """Finds the rule that a variable's new values follow; see `part`.

        Raises:
            NoRuleError: If there is none.
        """
        self._rule(name, value, self._mean_state, alike)

    def mean(self, name: str) -> None:
        """Lays down that a variable's new values are averaged, by design."""
        self._found[name] = Dependence.MEAN

    def look_at(self, outputs: Any) -> None:
        """Looks whether outputs depend on several examples: `coupling`, `unread`."""
        if self._reader is None:
            return
        unread = []
        for packed, output in parts(outputs):
            found = self._reader.of(output)
            if found is Dependence.COUPLED:
                self.coupling = str(self._reader.why(output))
            elif found is not (Dependence.PACKED if packed else Dependence.ROWS):
                unread.append(self._reader.why(output))
        self.unread = [*dict.fromkeys([*self._reader.unread, *unread])]

    def __getitem__(self, name: str) -> Dependence | None:
        """Returns the rule of that name, `None` if there is none."""
        return self._found.get(name)

    def _rule(self, name, value, mean_otherwise, alike):
        if self._alone:
            self._found[name] = Dependence.MEAN
        if name not in self._found and self._reader is None:
            # What nobody reads: there is no graph, or another one than was read.
            if not (alike or mean_otherwise):
                raise NoRuleError(self._unread)
            self._found[name] = Dependence.NONE if alike else Dependence.MEAN
        if name not in self._found:
            rule = self._reader.of(value)
            if rule not in _RULES:
                if not mean_otherwise:
                    raise NoRuleError(str(self._reader.why(value)))
                rule = Dependence.MEAN
            self._found[name] = rule
        return self._found[name]

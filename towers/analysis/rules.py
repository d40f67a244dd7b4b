"""Rules by which the towers' values make the whole batch's: a mean, a sum, or alike.

Which rule a value follows is read from the graph of a tower (see `dependence.py`),
once, when the tower is traced.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers.analysis import linear
from towers.analysis.dependence import Culprit, Reader
from towers.analysis.kinds import SIZE, SUM, UNKNOWN, Dependence
from towers.analysis.layer_calls import parts, recorded_layers
from towers.analysis.loss_graph import LossGraph

# The rules by which the towers' values make the batch's.
ADDED_UP = Dependence.NONE, Dependence.MEAN, Dependence.SUM


class NoRuleError(ValueError):
    """Local batches' values do not make the batch's; the text says what hinders it."""


class GraphWanted(NoRuleError):
    """A value can be put together, but only a graph tells its parts apart."""


class TotalsWanted(NoRuleError):
    """A loss can be put together if towers know totals of the whole batch.

    Attributes:
        graph: The loss, which takes them.
    """

    def __init__(self, reason: str, graph: LossGraph):
        super().__init__(reason)
        self.graph = graph


class Rules:
    """The rules for what one tower function returns, by name.

    Attributes:
        complete: Whether all have been read, so that eager towers may follow them.
        coupling: The operation that makes an output depend on several examples; `None`
            where none is seen to.
        unread: What could not be read, and may make an output depend on several
            examples.
        apart: Whether every output has one row an example, as far as can be read.
        loss_graph: The compiled loss, if it takes totals of the whole batch.
        measures: Whether towers update metrics.
        reasons: Why there is no rule for changes of a metric's variable, by name.
    """

    def __init__(
        self,
        towers: int,
        mean_loss: bool = False,
        mean_state: bool = False,
        loss_graph: LossGraph | None = None,
        measures: bool = False,
    ):
        """Starts without a rule.

        Args:
            towers: Number of towers. With one, its values are the batch's.
            mean_loss: Whether losses without a rule are taken for means over examples.
            mean_state: Whether variables without a rule are.
            loss_graph: The compiled loss, if it takes totals of the whole batch.
            measures: Whether towers update metrics.
        """
        self.complete = towers == 1
        self.coupling: str | None = None
        self.unread: list[Culprit] = []
        self.apart = False
        self._alone = towers == 1
        self._mean_loss = mean_loss
        self._mean_state = mean_state
        self.loss_graph, self.measures = loss_graph, measures
        self._reader = None
        self._local_batch = None
        self._unread = "a value that was not there when it was looked for"
        self.reasons: dict[str, str] = {}
        self._found: dict[str, Dependence] = {}
        # How parts of values are weighted that are sums of several kinds, by name.
        self._weights: dict[str, linear.Weights] = {}
        if loss_graph is not None:
            names = loss_names(len(loss_graph.rules))
            self._found |= zip(names, loss_graph.rules, strict=True)

    @contextlib.contextmanager
    def reading(
        self, local_batch: Any, seeds: Iterable[tf.Tensor] = ()
    ) -> Iterator[None]:
        """Inside, a tower is traced; rules are read from its graph.

        Tensors of the local batch have one row an example, in a number that the graph
        does not know. `seeds` are random seeds of the tower's own.
        """
        if self.complete:
            yield
            return
        with recorded_layers() as calls:
            self._reader = Reader(local_batch, calls, seeds=seeds)
            self._local_batch = local_batch
            try:
                yield
            finally:
                self._reader = self._local_batch = None
        self.complete = True

    def give_up(self, reason: str) -> None:
        """Gives up reading, as there is no graph, and keeps the reason."""
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

    def read_losses(
        self, losses: Sequence[tf.Tensor], outputs: Any, others: Any
    ) -> None:
        """Finds the rules of the compiled loss, and of those that it is the sum of.

        `part` knows them as "loss", "loss of output 0" and so on.

        Args:
            losses: Scalars.
            outputs: The model's outputs, from which they were computed: a nest.
            others: What else they were computed from: a nest of tensors and `None`.

        Raises:
            TotalsWanted: Towers have to know totals of the whole batch first.
        """
        if self._reader is None:
            return
        for _, feed in parts([outputs, others]):
            self._reader.of(feed)
        with self._reader.with_totals() as totals:
            kinds = [self._reader.of(loss) for loss in losses]
        for name, kind in zip(loss_names(len(losses)), kinds, strict=True):
            if kind in ADDED_UP:
                self._found[name] = kind
        if not totals or not set(kinds) <= {*ADDED_UP}:
            return
        reason = str(self._reader.why(next(iter(totals.values())).tensor))
        try:
            graph = LossGraph(
                *(losses, outputs, others, self._local_batch, totals, kinds),
                self._reader.rows_of,
            )
        except ValueError as error:
            raise NoRuleError(str(error)) from error
        raise TotalsWanted(reason, graph)

    def change(
        self,
        name: str,
        addends: Sequence[tf.Tensor] | None,
        reason: str = "an update that is no addition",
    ) -> None:
        """Finds the rule that changes of a metric's variable follow.

        Without one, `self[name]` is COUPLED or UNKNOWN.

        Args:
            name: A name to know the variable by.
            addends: What the metric adds to it; `None` if it does not add.
            reason: Why it does not add, then.
        """
        if self._reader is None:
            return
        if addends is None:
            self.lay_down(name, UNKNOWN, reason)
            return
        self._found[name] = UNKNOWN
        kinds = [*map(self._reader.of, addends)]
        # A number of examples adds up, too.
        kinds = [SUM if kind is SIZE else kind for kind in kinds]
        if len({*kinds}) == 1:
            self._found[name] = kinds[0]
        if self._found[name] not in ADDED_UP:
            pairs = zip(addends, kinds, strict=True)
            culprits = [added for added, kind in pairs if kind not in ADDED_UP]
            self.reasons[name] = str(self._reader.why((culprits or addends)[0]))

    def lay_down(self, name: str, rule: Dependence, reason: str = "") -> None:
        """Lays down a rule that is known without reading, or why there is none."""
        self._found[name] = rule
        if reason:
            self.reasons[name] = reason

    def state(
        self, name: str, value: tf.Tensor, fraction: tf.Tensor, alike: bool = False
    ) -> tf.Tensor:
        """Returns a tower's part of a variable's new value; see `part`.

        A sum over rows, added to what they do not touch, is put together of weighted
        parts; see `linear.py`. Other values stay as they are.

        Raises:
            NoRuleError: There is no rule for the value.
            GraphWanted: There is, and no graph.
        """
        reads = self._reader is not None and name not in self._found
        if reads and not self._alone and value.dtype.is_floating:
            kind = self._reader.of(value)
            found = None if kind in ADDED_UP else linear.weights(self._reader, value)
            if found is not None:
                self._weights[name] = found
                self._found[name] = SUM
        self._rule(name, value, self._mean_state, alike)
        if name not in self._weights:
            return value
        if not tf.is_symbolic_tensor(value):
            raise GraphWanted("a sum that is added without a graph")
        return linear.weighted(value, self._weights[name], fraction)

    def rows_alike(self, name: str, numbers: Sequence[tf.Tensor]) -> bool:
        """Tells whether all towers look up the same rows of a table, as of positions.

        Args:
            name: A name to know that by.
            numbers: The numbers of the rows that were looked up.
        """
        if self._reader is not None:
            kinds = {*map(self._reader.of, numbers)}
            alike = bool(kinds) and kinds <= {Dependence.NONE}
            self._found[name] = Dependence.NONE if alike else Dependence.ROWS
        return self._found.get(name) is Dependence.NONE

    def look_at(self, outputs: Any) -> None:
        """Looks whether outputs depend on several examples: `coupling`, `unread`."""
        if self._reader is None:
            return
        unread, self.apart = [], True
        for packed, output in parts(outputs):
            found = self._reader.of(output)
            self.apart &= found is Dependence.ROWS
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
            if rule not in ADDED_UP:
                if not mean_otherwise:
                    raise NoRuleError(str(self._reader.why(value)))
                rule = Dependence.MEAN
            self._found[name] = rule
        return self._found[name]


def loss_names(count: int) -> list[str]:
    """Returns the names of a compiled loss and of its parts, `count` in all."""
    return ["loss", *(f"loss of output {i}" for i in range(count - 1))][:count]

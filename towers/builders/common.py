"""The pieces that all ways to update variables have in common."""

from towers.builders.context import Context
from towers.builders.creator import VariableCreator
from towers.builders.pieces.batches import LocalBatches
from towers.builders.pieces.comparison import RowComparison
from towers.builders.pieces.copies import Copies
from towers.builders.pieces.executor import TowerExecutor
from towers.builders.pieces.loss import LossAndGradients
from towers.builders.pieces.metrics import MetricSink
from towers.builders.pieces.reader import RowReader, VariableReader
from towers.builders.pieces.reducer import StateCombiner
from towers.builders.pieces.updater import ShardedUpdater, Updater


class Pieces:
    """The pieces that all ways to update variables have in common.

    Attributes:
        context: What they share.
        copies: The copies of the variables; none by default.
        batches: Cuts, places and preprocesses batches.
        reader: Reads variables at home.
        rows: Fetches rows of tables that several hosts divide.
        creator: Creates variables.
        comparison: Compares rows where a graph does not tell.
        executor: Runs tower functions.
        state: Combines and assigns what layers assign.
        metrics: Computes whole losses and metrics.
        loss: Computes loss and gradients.
        updater: Applies the optimizer.
    """

    def __init__(self, context: Context, copies: Copies | None = None):
        """Puts them together; none knows anything of the model yet."""
        self.context, self.copies = context, copies or Copies(context)
        self.batches = batches = LocalBatches(context)
        self.reader = reader = VariableReader(context)
        self.rows = RowReader(context, reader, batches)
        self.creator = VariableCreator(context, batches, self.copies)
        self.comparison = comparison = RowComparison(context, reader, batches)
        self.executor = TowerExecutor(context, reader, batches, comparison)
        self.state = StateCombiner(context, self.copies)
        self.metrics = MetricSink(context, batches)
        self.loss = LossAndGradients(
            *(context, batches, self.executor, self.metrics, self.state, self.rows)
        )
        sharded = self.copies.shards is not None
        self.updater = (ShardedUpdater if sharded else Updater)(context, self.copies)

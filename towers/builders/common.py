"""The pieces that all ways to update variables have in common."""

from towers.builders.context import Context
from towers.builders.creator import VariableCreator
from towers.builders.pieces.batches import LocalBatches
from towers.builders.pieces.copies import Copies
from towers.builders.pieces.updater import ShardedUpdater, Updater


class Pieces:
    """The pieces that all ways to update variables have in common.

    Attributes:
        context: What they share.
        copies: The copies of the variables; none by default.
        batches: Cuts and places batches.
        creator: Creates variables.
        updater: Applies the optimizer.
    """

    def __init__(self, context: Context, copies: Copies | None = None):
        """Puts them together; none knows anything of the model yet."""
        self.context, self.copies = context, copies or Copies(context)
        self.batches = LocalBatches(context)
        self.creator = VariableCreator(context, self.copies)
        sharded = self.copies.shards is not None
        self.updater = (ShardedUpdater if sharded else Updater)(context, self.copies)

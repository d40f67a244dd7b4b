"""The pieces that all ways to update variables have in common."""

from towers.builders.batches import LocalBatches
from towers.builders.context import Context
from towers.builders.creator import VariableCreator
from towers.builders.stores.store import Store


class Pieces:
    """The pieces that all ways to update variables have in common.

    Attributes:
        context: What they share.
        store: Says where variables live, and updates them.
        batches: Cuts and places batches.
        creator: Creates variables.
    """

    def __init__(self, context: Context, store: Store):
        """Puts them together; none knows anything of the model yet."""
        self.context, self.store = context, store
        self.batches = LocalBatches(context)
        self.creator = VariableCreator(context, store)

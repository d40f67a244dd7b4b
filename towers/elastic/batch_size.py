"""The batch grows and shrinks with the number of towers, where that is asked for.

Data, position and learning rate depend on the size of the batch. So an exception ends
`fit` where an epoch begins with another number of towers, and the run fits again from
there, as one does that was stopped. An epoch that has begun keeps its batch.
"""

from collections.abc import Callable, Mapping

import keras

from towers.collectives.world import this_host
from towers.loop import listeners
from towers.model.fit_call import FitsAgain


class BatchSizeChange(FitsAgain):
    """The next epoch, or the rest of this one, has batches of another size.

    Attributes:
        size: Examples in a batch of all towers from now on.
    """

    def __init__(self, size: int, is_news: bool = True):
        """Takes the size, and whether it is another one for the run."""
        super().__init__(f"Batches of {size} examples follow.")
        self.size, self.is_news = size, is_news


@listeners.changes_no_variable
class BatchPerTower(keras.callbacks.Callback):
    """Ends `fit` where an epoch begins with another number of towers than the last one.

    Within an epoch, batches keep their size: data are counted in batches. Whoever calls
    `fit` opens data of the other size, scales the learning rate, and calls it again.
    """

    def __init__(self, per_tower: int, size: int, epoch_begins: Callable[[], bool]):
        """Takes the sizes.

        Args:
            per_tower: Examples in the batch of a tower.
            size: Examples in a batch of the data.
            epoch_begins: Tells whether no batch of the epoch is done.
        """
        super().__init__()
        self._per_tower, self._size = per_tower, size
        self._epoch_begins = epoch_begins

    def before_hosts_compare(self) -> None:
        """Has hosts that have just come take the size of the others.

        Raises:
            BatchSizeChange: A host has another size than the first one; on all hosts.
        """
        sizes = this_host().exchange(self._size)
        if len({*sizes}) > 1:
            raise BatchSizeChange(sizes[0], is_news=False)

    def state_dict(self) -> dict[str, int]:
        """Returns the size, for a run that goes on."""
        return {"size": self._size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Does nothing: whoever opens data reads it; see `Checkpoint.batch_size`."""

    def on_epoch_begin(self, epoch, logs=None):
        """Compares the size with the number of towers.

        Raises:
            BatchSizeChange: They do not fit; on all hosts.
        """
        size = self._per_tower * sum(self.model.builder.plan.replicas_by_host)
        if self._epoch_begins() and size != self._size:
            raise BatchSizeChange(size)

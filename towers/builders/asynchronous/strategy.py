"""Composes the builder for asynchronous training; see `training.py`."""

import concurrent.futures

from towers.builders.asynchronous.staleness import Staleness
from towers.builders.asynchronous.tower_step import TowerStep
from towers.builders.asynchronous.training import AsynchronousTraining
from towers.builders.builder import Builder, Composed
from towers.builders.context import Context
from towers.builders.pieces import Pieces
from towers.builders.steps import Steps
from towers.builders.stores.store import Store


def asynchronous(context: Context, max_staleness: int | None = None) -> Builder:
    """Builds asynchronous training: each tower updates the variables at home by itself.

    Args:
        context: The state that the pieces of the builder share.
        max_staleness: Maximum number of updates that other towers may make between a
            tower's read of the variables and its update. Unbounded by default.
    """
    staleness = Staleness(max_staleness)
    threads = concurrent.futures.ThreadPoolExecutor(
        len(context.plan.towers), thread_name_prefix="tower"
    )

    def compose():
        pieces = Pieces(context, Store(context))
        own = Steps(pieces)
        step = TowerStep(own)
        training = AsynchronousTraining(pieces, step, staleness, threads)
        return Composed(pieces, training, own, training.train_function)

    return Builder("asynchronous", context, compose, staleness)

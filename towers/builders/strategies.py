"""The ways to update variables: each combines a store with the common steps.

A new way needs a store (`stores/store.py`), a function here that names it, and an entry
in `STRATEGIES`. Users select it with a value in `model/options.py`, whose
`builder_options` are the function's arguments. A table in CONTRIBUTING.md lists all
places to change.
"""

import functools
from collections.abc import Callable

from towers.builders.builder import Builder, Composed
from towers.builders.context import Context
from towers.builders.pieces import Pieces
from towers.builders.steps import Steps
from towers.builders.stores.copies import Copies
from towers.builders.stores.shards import Shards
from towers.builders.stores.store import Store
from towers.builders.train_function import train_function
from towers.layers import parameters
from towers.program.features import feature


def parameter_server(context: Context) -> Builder:
    """Keeps variables at home, and updates them once a step.

    In each step, every tower reads the variables from home and computes its part of the
    gradient. The parts are added on one device, and the optimizer is applied once. The
    recipe is that of the CIFAR-10 multi-GPU tutorial and of tf_cnn_benchmarks'
    `variable_update=parameter_server`.
    """
    return _with_store("parameter_server", context, lambda: Store(context))


def replicated(
    context: Context,
    all_reduce_alg: str = "auto",
    shard_optimizer_state: bool = False,
) -> Builder:
    """Gives every tower a copy of the variables, which the tower updates.

    In each step, every tower computes its part of the gradient with its own copy. The
    parts are packed and all-reduced, and every tower applies the same update. So the
    copies stay equal, and only gradients are sent. The recipe is that of Horovod
    (Sergeev and Del Balso 2018) and of tf_cnn_benchmarks' `variable_update=replicated`.

    Args:
        context: Its plan has the first tower's device as home.
        all_reduce_alg: How gradients are added: a key of `reduce.ALGORITHMS`, or
            "auto".
        shard_optimizer_state: Whether each tower updates a shard of the parameters
            instead, and holds the optimizer state of that shard alone. Then gradients
            are sent to the towers that update them, and towers gather the parameters
            once a step, as in the second stage of ZeRO (Rajbhandari et al. 2020).
    """

    def store():
        if shard_optimizer_state:
            return Shards(context, gathered_by_use=False)
        return Copies(context, all_reduce_alg)

    return _with_store("replicated", context, store)


def sharded(context: Context, min_bytes: int = parameters.MIN_BYTES) -> Builder:
    """Shards each large variable over the devices; each device updates its shard.

    In each step, every tower gathers a parameter when an operation needs it, and frees
    it afterwards. The gradients of a shard are added on its device, where the optimizer
    is applied. See `layers/parameters.py`. With stages, towers gather the parameters of
    each stage once a step.

    Args:
        context: Its plan has the first tower's device as home.
        min_bytes: Minimum size of a variable that is sharded.
    """
    by_use = context.plan.pipeline.stages == 1
    return _with_store(
        "sharded",
        context,
        lambda: Shards(context, min_bytes, by_use, divides_tables=True),
    )


def asynchronous(context: Context, max_staleness: int | None = None) -> Builder:
    """Lets each tower update the variables at home by itself; see `asynchronous/`.

    Args:
        context: The state that the pieces of the builder share.
        max_staleness: Maximum number of updates that other towers may make between a
            tower's read of the variables and its update. Unbounded by default.
    """
    return feature("builders.asynchronous.strategy").asynchronous(
        context, max_staleness
    )


def _with_store(name: str, context: Context, store: Callable[[], Store]) -> Builder:
    """Makes a builder of the synchronous steps and a store."""

    def compose():
        steps = Steps(Pieces(context, store()))
        function = functools.partial(train_function, steps.pieces, steps)
        return Composed(steps.pieces, steps, steps, function)

    return Builder(name, context, compose)


STRATEGIES: dict[str, Callable[..., Builder]] = {
    "asynchronous": asynchronous,
    "parameter_server": parameter_server,
    "replicated": replicated,
    "sharded": sharded,
}

"""The ways to update variables, each a list of pieces.

A new way is a function here that lists its pieces, and an entry in `STRATEGIES`.
"""

import dataclasses
from collections.abc import Callable

from towers.builders.builder import Builder, Composed
from towers.builders.common import Pieces
from towers.builders.context import Context
from towers.builders.pieces.copies import Copies
from towers.builders.pieces.reducer import AllReduce, ReduceScatter, SumAtHome
from towers.builders.steps import Steps
from towers.layers import parameters
from towers.program.features import feature


def parameter_server(context: Context) -> Builder:
    """Variables at home, updated once a step.

    Each step, every tower gets the variables' values from home and computes its part of
    the gradient; the parts are added on one device, and the optimizer is applied once.
    The recipe is that of the CIFAR-10 multi-GPU tutorial and of tf_cnn_benchmarks'
    `variable_update=parameter_server`.
    """

    def compose():
        own = Steps(Pieces(context), SumAtHome(context))
        return Composed(own.pieces, own, own)

    return Builder("parameter_server", context, compose)


def replicated(
    context: Context,
    all_reduce_alg: str = "auto",
    shard_optimizer_state: bool = False,
) -> Builder:
    """Every tower has a copy of the variables, and updates it.

    Each step, every tower computes its part of the gradient with its own copy; the
    parts are added by all-reduce, packed; then every tower applies the same update. So
    the copies stay equal, and only gradients travel. The recipe is that of Horovod
    (Sergeev and Del Balso 2018) and of tf_cnn_benchmarks' `variable_update=replicated`.

    Args:
        context: Its plan has the first tower's device as home.
        all_reduce_alg: How gradients are added: a key of `reduce.ALGORITHMS`, or
            "auto".
        shard_optimizer_state: Whether each tower updates a part of the parameters
            instead, and has the optimizer's state of that part alone; then gradients
            are reduce-scattered, and parameters gathered.
    """

    def compose():
        copies = Copies(context, context.plan.replicas[1:], shard_optimizer_state)
        pieces = Pieces(context, copies)
        reducer = AllReduce(context, all_reduce_alg)
        if copies.shards is not None:
            reducer = ReduceScatter(context, copies.shards)
        own = Steps(pieces, reducer)
        return Composed(pieces, own, own)

    return Builder("replicated", context, compose)


def sharded(context: Context, min_bytes: int = parameters.MIN_BYTES) -> Builder:
    """Every device keeps a part of each large variable, and updates it.

    Each step, every tower gathers a parameter when an operation needs it, and lets go
    of it afterwards; the parts of gradients are added where those of the parameters
    are, and the optimizer is applied to them there. See `layers/parameters.py`.

    Args:
        context: Its plan has the first tower's device as home.
        min_bytes: How large variables are that are sharded.
    """
    context = dataclasses.replace(context, shard_from_bytes=min_bytes)

    def compose():
        own = Steps(Pieces(context), SumAtHome(context))
        return Composed(own.pieces, own, own)

    return Builder("sharded", context, compose)


def asynchronous(context: Context, max_staleness: int | None = None) -> Builder:
    """Each tower updates the variables at home by itself; see `asynchronous/`.

    Args:
        context: What the pieces share.
        max_staleness: How many updates other towers may make between a tower's reading
            the variables and its update. Any by default.
    """
    return feature("builders.asynchronous.strategy").asynchronous(
        context, max_staleness
    )


STRATEGIES: dict[str, Callable[..., Builder]] = {
    "asynchronous": asynchronous,
    "parameter_server": parameter_server,
    "replicated": replicated,
    "sharded": sharded,
}

"""The ways to update variables: each is a store with the steps that all have.

A new way is a store (`stores/store.py`), a function here that names it, and an entry in
`STRATEGIES`. Users ask for it by a value in `model/options.py`, whose `builder_options`
are the function's arguments. The table of CONTRIBUTING.md has all places.
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
    """Variables at home, updated once a step.

    Each step, every tower gets the variables' values from home and computes its part of
    the gradient; the parts are added on one device, and the optimizer is applied once.
    The recipe is that of the CIFAR-10 multi-GPU tutorial and of tf_cnn_benchmarks'
    `variable_update=parameter_server`.
    """
    return _with_store("parameter_server", context, lambda: Store(context))


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
            instead, and has the optimizer's state of that part alone. Then gradients go
            to those that update, and towers gather the parameters once in a step, as in
            the second stage of ZeRO (Rajbhandari et al. 2020).
    """

    def store():
        if shard_optimizer_state:
            return Shards(context, gathered_by_use=False)
        return Copies(context, all_reduce_alg)

    return _with_store("replicated", context, store)


def sharded(context: Context, min_bytes: int = parameters.MIN_BYTES) -> Builder:
    """Every device keeps a part of each large variable, and updates it.

    Each step, every tower gathers a parameter when an operation needs it, and lets go
    of it afterwards; the parts of gradients are added where those of the parameters
    are, and the optimizer is applied to them there. See `layers/parameters.py`. With
    stages, towers gather the parameters of each stage once in a step.

    Args:
        context: Its plan has the first tower's device as home.
        min_bytes: How large variables are that are sharded.
    """
    by_use = context.plan.pipeline.stages == 1
    return _with_store(
        "sharded",
        context,
        lambda: Shards(context, min_bytes, by_use, divides_tables=True),
    )


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


def _with_store(name: str, context: Context, store: Callable[[], Store]) -> Builder:
    """Makes a builder of the steps that all synchronous ways have, with a store."""

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

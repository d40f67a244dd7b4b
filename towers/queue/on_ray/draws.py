"""Has Ray Tune draw the values of a random search.

All are drawn before anything starts, and the same ones each time: so their flags are
checked, the same command continues its runs, and a larger number only adds some.
"""

from collections.abc import Sequence

import numpy as np
from ray import tune

from towers.queue import search

# Of distributions: shorter names for runs, and no measurable difference.
_DIGITS = 4
# For each run, before all values that there are count as drawn.
_TRIES = 100


def draw(sweeps: Sequence[Sequence[str]], count: int) -> list[tuple[str, ...]]:
    """Draws combinations of values, none twice.

    Args:
        sweeps: The values of each sweep, or a single one that names a distribution.
        count: How many; fewer come if there are no more.

    Raises:
        ValueError: A distribution's bounds are wrong.
    """
    domains = [_domain(values) for values in sweeps]
    random = np.random.default_rng(0)
    drawn: dict[tuple[str, ...], None] = {}
    for _ in range(count * _TRIES):
        if len(drawn) == count:
            break
        values = [domain.sample(random_state=random) for domain in domains]
        drawn[tuple(map(_text, values))] = None
    return [*drawn]


def _domain(values):
    distribution = search.bounds(values)
    if distribution is None:
        return tune.choice([*values])
    name, texts = distribution
    convert = int if "int" in name else float
    try:
        low, high = map(convert, texts)
        domain = getattr(tune, name)(low, high)
        domain.sample(random_state=0)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"Received --sweep with {values[0]}; expected the bounds of {name}, such "
            f"as loguniform:1e-5:1e-1 or randint:2:9 ({error})."
        ) from error
    return domain


def _text(value):
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)

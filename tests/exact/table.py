"""All exact cases: those of each module, in the order of the report."""

from tests.exact import (
    block_sparse,
    cases,
    combinations,
    float64,
    in_calls,
    lookups,
    loops,
    masks,
    measured,
    networks,
    own_steps,
    preprocessed,
    ranks,
    tasks,
)

# Each is updated in one way, as are combinations: they are about what is computed, not
# about how variables are updated.
OF_ONE_WAY = [*ranks.CASES, *masks.CASES, *measured.CASES, *tasks.CASES, *float64.CASES]
OF_KERAS_STEPS = [
    *cases.CASES,
    *networks.CASES,
    *block_sparse.CASES,
    *in_calls.CASES,
    *preprocessed.CASES,
    *lookups.CASES,
    *loops.CASES,
    *OF_ONE_WAY,
]
OWN_STEPS = [*own_steps.CASES, *float64.OWN_STEPS]
CASES = [*OF_KERAS_STEPS, *OWN_STEPS]
ALL = [*CASES, *combinations.CASES]

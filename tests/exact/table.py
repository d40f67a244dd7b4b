"""All exact cases: those of each module, in the order of the report."""

from tests.exact import (
    block_sparse,
    cases,
    combinations,
    masks,
    measured,
    networks,
    ranks,
    tasks,
)

# Each has one builder, as have combinations: they are about what is computed, not about
# how variables are updated.
OF_ONE_BUILDER = [*ranks.CASES, *masks.CASES, *measured.CASES, *tasks.CASES]
CASES = [*cases.CASES, *networks.CASES, *block_sparse.CASES, *OF_ONE_BUILDER]
ALL = [*CASES, *combinations.CASES]

"""Which blocks RigL moves: from the smallest weights to the largest gradients."""

import collections

import numpy as np


def moved(
    inputs: np.ndarray,
    outputs: np.ndarray,
    magnitudes: np.ndarray,
    gradients: np.ndarray,
    number: int,
) -> np.ndarray:
    """Tells which input each block reads after blocks have moved.

    RigL (Evci et al. 2020, https://arxiv.org/abs/1911.11134) drops the weights with the
    smallest magnitudes, and grows those with the largest gradients. Here each input and
    each output keeps its number of blocks, so that shapes stay as they are: the blocks
    that are dropped exchange their inputs. Beginning with the largest gradient, a block
    is grown where it can be by such an exchange.

    Args:
        inputs: The input of each block, int [blocks].
        outputs: The output of each block, int [blocks].
        magnitudes: Of the weights of each block, [blocks].
        gradients: Magnitudes of the gradients of all blocks, also of those that are not
            there, [inputs, outputs].
        number: How many blocks may move.

    Returns:
        The input of each block, int [blocks]. No two blocks are at one place.
    """
    inputs = inputs.copy()
    free = np.argsort(magnitudes, kind="stable")[:number].tolist()
    by_input, by_output = collections.defaultdict(set), collections.defaultdict(set)
    for block in free:
        by_input[inputs[block]].add(block)
        by_output[outputs[block]].add(block)
    there = np.zeros(gradients.shape, bool)
    there[inputs, outputs] = True
    wanted = gradients.copy()
    # Where blocks stay, none can grow.
    kept = np.setdiff1d(np.arange(len(inputs)), free)
    wanted[inputs[kept], outputs[kept]] = -np.inf
    for place in np.argsort(-wanted, axis=None, kind="stable"):
        source, target = np.unravel_index(place, wanted.shape)
        givers, takers = by_input[source], by_output[target]
        for block in takers & givers:
            # It was dropped, and grows again.
            takers.discard(block)
            givers.discard(block)
        if there[source, target]:
            continue
        pair = _exchange(inputs, outputs, there, takers, givers)
        if pair is not None:
            taker, giver = pair
            before = inputs[taker]
            there[before, target] = there[source, outputs[giver]] = False
            there[source, target] = there[before, outputs[giver]] = True
            inputs[taker], inputs[giver] = source, before
            # The taker is where it is to be; the giver may move once more.
            by_output[target].discard(taker)
            by_input[before].discard(taker)
            by_input[source].discard(giver)
            by_input[before].add(giver)
    return inputs


def _exchange(inputs, outputs, there, takers, givers):
    """Returns a taker and a giver that may exchange their inputs; None without any."""
    for taker in sorted(takers):
        for giver in sorted(givers):
            if not there[inputs[taker], outputs[giver]]:
                return taker, giver
    return None

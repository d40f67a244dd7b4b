"""Asks the other hosts for which one a collective waits."""

from towers.hosts import group


def waited_for(limit_s: float) -> str | None:
    """Says which host is waited for, what it does, and in which collective.

    Args:
        limit_s: How many seconds hosts have to answer.

    Returns:
        A phrase; `None` if this host is in no collective.
    """
    mine = group.collective()
    if mine is None:
        return None
    late = []
    for name, told in group.ask_all(limit_s).items():
        if told is None:
            late.append(f"{name}, which does not answer")
        elif told[0] != mine:
            does = f"is in the collective '{told[0]}'" if told[0] else told[1]
            late.append(f"{name}, which {does}")
    if late:
        return f"{' and '.join(late)}, in the collective '{mine}'"
    return f"the network, as all hosts are in the collective '{mine}'"

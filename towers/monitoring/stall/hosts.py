"""Asks the other hosts which of them a collective waits for."""

from towers.hosts import group


def waited_for(limit_s: float) -> str | None:
    """Names the hosts that are not where this one waits, and describes their work.

    Args:
        limit_s: The seconds that hosts have to answer.

    Returns:
        A phrase; `None` if this host is in no collective, or all hosts are where it is:
        TensorFlow does not say how far a host has come in a step.
    """
    own_collective = group.collective()
    if own_collective is None:
        return None
    late, answers = [], group.ask_all(limit_s)
    if not answers:
        return (
            f"other hosts, which MPI cannot ask, in the collective '{own_collective}'"
        )
    for name, answer in answers.items():
        if answer is None:
            late.append(f"{name}, which does not answer")
        elif answer[0] != own_collective:
            does = f"is in the collective '{answer[0]}'" if answer[0] else answer[1]
            late.append(f"{name}, which {does}")
    if not late:
        return None
    return f"{' and '.join(late)}, in the collective '{own_collective}'"

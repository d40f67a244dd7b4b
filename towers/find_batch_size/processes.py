"""Has a process of its own try a batch size, and says how it ended."""

from typing import Any

from towers.find_batch_size import child, probe
from towers.find_batch_size.search import Probe
from towers.find_batch_size.search_flags import Search


def run(settings: Search, batch_size: int) -> dict[str, Any]:
    """Has a process try a batch size, rounded down to what towers divide exactly.

    Returns:
        What the process told: see `probe.probe`.

    Raises:
        ValueError: If it failed, and not for want of memory.
    """
    told = child.ask(
        probe.__name__,
        settings.for_a_probe(batch_size),
        f"A batch of {batch_size} took longer than {child.PROBE_S} s; expected less, "
        "so give fewer --probe_steps or a smaller --max_batch_size.",
        settings.hosts or 1,
        settings.num_gpus,
    )
    if "batch_size" not in told:
        raise ValueError(
            f"A probe ended before it had any tower ({told['why']}); expected memory "
            "for TensorFlow at least, so allow more."
        )
    return told


def as_probe(told: dict[str, Any]) -> Probe:
    """Takes the figures out of what a process told."""
    names = Probe.__dataclass_fields__
    return Probe(**{name: told[name] for name in names if name in told})

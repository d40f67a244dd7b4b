"""Flags of towers.train that other programs take and do not need."""

import sys
from collections.abc import Sequence

from towers.train.settings import Settings, is_given

OF_A_RUN = (
    *("checkpoint", "monitor", "monitor_mode", "early_stopping", "log_csv"),
    *("save_steps", "save_minutes", "keep_checkpoints", "on_save_error"),
    *("preemption_notice", "max_train_steps", "train_epochs", "eval_steps"),
    *("histograms", "profile_steps", "stall_seconds", "on_stall", "parity_steps"),
)
"""Flags of what only a whole run does: it ends, saves, evaluates, and is watched."""


def say(settings: Settings, names: Sequence[str], program: str) -> None:
    """Says on stderr which flags are given although they have no effect.

    Args:
        settings: The flags. Those with their defaults say nothing anyway.
        names: Those that have no effect.
        program: What to call the program.
    """
    given = [settings.as_flag(name) for name in names if is_given(settings, name)]
    if given:
        print(
            f"{program}: These flags have no effect here: {' '.join(given)}.",
            file=sys.stderr,
        )

"""The flags of towers.scaling: its own, and those of towers.train."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from towers.program.commands import check_plot
from towers.program.flags import command_line, table
from towers.program.flags.command_line import TableFlags
from towers.program.flags.table import About, flag
from towers.train import checks, tower_flags
from towers.train.settings import Settings, is_given

# What says how many towers there are, or lets others decide it.
_OF_TOWERS = ("split_ratios", "max_gpus", "share_gpus", "gpu_split", "eval_only")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(TableFlags, Settings):
    """The flags of towers.scaling."""

    seconds: float = flag(
        5.0,
        "Scaling",
        "Seconds to train with each number of towers, after the warm-up.",
        about=About.MAIN,
        at_least=0.1,
    )
    rounds: int = flag(
        3,
        "Scaling",
        "How often to try each number of towers. Every second round goes from many "
        "towers to few, so a machine that becomes slower does not change the "
        "comparison.",
        about=About.MAIN,
        at_least=1,
    )
    more_hosts: int | None = flag(
        None,
        "Several hosts (predicted)",
        "Predict the speed of up to so many hosts like this one.",
        about=About.MAIN,
        at_least=2,
    )
    network_delay_ms: float = flag(
        0.1,
        "Several hosts (predicted)",
        "Milliseconds from one host to another.",
        about=About.MAIN,
        at_least=0,
    )
    network_gbit: float = flag(
        10.0,
        "Several hosts (predicted)",
        "Gbit/s between hosts.",
        about=About.MAIN,
        at_least=1e-3,
    )

    def on(self, towers: int) -> Self:
        """Returns these settings with the devices of so many towers: the first ones."""
        count = towers * self.stages
        if self.gpu_indices:
            return self.but(num_gpus=None, gpu_indices=self.gpu_indices[:count])
        return self.but(num_gpus=count)

    def devices_flag(self, towers: int) -> str:
        """Returns the flag of towers.train for so many towers."""
        return self.on(towers).as_flag(
            "gpu_indices" if self.gpu_indices else "num_gpus"
        )

    def for_a_trial(
        self, towers: int, split_ratios: Sequence[int] | None, model_dir: str
    ) -> list[str]:
        """Returns the flags of the process that trains on so many towers."""
        trained = self.on(towers).but(
            split_ratios=split_ratios and tuple(map(str, split_ratios)),
            model_dir=model_dir,
            clean=False,
        )
        return [*trained.as_text().splitlines(), self.as_flag("seconds")]


def read(argv: Sequence[str], doc: str) -> Scaling:
    """Reads the flags, and checks them, as `towers.train.flags.read` does.

    Raises:
        ValueError: A flag contradicts others, or what this program does.
    """
    scaling = checks.check(command_line.read(Scaling, argv, doc))
    tower_flags.check_fixed(scaling, "towers.scaling", finds_free=True)
    tower_flags.check_whole_batch(scaling, "towers.scaling")
    for name in _OF_TOWERS:
        if is_given(scaling, name):
            raise ValueError(
                f"Received {scaling.as_flag(name)}; expected none, as towers.scaling "
                "tries different towers itself. Leave it out, and give --num_gpus for "
                "the most towers to try."
            )
    check_plot(scaling.plot, "scaling.svg", "scaling.png")
    # With one epoch, images are not kept in memory, as in training.
    once = scaling.train_epochs == 1
    names = [
        name
        for name in table.names(Settings, About.RUN)
        if not (once and name == "train_epochs")
    ]
    # Each trial has a folder of its own, and leaves nothing.
    tower_flags.say_idle(scaling, ["model_dir", "clean", *names], "towers.scaling")
    return scaling


def read_checked(argv: Sequence[str]) -> Scaling:
    """Reads the flags that `Scaling.for_a_trial` has made."""
    return command_line.read(Scaling, argv)

"""The flags of towers.scaling: its own, and those of towers.train."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from absl import flags

from towers.program.commands import check_plot
from towers.program.flags import command_line
from towers.train import checks, tower_flags
from towers.train import flags as train_flags
from towers.train.settings import Settings, is_given

_SCALING = {"module_name": "Scaling"}
_HOSTS = {"module_name": "Several hosts (predicted)"}

# What says how many towers there are, or lets others decide it.
_OF_TOWERS = ("split_ratios", "max_gpus", "share_gpus", "gpu_split", "eval_only")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(Settings):
    """What to train, and how to try it; flags say what each means."""

    seconds: float = 5.0
    rounds: int = 3
    plot: str | None = None
    json: bool = False
    more_hosts: int | None = None
    network_delay_ms: float = 0.1
    network_gbit: float = 10.0

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


flags.DEFINE_float(
    "seconds",
    Scaling.seconds,
    "Seconds to train with each number of towers, after the warm-up.",
    lower_bound=0.1,
    **_SCALING,
)
flags.DEFINE_integer(
    "rounds",
    Scaling.rounds,
    "How often to try each number of towers. Every second round goes from many towers "
    "to few, so a machine that becomes slower does not change the comparison.",
    lower_bound=1,
    **_SCALING,
)
flags.DEFINE_integer(
    "more_hosts",
    Scaling.more_hosts,
    "Predict the speed of up to so many hosts like this one.",
    lower_bound=2,
    **_HOSTS,
)
flags.DEFINE_float(
    "network_delay_ms",
    Scaling.network_delay_ms,
    "Milliseconds from one host to another.",
    lower_bound=0.0,
    **_HOSTS,
)
flags.DEFINE_float(
    "network_gbit",
    Scaling.network_gbit,
    "Gbit/s between hosts.",
    lower_bound=1e-3,
    **_HOSTS,
)


command_line.define_output()


def read(argv: Sequence[str], doc: str) -> Scaling:
    """Reads the flags, and checks them, as `towers.train.flags.read` does.

    Raises:
        ValueError: A flag contradicts others, or what this program does.
    """
    own = [each["module_name"] for each in (_SCALING, _HOSTS)]
    train_flags.read_with(command_line.below([*own, command_line.OUTPUT]), argv, doc)
    scaling = checks.check(command_line.settings(Scaling))
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
        name for name in tower_flags.OF_A_RUN if not (once and name == "train_epochs")
    ]
    # Each trial has a folder of its own, and leaves nothing.
    tower_flags.say_idle(scaling, ["model_dir", "clean", *names], "towers.scaling")
    return scaling


def read_checked(argv: Sequence[str]) -> Scaling:
    """Reads the flags that `Scaling.for_a_trial` has made."""
    flags.FLAGS(argv)
    return command_line.settings(Scaling)

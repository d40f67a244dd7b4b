"""How a model is to be trained, as `multi_gpu_model` was asked: a frozen value."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from towers.collectives.world import COMPRESSIONS
from towers.devices.names import is_gpu
from towers.layers import pipeline, tables
from towers.model.options import (
    CPU,
    OF_A_HOST,
    Asynchronous,
    ParameterServer,
    Replicated,
    Sharded,
    Stages,
    UpdateOptions,
    check_choice,
    given_to_all,
)
from towers.model.update.layout import check_count

# Batches that are fetched ahead where they are copied from one memory to another.
_AHEAD = 2

# Takes x, y and whether they are to be trained on; returns x and y.
Preprocessing = Callable[[Any, Any, bool], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of `multi_gpu_model`, but for the model and the towers.

    Each attribute is one of them. What changes while a model trains, such as the
    hosts and the towers, is in a `VariableUpdate`.
    """

    variable_update: UpdateOptions = dataclasses.field(default=ParameterServer())
    stages: Stages = dataclasses.field(default=Stages(1))
    micro_batches: int = 1
    recompute: str = "none"
    loss_placement: str = "auto"
    strict: bool = True
    gradient_compression: str = "none"
    shard_embeddings: str = "none"
    # Each host has a file of its own.
    check_numerics: bool | str | os.PathLike = dataclasses.field(
        default=False, metadata={"compared_as": bool}
    )
    cpu_merge: bool | None = dataclasses.field(default=None, metadata=OF_A_HOST)
    cpu_relocation: bool = dataclasses.field(default=False, metadata=OF_A_HOST)
    preprocess: Callable[[Any, Any, bool], tuple[Any, Any]] | None = dataclasses.field(
        default=None, metadata=OF_A_HOST
    )
    prefetch: int | None = dataclasses.field(default=None, metadata=OF_A_HOST)

    def __post_init__(self):
        """Checks what needs neither the model nor the towers.

        Raises:
            ValueError: A value is wrong, or does not go with another one.
        """
        check_choice("loss_placement", self.loss_placement, ["auto", "tower"])
        check_choice("gradient_compression", self.gradient_compression, [*COMPRESSIONS])
        check_choice("shard_embeddings", self.shard_embeddings, tables.WAYS)
        check_choice("recompute", self.recompute, pipeline.RECOMPUTE)
        check_count("micro_batches", self.micro_batches)
        _check_prefetch(self.prefetch)
        if self.preprocess is not None and not callable(self.preprocess):
            raise ValueError(
                f"Received preprocess={self.preprocess!r}; expected None, or a "
                "function `preprocess(x, y, training)` that returns x and y."
            )
        if not isinstance(self.check_numerics, bool | str | os.PathLike):
            raise ValueError(
                f"Received check_numerics={self.check_numerics!r}; expected True, "
                "False, or where to write the batch of a step that is not finite, such "
                "as 'not_finite.npz'."
            )
        self._check_keras_2()
        if isinstance(self.variable_update, Asynchronous):
            self._check_asynchronous()
        if isinstance(self.variable_update, Sharded) and self.stages.count > 1:
            raise ValueError(
                f"Received variable_update='sharded' with stages={self.stages.count}, "
                "of which each keeps its own layers whole; expected one of them."
            )

    def _check_keras_2(self):
        """Checks that arguments of Keras 2 say nothing else than options of values."""
        device = getattr(self.variable_update, "device", None)
        if self.cpu_relocation and device not in (None, CPU):
            raise ValueError(
                f"Received cpu_relocation=True with device={device!r}, which says "
                "where the variables are, too; expected one of them, so leave "
                "cpu_relocation out."
            )
        merge = getattr(self.variable_update, "merge", None)
        if None not in (merge, self.cpu_merge) and self.cpu_merge != (merge == CPU):
            raise ValueError(
                f"Received cpu_merge={self.cpu_merge!r} with merge={merge!r}, which "
                "says where gradients are added, too; expected one of them, so leave "
                "cpu_merge out."
            )

    def _check_asynchronous(self):
        if self.shard_embeddings != "none":
            raise ValueError(
                f"Received shard_embeddings='{self.shard_embeddings}' with "
                "variable_update='asynchronous', whose towers update all of a model at "
                "home; use 'parameter_server' or 'replicated'."
            )
        if not self.towers_are_whole:
            raise ValueError(
                "Received variable_update='asynchronous' with stages, micro_batches or "
                "recompute; expected 'parameter_server' or 'replicated'."
            )

    def check_hosts(self, count: int) -> None:
        """Checks that so many hosts can update the variables together."""
        if count > 1 and isinstance(self.variable_update, Asynchronous):
            raise ValueError(
                f"Received variable_update='asynchronous' on {count} hosts, which wait "
                "for one another in each step; use 'parameter_server' or 'replicated'."
            )

    @property
    def given(self) -> dict[str, Any]:
        """Arguments and options that all hosts need to have alike, by their names."""
        return given_to_all(self)

    @property
    def device(self) -> str | None:
        """Where the variables are to be: "cpu", "gpu" or a device; `None` if not said.

        "gpu" is the first tower's device.
        """
        return (
            CPU
            if self.cpu_relocation
            else getattr(self.variable_update, "device", None)
        )

    @property
    def merges_on_cpu(self) -> bool | None:
        """Whether gradients are added on the CPU; `None` if nothing was said."""
        merge = getattr(self.variable_update, "merge", None)
        return self.cpu_merge if merge is None else merge == CPU

    @property
    def towers_are_whole(self) -> bool:
        """Whether a tower computes its whole batch at once, on one device."""
        return self.stages.count == self.micro_batches == 1 and self.recompute == "none"

    @property
    def shards_state(self) -> bool:
        """Whether towers divide the optimizer's state."""
        update = self.variable_update
        return isinstance(update, Replicated) and update.shard_optimizer_state

    @property
    def divides_variables(self) -> bool:
        """Whether a host may have a part of some variables or slots only."""
        return self.shards_state or self.tables != "none"

    @property
    def tables(self) -> str:
        """How embedding tables lie on devices: one of `tables.WAYS`."""
        if (
            isinstance(self.variable_update, Sharded)
            and self.shard_embeddings == "none"
        ):
            # Towers look up rows of a table, and need not gather the whole.
            return "rows"
        return self.shard_embeddings

    @property
    def choice_file(self) -> str | os.PathLike | None:
        """Where to keep what "auto" chooses, if anywhere."""
        return getattr(self.variable_update, "choice_file", None)

    @property
    def numerics_file(self) -> str | None:
        """Where a step that is not finite is written, if anywhere."""
        if isinstance(self.check_numerics, bool):
            return None
        return os.path.abspath(os.path.expanduser(self.check_numerics))

    def batches_ahead(self, towers: Sequence[str]) -> int:
        """Returns how many batches are fetched ahead for towers on these devices."""
        if self.prefetch is not None:
            return self.prefetch
        # Between logical CPUs nothing is copied.
        return _AHEAD if any(map(is_gpu, towers)) else 0


def _check_prefetch(count):
    number = isinstance(count, int) and not isinstance(count, bool)
    if count is not None and not (number and count >= 0):
        raise ValueError(
            f"Received prefetch={count!r}; expected None, or a number of batches, such "
            "as 0 to have none fetched ahead."
        )

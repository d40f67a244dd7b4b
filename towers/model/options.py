"""Values for options of `multi_gpu_model` that only go with one another.

Each checks itself when it is made. A string or a number is short for a value with its
defaults: "replicated" for `Replicated()`, and 2 for `Stages(2)`.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from towers.collectives import reduce
from towers.devices.names import nccl_fits
from towers.layers import parameters, pipeline
from towers.model.update.layout import check_count

# Words for devices, which hold for any towers.
CPU, GPU = "cpu", "gpu"
# Of a field: hosts that train together may have different values.
OF_A_HOST = {"compared_as": None}


def given_to_all(value: Any) -> dict[str, Any]:
    """Returns what all hosts have to be given of a dataclass, by the names of fields.

    A field may have the metadata "compared_as": a function that returns what is
    compared, or `None`; see `OF_A_HOST`. Of values with options, there is what is short
    for them, and then the options.
    """
    given = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        compared_as = field.metadata.get("compared_as", lambda value: value)
        if dataclasses.is_dataclass(part):
            given |= {field.name: part.short, **given_to_all(part)}
        elif compared_as is not None:
            given[field.name] = compared_as(part)
    return given


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """Options of each way to update the variables.

    Attributes:
        name: The string that is short for the way.
        packed: Whether variables and gradients travel between devices in one buffer for
            each type. By default if they travel between memories, which logical CPUs
            share.
    """

    name: ClassVar[str]
    packed: bool | None = dataclasses.field(
        default=None, metadata=OF_A_HOST, kw_only=True
    )

    def __post_init__(self):
        if self.packed is not None and not isinstance(self.packed, bool):
            raise ValueError(
                f"Received packed={self.packed!r}; expected True, False, or None for "
                "what is faster."
            )

    @property
    def short(self) -> str:
        """The string that is short for the way."""
        return self.name

    def check_towers(self, towers: Sequence[str]) -> None:
        """Checks that towers with these first devices can update variables this way."""


@dataclasses.dataclass(frozen=True)
class ParameterServer(UpdateOptions):
    """Variables on one device, updated once a step by the sum of all gradients.

    Examples:
        >>> at_home = towers.ParameterServer(device="cpu", merge="gpu")
        >>> parallel = towers.multi_gpu_model(model, variable_update=at_home)

    Attributes:
        device: Device of the variables: "cpu", "gpu" for the first tower's device, or a
            device string. By default they stay where Keras created them.
        merge: Where gradients are added: on the "cpu", or on the first tower's device,
            the "gpu". By default where the variables are.
        packed: Whether variables and gradients travel in one buffer for each type.
    """

    name: ClassVar[str] = "parameter_server"
    device: str | None = dataclasses.field(default=None, metadata=OF_A_HOST)
    merge: str | None = dataclasses.field(default=None, metadata=OF_A_HOST)

    def __post_init__(self):
        super().__post_init__()
        _check_device(self.device)
        if self.merge is not None:
            check_choice("merge", self.merge, [CPU, GPU])


@dataclasses.dataclass(frozen=True)
class Replicated(UpdateOptions):
    """Variables in a copy on each tower, which updates it by the sum of all gradients.

    The first tower's copy is the model's own variables.

    Examples:
        >>> copies = towers.Replicated("nccl")
        >>> parallel = towers.multi_gpu_model(model, variable_update=copies)

    Attributes:
        all_reduce: How gradients are added: on the "cpu"; on the first "device"; by
            "ring", each device a part; by "nccl", on several GPUs. "auto" is the first
            GPU, or else the CPU.
        shard_optimizer_state: Whether each tower of all hosts has the optimizer's
            variables of a part of the parameters only, such as Adam's moments, and
            updates that part. The numbers are the same; saved models and checkpoints,
            too.
        packed: Whether variables and gradients travel in one buffer for each type.
    """

    name: ClassVar[str] = "replicated"
    all_reduce: str = "auto"
    shard_optimizer_state: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_choice("all_reduce", self.all_reduce, ["auto", *reduce.ALGORITHMS])
        if not isinstance(self.shard_optimizer_state, bool):
            raise ValueError(
                f"Received shard_optimizer_state={self.shard_optimizer_state!r}; "
                "expected True or False."
            )
        if self.shard_optimizer_state and self.all_reduce != "auto":
            raise ValueError(
                f"Received all_reduce='{self.all_reduce}' with "
                "shard_optimizer_state=True, where no tower gets all sums; leave it "
                "out."
            )

    def check_towers(self, towers: Sequence[str]) -> None:
        """Checks that NCCL can add the gradients, if it is to."""
        if self.all_reduce == "nccl" and not nccl_fits(towers):
            raise ValueError(
                f"Received all_reduce='nccl' for towers on {', '.join(towers)}; NCCL "
                "needs several towers, each on a GPU of its own, so use 'ring'."
            )


@dataclasses.dataclass(frozen=True)
class Sharded(UpdateOptions):
    """Variables in parts: each tower keeps, and updates, a part of each large one.

    A tower gathers a parameter when an operation needs the whole value, forward and
    backward, and lets go of it afterwards. So parameters, gradients and optimizer slots
    take the memory of one device once, however many there are: that is stage 3 of ZeRO
    (Rajbhandari et al. 2020), or FSDP (Zhao et al. 2023). The numbers are the same;
    saved models and checkpoints, too. Rows of embedding tables are looked up where they
    lie, as with shard_embeddings="rows".

    Of several hosts, each has all parts, and divides them among its own towers.

    Examples:
        >>> in_parts = towers.Sharded(min_bytes=2**20)
        >>> parallel = towers.multi_gpu_model(model, variable_update=in_parts)

    Attributes:
        min_bytes: How many bytes the value of a variable has at least that is divided.
            Smaller ones are on the first tower's device.
        packed: Whether what is not divided travels in one buffer for each type.
    """

    name: ClassVar[str] = "sharded"
    min_bytes: int = parameters.MIN_BYTES

    def __post_init__(self):
        super().__post_init__()
        check_count("min_bytes", self.min_bytes)


@dataclasses.dataclass(frozen=True)
class Asynchronous(UpdateOptions):
    """Variables on one device, updated by each tower without waiting for the others.

    Examples:
        >>> in_turn = towers.Asynchronous(max_staleness=0)
        >>> parallel = towers.multi_gpu_model(model, variable_update=in_turn)

    Attributes:
        max_staleness: The most updates by other towers between a tower's reading the
            variables and its own update. By default no limit.
        device: Device of the variables; see `ParameterServer`.
        packed: Whether variables and gradients travel in one buffer for each type.
    """

    name: ClassVar[str] = "asynchronous"
    max_staleness: int | None = None
    device: str | None = dataclasses.field(default=None, metadata=OF_A_HOST)

    def __post_init__(self):
        super().__post_init__()
        _check_device(self.device)
        bound = self.max_staleness
        number = isinstance(bound, int) and not isinstance(bound, bool)
        if bound is not None and not (number and bound >= 0):
            raise ValueError(
                f"Received max_staleness={bound!r}; expected None, for any, or a "
                "number of updates, such as 0 to have them made in turn."
            )


@dataclasses.dataclass(frozen=True)
class Auto(UpdateOptions):
    """The faster one of the other ways, measured in the first calls of training.

    They take some seconds for it, and then restore the variables. If nothing can be
    measured, and in deterministic or eager runs, it is `Replicated` on several GPUs and
    `ParameterServer` otherwise.

    Examples:
        >>> measured = towers.Auto("choice.json")
        >>> parallel = towers.multi_gpu_model(model, variable_update=measured)

    Attributes:
        choice_file: File in which to keep the choice. If the file exists, the same
            choice is made again.
        device: Device of the variables; see `ParameterServer`. Copies are not tried
            where the first tower is on another one.
        packed: Whether variables and gradients travel in one buffer for each type.
    """

    name: ClassVar[str] = "auto"
    choice_file: str | os.PathLike | None = dataclasses.field(
        default=None, metadata=OF_A_HOST
    )
    device: str | None = dataclasses.field(default=None, metadata=OF_A_HOST)

    def __post_init__(self):
        super().__post_init__()
        _check_device(self.device)
        if not isinstance(self.choice_file, str | os.PathLike | None):
            raise ValueError(
                f"Received choice_file={self.choice_file!r}; expected None, or a file, "
                "such as 'choice.json'."
            )


# By the strings that are short for them.
UPDATES: dict[str, type[UpdateOptions]] = {
    way.name: way for way in (Asynchronous, Auto, ParameterServer, Replicated, Sharded)
}


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of each tower, each on a device of its own.

    The model is divided among them: a layer's weights, their gradients and their
    optimizer slots are on its stage's device.

    Examples:
        >>> halves = towers.Stages(2, {"block_[0-5]": 0, ".*": 1})
        >>> parallel = towers.multi_gpu_model(model, stages=halves, micro_batches=8)

    Attributes:
        count: Number of devices of each tower.
        placement: The stage of each layer: a dict of regular expressions for names of
            layers, of which the first that matches a whole name counts. A layer without
            weights that none matches goes with its inputs. "auto" divides the layers in
            their order.
        schedule: In which order micro-batches are computed. "gpipe": all go forward,
            and then backward. "1f1b": one goes backward as soon as it can, so that a
            stage keeps the activations of at most as many as there are stages.
    """

    count: int = dataclasses.field(metadata=OF_A_HOST)
    placement: str | Mapping[str, int] = "auto"
    schedule: str = pipeline.SCHEDULES[0]

    def __post_init__(self):
        check_count("stages", self.count)
        check_choice("schedule", self.schedule, pipeline.SCHEDULES)
        if self.placement == "auto":
            return
        if not isinstance(self.placement, Mapping):
            raise ValueError(
                f"Received placement={self.placement!r}; expected 'auto', or stages by "
                "regular expressions for names of layers, such as {'block_[0-5]': 0, "
                "'.*': 1}."
            )
        if self.count == 1:
            raise ValueError(
                "Received a placement with stages=1; expected stages=2 or more, or no "
                "placement."
            )
        for pattern, stage in self.placement.items():
            pipeline.check_place(pattern, stage, self.count)
        # Nobody changes it from outside.
        object.__setattr__(self, "placement", dict(self.placement))

    @property
    def short(self) -> int:
        """The number that is short for as many stages."""
        return self.count


def as_update(asked: Any) -> UpdateOptions:
    """Returns the value that the argument `variable_update` is, or is short for."""
    if isinstance(asked, UpdateOptions):
        return asked
    if isinstance(asked, str) and asked in UPDATES:
        return UPDATES[asked]()
    raise ValueError(
        f"Received variable_update={asked!r}; expected one of {[*UPDATES]}, or a value "
        "with options, such as towers.Replicated(all_reduce='ring')."
    )


def as_stages(asked: Any) -> Stages:
    """Returns the value that the argument `stages` is, or is short for."""
    return asked if isinstance(asked, Stages) else Stages(asked)


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Checks that an argument is one of the names that it may be."""
    if value not in known:
        raise ValueError(f"Received {name}={value!r}; expected one of {[*known]}.")


def _check_device(device):
    if not isinstance(device, str | None):
        raise ValueError(
            f"Received device={device!r}; expected None for where the variables are, "
            "'cpu', 'gpu' for the first tower's device, or a device string."
        )

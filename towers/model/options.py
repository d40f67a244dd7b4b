"""Options of training: values for each way to update variables, `Stages` and `Config`.

Each value checks itself on construction. A string or a number is shorthand for a value
with its defaults: "replicated" for `Replicated()`, and 2 for `Stages(2)`.
"""

import dataclasses
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from towers.collectives import reduce
from towers.collectives.world import COMPRESSIONS
from towers.devices.names import is_gpu, nccl_fits
from towers.devices.resolved import resolve
from towers.layers import parameters, pipeline, tables
from towers.program import words

# Device names that are valid for any towers.
CPU, GPU = "cpu", "gpu"
# Metadata of fields that may differ between hosts that train together.
OF_A_HOST = {"compared_as": None}
# Number of batches to prefetch if they are copied between memories.
_AHEAD = 2

# Takes x, y and whether the batch is for training; returns x and y.
Preprocessing = Callable[[Any, Any, bool], tuple[Any, Any]]


def given_to_all(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that all hosts must share, by name.

    A field may have the metadata "compared_as": a function that returns the value to
    compare, or `None` for a field that may differ; see `OF_A_HOST`. A value with
    options is replaced by its shorthand, followed by its options.
    """
    shared = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        compared_as = field.metadata.get("compared_as", lambda value: value)
        if compared_as is None:
            continue
        if dataclasses.is_dataclass(part):
            shared |= {field.name: part.short, **given_to_all(part)}
        else:
            shared[field.name] = compared_as(part)
    return shared


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """Options that all ways to update the variables share.

    Attributes:
        name: The shorthand string of the way.
        packed: Whether variables and gradients are sent between devices in one buffer
            for each type. By default if devices have separate memories; logical CPUs
            share theirs.
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
        """The shorthand string of the way."""
        return self.name

    def check_towers(self, towers: Sequence[str]) -> None:
        """Checks that towers with these first devices support this way."""

    def builder_options(self, all_reduce: str) -> dict[str, Any]:
        """Returns the arguments of the function in `builders/strategies.py`.

        Args:
            all_reduce: How copies add gradients: the requested or chosen algorithm.
        """
        del all_reduce
        return {}


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
            the "gpu". By default on the device of the variables.
        packed: Whether variables and gradients are sent in one buffer for each type.
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
    """A copy of the variables on each tower, updated there by the sum of all gradients.

    The model's own variables are the first tower's copy.

    Examples:
        >>> copies = towers.Replicated("nccl")
        >>> parallel = towers.multi_gpu_model(model, variable_update=copies)

    Attributes:
        all_reduce: Where gradients are added: on the "cpu"; on the first "device"; by
            "ring", a part on each device; by "nccl", on GPUs, also those of other
            hosts. "auto" is "nccl" on GPUs of several hosts, the first GPU on one host,
            or else the CPU.
        shard_optimizer_state: Whether each tower of all hosts updates one shard of the
            parameters only, and holds the optimizer's variables of that shard alone,
            such as Adam's moments. Results are the same, and so are saved models and
            checkpoints.
        packed: Whether variables and gradients are sent in one buffer for each type.
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
        """Checks that NCCL can add the gradients, if it is selected."""
        if self.all_reduce == "nccl":
            reduce.check_nccl(towers, "all_reduce")

    def builder_options(self, all_reduce: str) -> dict[str, Any]:
        """Returns the algorithm and whether to shard state; see `UpdateOptions`."""
        state = self.shard_optimizer_state
        return {"all_reduce_alg": all_reduce, "shard_optimizer_state": state}


@dataclasses.dataclass(frozen=True)
class Sharded(UpdateOptions):
    """Variables in shards: each tower keeps and updates a shard of each large variable.

    A tower gathers a parameter when an operation needs the whole value, forward and
    backward, and frees it afterwards. So parameters, gradients and optimizer slots take
    the memory of one device once, for any number of devices: stage 3 of ZeRO
    (Rajbhandari et al. 2020), or FSDP (Zhao et al. 2023). Results are the same, and so
    are saved models and checkpoints. Rows of embedding tables are looked up on the
    device that has them, as with shard_embeddings="rows".

    With several hosts, each has all shards, and divides them among its own towers.

    Examples:
        >>> in_parts = towers.Sharded(min_bytes=2**20)
        >>> parallel = towers.multi_gpu_model(model, variable_update=in_parts)

    Attributes:
        min_bytes: Minimum size in bytes of a variable that is sharded. Smaller
            variables are on the first tower's device.
        packed: Whether other variables are sent in one buffer for each type.
    """

    name: ClassVar[str] = "sharded"
    min_bytes: int = parameters.MIN_BYTES

    def __post_init__(self):
        super().__post_init__()
        check_count("min_bytes", self.min_bytes)

    def builder_options(self, all_reduce: str) -> dict[str, Any]:
        """Returns the minimum size of a sharded variable; see `UpdateOptions`."""
        return {"min_bytes": self.min_bytes}


@dataclasses.dataclass(frozen=True)
class Asynchronous(UpdateOptions):
    """Variables on one device, updated by each tower without waiting for the others.

    Examples:
        >>> in_turn = towers.Asynchronous(max_staleness=0)
        >>> parallel = towers.multi_gpu_model(model, variable_update=in_turn)

    Attributes:
        max_staleness: Maximum number of updates by other towers between a tower's read
            of the variables and its own update. By default no limit.
        device: Device of the variables; see `ParameterServer`.
        packed: Whether variables and gradients are sent in one buffer for each type.
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

    def builder_options(self, all_reduce: str) -> dict[str, Any]:
        """Returns the bound on staleness; see `UpdateOptions`."""
        return {"max_staleness": self.max_staleness}


@dataclasses.dataclass(frozen=True)
class Auto(UpdateOptions):
    """The fastest of the other ways, measured while the model trains.

    Training begins with `Replicated` on several GPUs, and with `ParameterServer`
    otherwise. Then the ways train on the next batches in turn, and compute the same up
    to rounding. Starting them takes at most 10 seconds, or 2% of a long run, or a tenth
    of a short one. Deterministic and eager runs keep the first way.

    Examples:
        >>> measured = towers.Auto("choice.json")
        >>> parallel = towers.multi_gpu_model(model, variable_update=measured)

    Attributes:
        choice_file: File that stores the choice. If the file exists, the same choice is
            made again.
        device: Device of the variables; see `ParameterServer`. Copies are not tried if
            the first tower is on another device.
        packed: Whether variables and gradients are sent in one buffer for each type.
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


# Keys are the shorthand strings.
UPDATES: dict[str, type[UpdateOptions]] = {
    way.name: way for way in (Asynchronous, Auto, ParameterServer, Replicated, Sharded)
}


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of each tower, each on a separate device.

    The model is divided among the stages: a layer's weights, their gradients and their
    optimizer slots are on the device of its stage.

    Examples:
        >>> halves = towers.Stages(2, {"block_[0-5]": 0, ".*": 1})
        >>> parallel = towers.multi_gpu_model(model, stages=halves, micro_batches=8)

    Attributes:
        count: Number of devices of each tower.
        placement: The stage of each layer: a dict of regular expressions for names of
            layers; the first one that matches a whole name applies. A layer without
            weights that no expression matches is on the stage of its inputs. "auto"
            divides the layers in their order.
        schedule: Order of the micro-batches. "gpipe": all forward passes, and then all
            backward passes. "1f1b": each backward pass as early as possible, so that a
            stage keeps the activations of at most as many micro-batches as there are
            stages.
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
        # A copy, so that later changes of the argument have no effect.
        object.__setattr__(self, "placement", dict(self.placement))

    @property
    def short(self) -> int:
        """The number that is shorthand for these stages."""
        return self.count


def as_update(asked: Any) -> UpdateOptions:
    """Converts the argument `variable_update` to a value."""
    if isinstance(asked, UpdateOptions):
        return asked
    if isinstance(asked, str) and asked in UPDATES:
        return UPDATES[asked]()
    raise ValueError(
        f"Received variable_update={asked!r}; expected one of {[*UPDATES]}, or a value "
        "with options, such as towers.Replicated(all_reduce='ring')."
    )


def as_stages(asked: Any) -> Stages:
    """Converts the argument `stages` to a value."""
    return asked if isinstance(asked, Stages) else Stages(asked)


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Checks that an argument is one of the known names."""
    if value not in known:
        raise ValueError(f"Received {name}={value!r}; expected one of {[*known]}.")


def _check_device(device):
    if not isinstance(device, str | None):
        raise ValueError(
            f"Received device={device!r}; expected None for where the variables are, "
            "'cpu', 'gpu' for the first tower's device, or a device string."
        )


# The devices of the towers, and their shares of a batch.


@dataclasses.dataclass(frozen=True)
class Layout:
    """The towers of this host.

    Attributes:
        towers: The devices of each tower: one for each of its stages.
        split_ratios: Share of each tower of a batch, relative to the others.
    """

    towers: tuple[tuple[str, ...], ...]
    split_ratios: tuple[int, ...]

    @classmethod
    def of(
        cls,
        gpus: int | Sequence[int] | Sequence[str] | None,
        stages: int,
        split_ratios: Sequence[int] | None,
    ) -> "Layout":
        """Makes a layout of arguments of `multi_gpu_model`.

        Raises:
            ValueError: A device does not exist, or the numbers do not fit.
        """
        towers = tuple(grouped(resolve(gpus), stages))
        return cls(towers, _checked(split_ratios, len(towers)))

    @property
    def firsts(self) -> list[str]:
        """The first device of each tower."""
        return [devices[0] for devices in self.towers]

    @property
    def nccl_fits(self) -> bool:
        """Whether NCCL can add the gradients of these towers."""
        return nccl_fits(self.firsts)

    def __str__(self) -> str:
        text = words.count(len(self.towers), "tower")
        if len({*self.split_ratios}) > 1:
            text += f" in the ratio {':'.join(map(str, self.split_ratios))}"
        return text


def grouped(devices: Sequence[str], stages: Any) -> list[tuple[str, ...]]:
    """Groups devices by tower: each has as many as there are stages."""
    check_count("stages", stages)
    if len(devices) % stages:
        raise ValueError(
            f"Received stages={stages} for {words.count(len(devices), 'device')}; "
            "expected a number of stages that divides that of the devices, as each "
            "tower takes one for each stage."
        )
    firsts = range(0, len(devices), stages)
    return [tuple(devices[k : k + stages]) for k in firsts]


def _checked(ratios: Any, towers: int) -> tuple[int, ...]:
    """Checks the ratios and returns them; equal ones by default."""
    if ratios is None:
        return (1,) * towers
    try:
        numbers = tuple(map(operator.index, ratios))
    except TypeError:
        numbers = ()
    if len(numbers) != towers or min(numbers) < 1:
        raise ValueError(
            f"Received split_ratios={ratios} for {towers} towers; expected a positive "
            "integer for each, such as (2, 3, 3)."
        )
    return numbers


def check_count(name: str, value: Any) -> None:
    """Checks that an argument is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"Received {name}={value!r}; expected an integer from 1.")


# All options of `multi_gpu_model`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of `multi_gpu_model`, except for the model and the towers.

    Each attribute is the argument of that name. A `Program` holds the state that
    changes during training, such as hosts and towers.
    """

    variable_update: UpdateOptions = dataclasses.field(default=ParameterServer())
    stages: Stages = dataclasses.field(default=Stages(1))
    micro_batches: int = 1
    recompute: str = "none"
    loss_placement: str = "auto"
    strict: bool = True
    gradient_compression: str = "none"
    shard_embeddings: str = "none"
    # Each host has its own file.
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
        """Checks the values that depend on neither the model nor the towers.

        Raises:
            ValueError: A value is wrong, or conflicts with another one.
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

    def _check_keras_2(self):
        """Checks that arguments of Keras 2 do not contradict options of values."""
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
        """Checks that `count` hosts can update the variables together."""
        if count > 1 and isinstance(self.variable_update, Asynchronous):
            raise ValueError(
                f"Received variable_update='asynchronous' on {count} hosts, which wait "
                "for one another in each step; use 'parameter_server' or 'replicated'."
            )

    @property
    def given(self) -> dict[str, Any]:
        """Arguments and options that must be equal on all hosts, by name."""
        return given_to_all(self)

    @property
    def device(self) -> str | None:
        """Device of the variables: "cpu", "gpu" or a device string; `None` if not set.

        "gpu" is the first tower's device.
        """
        return (
            CPU
            if self.cpu_relocation
            else getattr(self.variable_update, "device", None)
        )

    @property
    def merges_on_cpu(self) -> bool | None:
        """Whether gradients are added on the CPU; `None` if not set."""
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
        """Whether hosts may have only a part of some variables or slots."""
        return self.shards_state or self.tables != "none"

    @property
    def tables(self) -> str:
        """The placement of embedding tables: one of `tables.WAYS`."""
        if (
            isinstance(self.variable_update, Sharded)
            and self.shard_embeddings == "none"
        ):
            # Towers look up rows of a table without gathering the whole table.
            return "rows"
        return self.shard_embeddings

    @property
    def choice_file(self) -> str | os.PathLike | None:
        """File that stores the choice of "auto", if any."""
        return getattr(self.variable_update, "choice_file", None)

    @property
    def numerics_file(self) -> str | None:
        """File for the batch of a step that is not finite, if any."""
        if isinstance(self.check_numerics, bool):
            return None
        return os.path.abspath(os.path.expanduser(self.check_numerics))

    def batches_ahead(self, towers: Sequence[str]) -> int:
        """Returns the number of batches to prefetch for towers on these devices."""
        if self.prefetch is not None:
            return self.prefetch
        # Logical CPUs share their memory, so nothing is copied.
        return _AHEAD if any(map(is_gpu, towers)) else 0


def _check_prefetch(count):
    number = isinstance(count, int) and not isinstance(count, bool)
    if count is not None and not (number and count >= 0):
        raise ValueError(
            f"Received prefetch={count!r}; expected None, or a number of batches, such "
            "as 0 to have none fetched ahead."
        )

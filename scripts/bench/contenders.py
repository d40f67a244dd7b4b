"""Who can train: the contenders' names, and the modules that run them."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

from absl import flags


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of contender.

    Attributes:
        label: What tables call it.
        module: The module of this package that runs it.
        ways: What may follow the colon; None if nothing, an empty tuple if the module
            decides.
        suffixes: Whether +xla and @N are understood.
        works: What it can train; all if empty.
    """

    label: str
    module: str
    ways: tuple[str, ...] | None = None
    suffixes: bool = False
    works: tuple[str, ...] = ()
    by_mpi: bool = False


_IMAGES = "mlp", "resnet20", "resnet50", "resnet50_224"
# Their gradients can be stacked, as a loop by hand does.
_DENSE = "mlp", "resnet20", "resnet56", "resnet50_224", "resnet50_224_bf16", "lm_bf16"
KINDS = {
    "towers": Kind("Towers", "keras_fit", ways=(), suffixes=True),
    "one_device": Kind(
        "Keras fit, one device, whole batch", "keras_fit", suffixes=True
    ),
    "mirrored": Kind("Keras fit, MirroredStrategy", "keras_fit"),
    "mirrored_loop": Kind("MirroredStrategy, loop by hand", "loops"),
    "tower_loop": Kind(
        "Loop with GradientTowers", "loops", ways=(), works=("mlp", "resnet20")
    ),
    "loop_by_hand": Kind("Loop by hand, inlined towers", "loops", works=_DENSE),
    "hosts": Kind("Towers, a host each", "hosts_fit", ways=(), suffixes=True),
    "mpi_hosts": Kind(
        "Towers, a host of MPI's each", "hosts_fit", ways=(), suffixes=True, by_mpi=True
    ),
    "multi_worker_loop": Kind(
        "MultiWorkerMirroredStrategy, loop by hand", "multi_worker_loop"
    ),
    "jax": Kind("Keras fit, JAX DataParallel", "jax_fit"),
    "ddp": Kind(
        "PyTorch DistributedDataParallel",
        "torch_ddp",
        works=("mlp", "resnet20", "transformer_lm"),
    ),
    "pipeline": Kind("Towers, a pipeline of stages", "keras_fit", ways=()),
    "micro_batches": Kind("Towers, micro-batches on one device", "keras_fit", ways=()),
    "torch_pipeline": Kind(
        "PyTorch pipeline", "torch_pipeline", ways=(), works=("transformer_lm",)
    ),
    "tf_cnn": Kind(
        "tf_cnn_benchmarks",
        "tf_cnn",
        ways=("parameter_server", "replicated", "independent"),
        works=_IMAGES,
    ),
}
_FORM = re.compile(
    r"(?P<name>\w+)(:(?P<way>\w+))?(/(?P<sharded>auto|rows|columns|state))?"
    r"(?P<xla>\+xla)?(@(?P<steps>[1-9]\d*))?(\?(?P<options>\w+=\w+(&\w+=\w+)*))?"
)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One contender.

    Attributes:
        text: What it was called on the command line.
        name: Its kind.
        way: How variables are updated; None if that is not said.
        xla: Whether XLA was asked for.
        steps_per_call: Steps that one call of the compiled function trains.
        tables: How embedding tables lie on the towers' devices.
        shards_state: Whether each tower has a part of the optimizer's state.
        options: Further arguments of `multi_gpu_model`, options of the way,
            `jit_compile`, and `inter_op`, the operations that run at once.
    """

    text: str
    name: str
    way: str | None
    xla: bool
    steps_per_call: int
    tables: str = "none"
    shards_state: bool = False
    options: tuple[tuple[str, str | int], ...] = ()

    @property
    def kind(self) -> Kind:
        """The kind of contender."""
        return KINDS[self.name]

    @property
    def may_compile(self) -> bool:
        """Whether XLA may be used."""
        by_keras = self.name == "one_device" or (self.name == "towers" and not self.way)
        return self.xla or by_keras or bool(dict(self.options).get("jit_compile"))

    @property
    def label(self) -> str:
        """What tables call it."""
        tables = None if self.tables == "none" else f"tables: {self.tables}"
        state = "optimizer state in parts" if self.shards_state else None
        parts = [self.kind.label, self.way, tables, state]
        parts.append("XLA" if self.xla else None)
        if self.steps_per_call > 1:
            parts.append(f"{self.steps_per_call} steps a call")
        parts += [f"{name}={value}" for name, value in self.options]
        return ", ".join(part for part in parts if part)


@functools.cache
def parse(text: str) -> Contender:
    """Reads a contender such as `towers:replicated+xla@10`.

    Raises:
        ValueError: If there is no such contender.
    """
    match = _FORM.fullmatch(text)
    if match is None or match["name"] not in KINDS:
        raise ValueError(
            f"There is no contender {text!r}; use {', '.join(KINDS)}, some with :WAY, "
            "+xla or @STEPS_A_CALL behind it."
        )
    kind = KINDS[match["name"]]
    if kind.ways is None and match["way"]:
        raise ValueError(
            f"The contender {text!r} has a way behind a colon, but {match['name']} has "
            "none; leave it out."
        )
    if kind.ways and match["way"] not in kind.ways:
        ways = ", ".join(f"{match['name']}:{way}" for way in kind.ways)
        raise ValueError(f"The contender {text!r} has to be one of {ways}.")
    if not kind.suffixes and (match["xla"] or match["steps"]):
        raise ValueError(
            f"The contender {text!r} has +xla or @STEPS_A_CALL, which only "
            f"{', '.join(n for n, k in KINDS.items() if k.suffixes)} understand."
        )
    sharded = match["sharded"]
    if sharded and match["name"] != "towers":
        raise ValueError(
            f"The contender {text!r} has /{sharded}, which only towers understand."
        )
    if match["options"] and match["name"] != "towers":
        raise ValueError(
            f"The contender {text!r} has ?{match['options']}, which only towers "
            "understand."
        )
    if sharded == "state" and match["way"] != "replicated":
        raise ValueError(
            f"The contender {text!r} has /state, so it has to be "
            "towers:replicated/state."
        )
    return Contender(
        text,
        match["name"],
        match["way"],
        bool(match["xla"]),
        int(match["steps"] or 1),
        "none" if sharded in (None, "state") else sharded,
        sharded == "state",
        tuple(_option(text) for text in (match["options"] or "").split("&") if text),
    )


def _option(text):
    name, value = text.split("=")
    known = {"True": True, "False": False, "None": None}
    return name, int(value) if value.isdecimal() else known.get(value, value)


def check_flags(
    argv: Sequence[str], given: flags.FlagValues, **known: Iterable[str] | None
) -> None:
    """Checks that there are only flags, and what those say that have lists of names.

    Args:
        argv: What was no flag, behind the program's name.
        given: The flags.
        **known: By the flag, what it may name; None if the program checks that.

    Raises:
        ValueError: If a flag is wrong.
    """
    if len(argv) > 1:
        raise ValueError(f"Received {argv[1]!r}, which is not a flag; see --help.")
    for flag, names_known in known.items():
        names = given[flag].value
        for name in names if names_known is not None else ():
            if name not in names_known:
                raise ValueError(
                    f"--{flag} has {name!r}, which is unknown; use "
                    f"{', '.join(names_known)}."
                )
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"--{flag} has to name one or more, and none twice; it is "
                f"{','.join(names)!r}."
            )

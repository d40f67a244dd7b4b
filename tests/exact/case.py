"""One row of the table of exact cases: a model, what it is trained on, and how."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import optimizers

EPOCHS = 2


def sgd() -> keras.optimizers.Optimizer:
    """Returns the optimizer of most cases."""
    return optimizers.SGD(0.05, momentum=0.9)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One row of the table; it knows Keras only, and nothing of how towers compute.

    Attributes:
        group: Its heading.
        name: What it is, unique in its group.
        make: Builds the model; the seed is set before.
        batches: Returns the batches of an epoch: (x,), (x, y) or (x, y, sample_weight),
            or what a step of the model's own takes.
        loss: The loss to compile with.
        optimizer: Builds the optimizer to compile with. None: `compile` returns all
            arguments.
        compile: Returns further arguments of `compile`. None: `make` compiles.
        fit: Further arguments of `fit`.
        later: The methods that follow on training: "evaluate", "predict".
        towers: How many towers compute it, where a layout does not say.
        options: Further arguments of `multi_gpu_model`.
        policy: Keras's dtype policy.
        within: The largest difference that is rounding, relative to an array's size, if
            it is not that of the policy.
        expect: "equal"; "rule" if only what `only` names equals one device, by written
            design; else a part of the message of the error that it has to be.
        only: The arrays to compare are those with this in their name.
        feed: Makes of the dataset of an epoch what `fit` gets.
        between: Is called with the model between two calls of `fit`, to change and
            compile it again, or to call it by hand. Returns what has to be equal.
        again: Returns the batches of a second call of `fit`.
        reference: Builds the model that one device trains, by the number of towers,
            where it is another one by written design.
    """

    group: str
    name: str
    make: Callable[[], keras.Model]
    batches: Callable[[], Sequence[Any]]
    loss: Any = "mse"
    optimizer: Callable[[], keras.optimizers.Optimizer] | None = sgd
    compile: Callable[[], dict] | None = dict
    fit: dict = dataclasses.field(default_factory=dict)
    later: tuple[str, ...] = ("evaluate", "predict")
    towers: int = 3
    options: dict = dataclasses.field(default_factory=dict)
    policy: str = "float32"
    within: float | None = None
    expect: str = "equal"
    only: str = ""
    feed: Callable[[Any], Any] = lambda data: data
    between: Callable[[keras.Model], Any] | None = None
    again: Callable[[], Sequence[Any]] | None = None
    reference: Callable[[int], keras.Model] | None = None

    def __str__(self):
        return f"{self.group}/{self.name}"

    @property
    def verdict(self) -> str:
        """What the outcome has to be."""
        return self.expect if self.expect in ("equal", "rule") else "clear error"

    @property
    def tolerance(self) -> float:
        """The largest difference that is rounding, relative to an array's size."""
        if self.within is not None:
            return self.within
        return 1e-2 if "16" in self.policy else 1e-5

    @property
    def has_own_step(self) -> bool:
        """Whether the model's class defines what a step of training does."""
        return self.optimizer is None or self.compile is None

    def compile_arguments(self) -> dict | None:
        """Returns the arguments of `compile`; None if the model is compiled already."""
        if self.compile is None or self.optimizer is None:
            return self.compile and self.compile()
        return {"optimizer": self.optimizer(), "loss": self.loss, **self.compile()}

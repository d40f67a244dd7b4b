"""What a run is about: settings, what the data have, the task and the user's file."""

import dataclasses
from typing import Any

from towers import models
from towers.train.parts import metrics
from towers.train.parts.facts import DataFacts
from towers.train.parts.my_model import MyModel
from towers.train.parts.task import Task, choose
from towers.train.settings import Settings


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is about.

    Attributes:
        settings: What is asked for.
        facts: What the data have.
        task: What the model is to learn; `None` if only the user's own loss knows.
        mine: The user's file, if the model is in one.
    """

    settings: Settings
    facts: DataFacts
    task: Task | None
    mine: MyModel | None = None

    @property
    def for_model(self) -> models.Facts:
        """What the function that builds the model may ask for."""
        facts, target = self.facts, self.facts.target
        classes = outputs = None
        if target is not None and target.size:
            classes = target.num_classes
            outputs = self.task.outputs(facts) if self.task else target.size
        return models.Facts(
            input_shape=facts.input_shape,
            num_outputs=outputs,
            num_classes=classes,
            task=self.task and self.task.name,
            class_names=facts.class_names,
            vocabulary_size=facts.vocabulary_size,
            sequence_length=facts.sequence_length,
            feature_names=facts.feature_names,
            table_sizes=facts.table_sizes,
        )

    @property
    def known(self) -> dict[str, Any]:
        """What other functions of the user's file may ask for, by name."""
        return self.for_model.as_dict()

    def defines(self, name: str) -> bool:
        """Tells whether the user's file defines something beside the model."""
        return self.mine is not None and name in self.mine


def of(settings: Settings, facts: DataFacts, mine: MyModel | None) -> Setup:
    """Chooses the task for settings and data.

    Raises:
        ValueError: There is none, or it does not fit the data.
    """
    setup = Setup(settings, facts, None, mine)
    if setup.defines("loss") and settings.task is None:
        return setup
    task = choose(settings.task, facts)
    if task is None:
        raise ValueError(
            f"{mine.path.name} defines train_data and no loss, so it is not known what "
            "to learn; expected one of them, so define loss, or give --task, such as "
            "--task=regression."
        )
    metrics.check(settings.metric_names, task.name)
    if settings.mixes and task.name != "classification":
        raise ValueError(
            f"Received {settings.as_flag('mix')} for --task={task.name}; expected "
            "--task=classification, so leave it out."
        )
    return dataclasses.replace(setup, task=task)

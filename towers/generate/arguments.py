"""The arguments of towers.generate."""

import dataclasses
from collections.abc import Sequence

from towers.predict.arguments import ModelOptions, check_model, preprocessing_of
from towers.program.flags import command_line
from towers.program.flags.table import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """The arguments and flags of towers.generate."""

    prompt: str = flag(
        "",
        "Flags",
        "Text to continue. Default: none, which starts a new document.",
    )
    max_tokens: int = flag(
        200,
        "Flags",
        "Largest number of tokens to write. The end of a document comes earlier.",
        at_least=1,
    )
    temperature: float = flag(
        0.8,
        "Flags",
        "Divides the logits: low values give likely text, high values varied. 0 always "
        "takes the likeliest token.",
        at_least=0,
    )
    top_k: int | None = flag(
        None,
        "Flags",
        "Draw from so many of the likeliest tokens only. Default: from all.",
        at_least=1,
    )
    seed: int = flag(
        0, "Flags", "Seed of the random choices.", at_least=0, at_most=2**32 - 1
    )
    num_samples: int = flag(
        1,
        "Flags",
        "Number of texts to write, as one batch. The first one is that of --seed, the "
        "second one that of --seed + 1, and so on.",
        at_least=1,
    )


def read(argv: Sequence[str], doc: str) -> GenerateOptions:
    """Reads the arguments.

    Args:
        argv: The program's name and its arguments.
        doc: Description of the program.

    Raises:
        ValueError: An argument is missing, unknown or bad.
    """
    options = command_line.read(GenerateOptions, argv, doc)
    check_model(options)
    _check_task(options.local_dir)
    return options


def _check_task(model_dir):
    """Checks that it is a language model's run; what cannot be read is said later."""
    task = preprocessing_of(model_dir).get("task", "language_model")
    if task != "language_model":
        raise ValueError(
            f"Received {model_dir}, a run with --task={task}; expected one with "
            "--task=language_model, such as of --dataset=text:python."
        )

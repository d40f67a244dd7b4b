"""What the data has: what the function that builds a model may ask for, by name."""

import dataclasses
import difflib
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shape = tuple[int | None, ...]

# A function may ask for these wherever it is called: the data need not have names.
_MAY_BE_NONE = ("task", "class_names", "feature_names", "sequence_length")
# What two parameters of any names are given.
_BY_POSITION = ("input_shape", "num_outputs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a model is built for.

    Attributes:
        input_shape: Shape of one example, without the batch: (height, width, channels)
            for images, (numbers,) for rows, (tokens,) for text, where None stands for
            texts of any length; for columns a dict of shapes, by name, and for
            several inputs a nest of shapes.
        num_outputs: Numbers that the model gives for an example, a pixel or a token:
            one for each class, label or number; 1 for a binary choice. None if the
            data do not tell.
        num_classes: Number of classes; 2 for a binary choice, 0 without classes. None
            if the data do not tell.
        task: What --task of `towers train` says; None if only a loss of the user's
            knows.
        class_names: The names of the classes, or None.
        vocabulary_size: Number of tokens; None if the data are no text.
        sequence_length: Tokens of a text; None if that differs.
        feature_names: The names of a row's numbers, or None.
        table_sizes: Number of ids of each column of ids, by its name; None without.
    """

    input_shape: Shape | Mapping[str, Shape]
    num_outputs: int | None
    num_classes: int | None = 0
    task: str | None = "classification"
    class_names: Sequence[str] | None = None
    vocabulary_size: int | None = None
    sequence_length: int | None = None
    feature_names: Sequence[str] | None = None
    table_sizes: Mapping[str, int] | None = None

    def __post_init__(self):
        """Checks what a model would fail on.

        Raises:
            ValueError: A shape or a number is none.
        """
        shape = self.input_shape
        if not (isinstance(shape, Mapping) or _is_nest(shape)):
            object.__setattr__(self, "input_shape", _checked(shape))
        for name, least in (("num_classes", 0), ("num_outputs", 1)):
            value = getattr(self, name)
            if value is not None and not is_count(value, least):
                raise ValueError(
                    f"{name} must be a whole number of at least {least}, but "
                    f"{value!r} was received; give the number that the data has."
                )

    @property
    def input_kind(self) -> str:
        """What an example is: "image", "row", "tokens" or "columns"."""
        if isinstance(self.input_shape, Mapping) or _is_nest(self.input_shape):
            return "columns"
        if self.vocabulary_size is not None:
            return "tokens"
        return "image" if len(self.input_shape) == 3 else "row"

    def as_dict(self) -> dict[str, Any]:
        """Returns all of them, by name."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = tuple(field.name for field in dataclasses.fields(Facts))


def is_count(value: object, least: int = 1) -> bool:
    """Tells whether a value is a whole number of at least `least`."""
    return (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and value >= least
    )


def _is_nest(shape: Any) -> bool:
    """Whether these are the shapes of several inputs."""
    return isinstance(shape, Sequence) and any(
        isinstance(each, Sequence | Mapping) and not isinstance(each, str)
        for each in shape
    )


def _checked(shape: Any) -> Shape:
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or not all(size is None or is_count(size) for size in sizes):
        raise unknown_shape(shape)
    return tuple(size and int(size) for size in sizes)


def unknown_shape(shape: Any) -> ValueError:
    """Returns the error for what is no shape, or one that has to be known."""
    return ValueError(
        f"input_shape must hold whole numbers of at least 1, but {shape!r} "
        "was received; give the shape of one example without the batch, such as "
        "(32, 32, 3)."
    )


def arguments(
    function: Callable[..., Any],
    what: str,
    facts: Facts,
    options: Mapping[str, Any],
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Tells with which arguments a function that builds a model is to be called.

    Its parameters say by their names what it asks for. Two that are called otherwise
    get the shape and the number of outputs.

    Args:
        function: The function.
        what: What it is, as messages say.
        facts: What the data has.
        options: What was asked for, beyond that.

    Returns:
        Arguments by position, and by name.

    Raises:
        ValueError: It asks for what is not known, or does not take an option.
    """
    known = {**facts.as_dict(), **options}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # made in C
        return [known[name] for name in _BY_POSITION], dict(options)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    _check_options(what, options, [each.name for each in named], takes_any)
    without = [each.name for each in named if each.default is each.empty]
    needed = [name for name in without if name not in options]
    if _is_by_position(parameters, needed):
        rest = {p.name: known[p.name] for p in named[2:] if _is_given(p, known)}
        return [known[name] for name in _BY_POSITION], rest
    for name in needed:
        _check_parameter(what, name, known)
    given = {each.name: known[each.name] for each in named if _is_given(each, known)}
    if takes_any:
        given |= {name: v for name, v in known.items() if v is not None} | given
    return (), given


def _is_given(parameter, known):
    """Whether there is a value; where the data has none, a default stays."""
    value = known.get(parameter.name)
    return value is not None or (
        parameter.name in known and parameter.default is parameter.empty
    )


def _is_by_position(parameters, needed):
    """Whether a function takes a shape and a number, called as its author likes."""
    kinds = {each.kind for each in parameters}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        return True
    if inspect.Parameter.VAR_POSITIONAL in kinds and not needed:
        return True
    if len(needed) != 2 or all(name in NAMES for name in needed):
        return False
    meant = [_meant(name) for name in needed]
    return meant[0] in (None, "input_shape") and meant[1] in (
        *(None, "num_classes", "num_outputs", "class_names"),
    )


def _meant(name):
    return next(iter(difflib.get_close_matches(name, NAMES, n=1)), None)


def _check_parameter(what, name, known):
    if name not in known:
        near = _meant(name)
        raise ValueError(
            f"{what} has a parameter {name!r}, and nothing of the data is called so"
            f"{f' (did you mean {near}?)' if near else ''}; expected parameters among "
            f"{', '.join(NAMES)}, or a default value for it."
        )
    if known[name] is None and name not in _MAY_BE_NONE:
        raise ValueError(
            f"{what} asks for {name}, which these data do not have; expected other "
            "data, or another model."
        )


def _check_options(what, options, names, takes_any):
    for name in options:
        if name not in names and not takes_any:
            raise ValueError(
                f"{what} has no parameter {name!r} for {name}={options[name]}; "
                "leave the flag out."
            )

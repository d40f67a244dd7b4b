"""What --model can be, and whether it is there; Keras is not needed to tell.

A program checks its flags before it imports TensorFlow, which takes seconds.
"""

import ast
import difflib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from towers.program.extras import install_command

# The models of this project, which registry.py builds: what an example may be, and the
# flags of towers.train that the model takes.
_TRANSFORMER = ("layers", "width", "heads", "positions", "dropout", "sparsity")
OWN = {
    "cnn": (("image",), ("dropout",)),
    "dlrm": (("columns",), ("width",)),
    "lstm": (("image",), ()),
    "mlp": (("image", "row", "columns"), ()),
    **dict.fromkeys(("resnet20", "resnet32", "resnet56"), (("image",), ())),
    "transformer_encoder": (("tokens",), _TRANSFORMER),
    "transformer_lm": (("tokens",), _TRANSFORMER),
    "unet": (("image",), ("layers", "width")),
}
# All such flags.
OPTIONS = _TRANSFORMER
# How a transformer knows where a token stands.
POSITIONS = ("rotary", "learned")
# The networks of `keras.applications`.
APPLICATIONS = tuple(
    """
    ConvNeXtBase ConvNeXtLarge ConvNeXtSmall ConvNeXtTiny ConvNeXtXLarge
    DenseNet121 DenseNet169 DenseNet201 EfficientNetB0 EfficientNetB1
    EfficientNetB2 EfficientNetB3 EfficientNetB4 EfficientNetB5
    EfficientNetB6 EfficientNetB7 EfficientNetV2B0 EfficientNetV2B1
    EfficientNetV2B2 EfficientNetV2B3 EfficientNetV2L EfficientNetV2M
    EfficientNetV2S InceptionResNetV2 InceptionV3 MobileNet MobileNetV2
    MobileNetV3Large MobileNetV3Small NASNetLarge NASNetMobile ResNet101
    ResNet101V2 ResNet152 ResNet152V2 ResNet50 ResNet50V2 VGG16 VGG19
    Xception
    """.split()
)

_FORMS = (
    f"one of {', '.join(OWN)}, a network of keras.applications such as ResNet50, "
    "a preset of keras-hub as hub:PRESET, or your own as file.py:function"
)
_HUB, _LORA = "hub:", "?lora="


def names() -> tuple[str, ...]:
    """Returns every name `build` knows, this project's own first."""
    return (*OWN, *APPLICATIONS)


def inputs(name: str) -> tuple[str, ...]:
    """Returns what an example may be for a model of `names()`."""
    return OWN[name][0] if name in OWN else ("image",)


def check(name: str, options: Iterable[str] = ()) -> None:
    """Checks a model's name without building it or running the user's file.

    The import of Keras is not needed.

    Args:
        name: As for `registry.build`.
        options: Names of options that are given, which only some models take.

    Raises:
        ValueError: If there is no such model, file or function, or it does not take an
            option.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"A model's name must be text, but {name!r} was received; use {_FORMS}."
        )
    if is_user_file(name):
        _check_user_file(*split_user_file(name), options)
        return
    if is_hub(name):
        _check_hub(name)
    else:
        name = canonical(name)
    taken = OWN[name][1] if name in OWN else ()
    for option in options:
        if option not in taken:
            takes = [each for each, (_, own) in OWN.items() if option in own]
            raise ValueError(
                f"Received {option} in --model_options for --model={name}; expected it "
                f"only for {', '.join(takes)} and models of your own, so leave it out."
            )


def canonical(name: str) -> str:
    """Returns the name as the registry spells it.

    Raises:
        ValueError: If there is no such model.
    """
    known = {each.lower(): each for each in names()}
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=3)
    meant = " or ".join(known[each] for each in near)
    raise ValueError(
        f"There is no model {name!r}{f' (did you mean {meant}?)' if near else ''}; "
        f"use {_FORMS}."
    )


def check_imagenet(name: str) -> None:
    """Checks that there are ImageNet weights for a model.

    Raises:
        ValueError: There are none that it can begin with.
    """
    known = None if is_user_file(name) or is_hub(name) else canonical(name)
    # With these weights, EfficientNetB0 to B7 have another layer than without.
    if known not in APPLICATIONS or known.startswith("EfficientNetB"):
        raise ValueError(
            f"There are no ImageNet weights for the model {name}; expected a network "
            "of keras.applications such as ResNet50 or EfficientNetV2B0."
        )


# hub:PRESET?lora=8


def is_hub(name: str) -> bool:
    """Tells whether a name is of the form hub:PRESET or hub:PRESET?lora=RANK."""
    return name.startswith(_HUB)


def split_hub(name: str) -> tuple[str, int | None]:
    """Takes hub:PRESET?lora=RANK apart.

    Returns:
        The preset's name or folder, and the rank; None without LoRA.

    Raises:
        ValueError: It has no preset, or no rank of at least 1.
    """
    preset, lora, rank = name.removeprefix(_HUB).partition(_LORA)
    if not preset or (lora and not (rank.isdecimal() and int(rank))):
        raise ValueError(
            f"A preset of keras-hub is named hub:PRESET or hub:PRESET?lora=RANK, but "
            f"{name!r} was received; give the name or folder of a preset, and a whole "
            "number of at least 1 as rank, such as hub:gpt2_base_en?lora=8."
        )
    return os.path.expanduser(preset), int(rank) if lora else None


def _check_hub(name):
    preset, _ = split_hub(name)
    if importlib.util.find_spec("keras_hub") is None:
        raise ValueError(
            f"The model {name!r} needs keras-hub, which is not installed; run: "
            f"{install_command('hub')}"
        )
    is_path = os.sep in preset and "://" not in preset
    if is_path and not os.path.isdir(preset):
        raise ValueError(
            f"There is no folder {preset!r} (looked for as "
            f"{os.path.abspath(preset)!r}) for the preset; correct the path."
        )


# file.py:function


def is_user_file(name: str) -> bool:
    """Tells whether a name is of the form file.py or file.py:function."""
    return not is_hub(name) and (name.endswith(".py") or ".py:" in name)


def split_user_file(name: str) -> tuple[Path, str]:
    """Takes file.py:function apart; of file.py, the function is `build`.

    Raises:
        ValueError: If there is no function, or it is no name of one.
    """
    if name.endswith(".py"):
        return Path(name).expanduser(), "build"
    path, _, function = name.rpartition(".py:")
    if not path or not function.isidentifier():
        raise ValueError(
            f"A model of your own is named file.py:function, but {name!r} was "
            "received; add the name of the function, or leave out the colon for build."
        )
    return Path(f"{path}.py").expanduser(), function


def names_in(path: Path) -> set[str]:
    """Returns the names that a file may define, "*" if it imports others by a star.

    Raises:
        ValueError: If there is no such file, or it is not valid Python.
    """
    return {*_top_level(_parse(path).body)}


def _parse(path: Path) -> ast.Module:
    if not path.is_file():
        raise ValueError(
            f"There is no file {str(path)!r} (looked for as {str(path.absolute())!r}) "
            "for the model; correct the path."
        )
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"The file {str(path)!r} is not valid Python ({error}); correct it."
        ) from error


def _check_user_file(path: Path, function: str, options: Iterable[str]) -> None:
    """Finds the function by parsing, since running the file may touch devices."""
    tree = _parse(path)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    known = defined | _other_names(tree)
    # What `import *` brings is known only when the file is run.
    if function not in known and "*" not in known:
        raise no_such_function(path, function, defined)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            _check_takes(path, node, options)


def _check_takes(path, node, options):
    taken = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
    for option in options:
        # What a decorator makes of the function is known only when the file is run.
        if not (option in taken or node.args.kwarg or node.decorator_list):
            raise ValueError(
                f"Received {option} in --model_options, but the function "
                f"{node.name!r} of {str(path)!r} has no parameter "
                f"{option!r}; add it, or leave the flag out."
            )


def _top_level(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements define, also under `if` or `try`, but not in functions."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (each.asname or each.name for each in node.names)
        else:
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from _top_level(getattr(node, field, ()))
            if isinstance(node, ast.Assign | ast.AnnAssign):
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                yield from (n.id for n in stored if isinstance(n.ctx, ast.Store))


def _other_names(tree: ast.Module) -> set[str]:
    """Names that may hold a function without a plain `def` at the top level."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            # Also the nested ones, such as under `if` or `try`. One too many is
            # found out when the file is run.
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def no_such_function(path: Path, function: str, defined: set[str]) -> ValueError:
    """Returns the error that says which functions there are instead."""
    has = f"it defines {', '.join(sorted(defined))}" if defined else "it defines none"
    return ValueError(
        f"There is no function {function!r} in {str(path)!r} ({has}); name a function "
        "that takes (input_shape, num_outputs) and returns a Keras model."
    )

"""The layout: imports point down the floors, and make no circle."""

import ast
import collections
import functools
import graphlib
import re
from pathlib import Path

import pytest

from towers.program.features import FEATURES

ROOT = Path(__file__).parents[1]

# From the ground up: each imports only from floors below. `towers` itself is the roof.
FLOORS = (
    *("keras_adapter", "program", "machine", "hosts"),
    *("processes", "_start"),
    *("input_pipeline", "models"),
    *("devices", "analysis", "layers", "collectives", "tower"),
    "loop",
    *("plan", "partition", "stages", "builders", "numerics", "model"),
    *("lifecycle", "monitoring", "elastic", "callbacks"),
    *("cluster", "sparse"),
    *("doctor", "train", "parity", "find_batch_size", "scaling"),
    *("report", "predict"),
    *("export", "generate", "launch", "queue", "resize"),
    "towers",
)
# These know nothing of towers but what all share, and only programs know them. What
# makes layers sparse knows those layers.
APART = ("input_pipeline", "models")
SHARED = ("program", "machine", "processes", "keras_adapter")
PROGRAMS = FLOORS[FLOORS.index("sparse") :]
# Who reads one of these trusts all that it imports, at any depth: so many files. The
# figures may fall; what makes one rise is better a feature, or below.
CLOSURES = {
    "towers/collectives/reduce.py": 4,
    "towers/collectives/batch.py": 2,
    "towers/collectives/packing.py": 3,
    "towers/builders/steps.py": 45,
    "towers/model/api.py": 70,
    "towers/partition/partitioned.py": 35,
    "towers/train/__main__.py": 145,
}
# These know no feature but by its name; see `towers/program/features.py`.
CORE = (
    *("keras_adapter", "program", "machine", "hosts", "processes", "devices"),
    *("analysis", "layers", "collectives", "tower", "loop", "plan", "partition"),
    *("builders", "model"),
)
BESIDE = ("cluster", "stages", "numerics", "elastic", "sparse", "queue")

INPUT_FLOORS = (
    *("choices", "checked_files", "json_file", "specs", "tokenizer_specs"),
    *("data_flags", "service", "text"),
    *("images", "local_store", "sources", "records", "pipeline", "cache"),
    *("benchmark", "convert", "input_pipeline"),
)


def test_imports_point_down():
    assert not [*_upwards(_imports(), _floor, FLOORS)]


def test_imports_of_the_input_point_down():
    within = [pair for pair in _imports() if {*map(_floor, pair)} == {"input_pipeline"}]
    assert not [*_upwards(within, _input_floor, INPUT_FLOORS)]


def _upwards(pairs, floor, floors):
    for module, target in pairs:
        if floors.index(floor(target)) > floors.index(floor(module)):
            yield module, target


def test_modules_make_no_circle():
    modules = {_name(path).removesuffix(".__init__") for path in _trees()}
    imported = collections.defaultdict(set)
    for module, target in _imports():
        module = module.removesuffix(".__init__")
        # What is no module is a name in one.
        found = target if target in modules else target.rpartition(".")[0]
        if found != module:
            imported[module].add(found)
    graphlib.TopologicalSorter(imported).prepare()


@pytest.mark.parametrize("root", CLOSURES)
def test_what_a_file_imports_at_any_depth(root):
    modules = {_name(path).removesuffix(".__init__"): path for path in _trees()}
    imported = collections.defaultdict(set)
    for module, target in _imports():
        # What is no module is a name in one.
        target = target if target in modules else target.rpartition(".")[0]
        if _floor(target) not in APART:
            imported[module.removesuffix(".__init__")].add(target)
    name = _name(Path(root))
    reached, waiting = {name}, [name]
    while waiting:
        more = imported[waiting.pop()] & modules.keys() - reached
        reached |= more
        waiting += more
    assert len(reached) <= CLOSURES[root], sorted(reached)


def test_the_core_knows_features_by_their_names():
    modules = {_name(path).removesuffix(".__init__") for path in _trees()}
    listed = {f"towers.{name}" for name in FEATURES}
    asked = {target for _, target in _asked()}
    assert asked == listed <= modules
    for module, target in _imports():
        if _floor(module) in CORE and not module.startswith(tuple(listed)):
            assert target.split(".")[1] not in BESIDE, f"{module} imports {target}"
            assert not {target, target.rpartition(".")[0]} & listed, (module, target)


def test_no_class_name_stands_twice():
    names = collections.Counter(
        node.name
        for path, tree in _trees().items()
        if path.parts[0] == "towers"
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]


def test_the_drawing_of_the_house_has_the_floors():
    (drawing,) = _drawings("The house")
    floors, _, _ = drawing.partition("apart ")
    lines = [re.findall(r"(\w+)(?:/|\.py)(?!\S)", line) for line in floors.splitlines()]
    assert [name for line in reversed(lines) for name in line] == [
        name for name in FLOORS if name not in (*APART, "towers")
    ]


def test_walks_follow_the_imports():
    imported = collections.defaultdict(set)
    for module, target in [*_imports(), *_asked()]:
        # What is no module is a name in one.
        imported[module.removesuffix(".__init__")] |= {
            target,
            target.rpartition(".")[0],
        }
    for walk in _drawings("Four walks"):
        names = re.findall(r"^( *)([\w/]+)\.py\b", walk, re.MULTILINE)
        assert len(names) == len(walk.splitlines()) == len({*names})
        above: dict[int, str] = {}
        for indent, name in names:
            assert (ROOT / "towers" / f"{name}.py").is_file(), name
            module, depth = f"towers.{name.replace('/', '.')}", len(indent)
            above = {far: each for far, each in above.items() if far < depth}
            if above:
                caller = above[max(above)]
                # It may be handed what it calls by one that it imports.
                known = imported[caller].union(
                    *(imported[each] for each in {*imported[caller]})
                )
                assert module in known, f"{caller} calls {name}"
            above[depth] = module


def _drawings(heading: str) -> list[str]:
    """The blocks of ARCHITECTURE.md below a heading."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    _, _, section = text.partition(f"\n## {heading}\n")
    section, _, _ = section.partition("\n## ")
    return re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def test_input_and_models_stand_apart():
    for module, target in _imports():
        here, there = _floor(module), _floor(target)
        if here in APART:
            assert there in (*SHARED, here), f"{module} imports {target}"
        if there in APART:
            assert here in (*PROGRAMS, there), f"{module} imports {target}"


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    """The syntax of each file of the project, by its path."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for name in ("towers", "input_pipeline", "models", "scripts")
        # `rglob` does not follow the links in `towers`.
        for path in (ROOT / name).rglob("*.py")
    }


@functools.cache
def _imports() -> list[tuple[str, str]]:
    """Each module of the package, and what it imports of the package, also late."""
    return [
        (_name(path), target)
        for path, tree in _trees().items()
        if path.parts[0] != "scripts"
        for node in ast.walk(tree)
        for target in _targets(node)
    ]


@functools.cache
def _asked() -> list[tuple[str, str]]:
    """Each module of the package, and what it imports by `feature`."""
    return [
        (_name(path), f"towers.{node.args[0].value}")
        for path, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "feature"
    ]


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts if parts[0] == "towers" else ("towers", *parts))


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "relative imports are not read here"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = []
    return [name for name in names if name.split(".")[0] == "towers"]


def _floor(name: str) -> str:
    """The floor of `towers` that a module belongs to."""
    return _part(name, 1, FLOORS)


def _input_floor(name: str) -> str:
    return _part(name, 2, INPUT_FLOORS)


def _part(name: str, place: int, floors: tuple[str, ...]) -> str:
    found = name.split(".")[place : place + 1]
    return found[0] if found and found[0] in floors else floors[-1]

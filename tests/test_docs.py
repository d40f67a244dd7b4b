"""Links, anchors, flags and code in README and docs lead somewhere."""

import ast
import functools
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
from PIL import Image

from scripts import docs_flags
from tests.limits import HANG_S
from towers.__main__ import COMMANDS

ROOT = pathlib.Path(__file__).parents[1]
ALL = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PAGES = [page for page in ALL if page.parent != ROOT or page.stem.startswith("README")]
# Of other programs: docker, pip, tf_cnn_benchmarks.
FOREIGN = {
    *("--no-kill", "--requeue", "--replicas"),
    *("--gpus", "--shm-size", "--tag", "--volume", "--logdir", "--flagfile"),
    *("--help", "--helpfull", "--version", "--verbosity"),
    *("--minutes", "--list", "--parts"),  # of scripts.gpu_truth
    *("--map-by", "--bind-to", "--mpi", "--kill-on-bad-exit"),  # of mpirun and srun
    *("--max-restarts", "--nodes"),  # of torchrun, and sbatch
}
MAKE = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def of(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


def blocks(page, language):
    return [code for kind, code in _FENCE.findall(page.read_text()) if kind == language]


def prose(page):
    return _FENCE.sub("", page.read_text())


@functools.cache
def anchors(page):
    """The anchors that GitHub and mkdocs make of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in plain]
    return {re.sub(r"\s", "-", heading) for heading in plain}


@of(ALL)
def test_links_lead_somewhere(page):
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"


@of(ALL)
def test_files_of_the_source_exist(page):
    folders = "towers|input_pipeline|models|tests|scripts|docs"
    for path in re.findall(rf"(?<![\w/.])(?:{folders})/[\w/]*\.\w+", page.read_text()):
        # NAME stands for what somebody adds.
        assert "NAME" in path or (ROOT / path).is_file(), f"{page.name} names {path}"


def test_every_page_is_in_the_table_of_pages_and_in_the_site():
    readme = (ROOT / "README.md").read_text()
    site = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert f"(docs/{page.name})" in readme
        assert f": {page.name}\n" in site


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_page_of_flags_is_what_the_source_says():
    assert docs_flags.PAGE.read_text() == docs_flags.page(), (
        "Flags have changed: run `python -m scripts.docs_flags`."
    )


@pytest.mark.parametrize("command", ["scaling", "find_batch_size"])
def test_help_shows_flags_whose_heading_is_also_one_of_training(command):
    assert {"--plot", "--json", "--model_dir"} <= docs_flags.flags_of(command)


def test_what_shows_a_promise_exists():
    page = (ROOT / "docs" / "reliability.md").read_text()
    code = [file.read_text() for file in ROOT.glob("tests/**/*.py")]
    for name in re.findall(r"`([Tt]est\w+)`", page):
        assert any(re.search(rf"(def|class) {name}\b", each) for each in code), name
    for name in re.findall(r"`(test_\w+\.py)`", page):
        assert [*ROOT.glob(f"tests/**/{name}")], name
    for module in re.findall(r"`python -m (scripts[\w.]+)`", page):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


# Commands.


def commands(code):
    """Each command line, as words: continued lines joined, comments left out."""
    lines = code.replace("\\\n", " ").splitlines()
    return filter(None, (re.sub(r"\s#.*", "", line).split() for line in lines))


@of(PAGES)
def test_commands_have_the_flags_that_are_shown(page):
    for words in (words for code in blocks(page, "bash") for words in commands(code)):
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert set(targets) <= set(MAKE), words
        if words[0] == "towers":
            command = words[1]
        elif words[:2] == ["python", "-m"] and words[2].startswith("towers."):
            modules = {module: name for name, (module, _) in COMMANDS.items()}
            command = modules[words[2]]
        else:
            continue
        if "--" in words:
            end = words.index("--")
            assert flags_in(words[end + 1 :]) <= docs_flags.flags_of("train"), words
            words = words[:end]
        assert flags_in(words) <= docs_flags.flags_of(command) | FOREIGN, words


def flags_in(words):
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@of([page for page in PAGES if page.name not in ("migrating.md", "flags.md")])
def test_flags_in_the_text_exist(page):
    known = set.union(*map(docs_flags.flags_of, COMMANDS)) | FOREIGN
    in_code = " ".join(re.findall(r"`([^`\n]+)`", prose(page)))
    assert set(re.findall(r"(?<![\w-])--\w[\w-]*", in_code)) <= known


# Code. The blocks of a page are one program, from top to bottom.


@of([page for page in PAGES if blocks(page, "python")])
def test_names_in_code_exist(page):
    if page.name == "ray.md":
        pytest.importorskip("ray")
    found = {}
    for code in blocks(page, "python"):
        nodes = [*ast.walk(ast.parse(code))]
        imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), page.name, "exec"), found)
        for node in nodes:
            if isinstance(node, ast.Attribute):
                resolve(node, found)
            if isinstance(node, ast.Call):
                check_arguments(node, found)


def resolve(node, found):
    """What a name stands for that leads into a module; else `None`."""
    if isinstance(node, ast.Name):
        return found.get(node.id)
    owner = resolve(node.value, found) if isinstance(node, ast.Attribute) else None
    return getattr(owner, node.attr) if inspect.ismodule(owner) else None


def check_arguments(call, found):
    function = resolve(call.func, found)
    if getattr(function, "__module__", "").startswith("towers"):
        names = {keyword.arg: None for keyword in call.keywords}
        inspect.signature(function).bind_partial(*call.args, **names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["input", "keras", "migrating", "parity", "resuming", "watching"]
)
def test_code_runs(name, tmp_path):
    for number in range(20):
        folder = tmp_path / "my_pictures" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (12 * number, 0, 0)).save(folder / f"{number}.png")
    code = "".join(blocks(ROOT / "docs" / f"{name}.md", "python"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def test_a_flag_as_long_as_its_column():
    text = (
        "Devices:\n  --gpu_memory_limit_mb Most memory, in MB.\n  --hosts N  Number.\n"
    )
    found = docs_flags.read(text)["Devices"]
    assert found == {
        "--gpu_memory_limit_mb": "Most memory, in MB.",
        "--hosts N": "Number.",
    }

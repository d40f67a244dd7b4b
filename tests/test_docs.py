"""Links, anchors, flags and code in README and docs lead somewhere."""

import ast
import functools
import inspect
import re

import pytest

from scripts import docs_flags
from tests.documents.blocks import FENCE, ROOT, commands, read
from towers.__main__ import COMMANDS

ALL = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAGES = [page for page in ALL if page.parent != ROOT or page.stem.startswith("README")]
# Of other programs: docker, pip, tf_cnn_benchmarks.
FOREIGN = {
    *("--no-kill", "--requeue", "--replicas"),
    *("--build-arg", "--gpus", "--shm-size", "--tag", "--volume"),
    *("--logdir", "--flagfile"),
    *("--help", "--helpfull", "--version", "--verbosity"),
    *("--minutes", "--list", "--parts"),  # of scripts.gpu_truth
    *("--map-by", "--bind-to", "--mpi", "--kill-on-bad-exit"),  # of mpirun and srun
    *("--max-restarts", "--nodes"),  # of torchrun, and sbatch
}
MAKE = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

# A folder for each thing that a reader wants to do.
GROUPS = {"start", "data", "train", "use", "scale", "trust", "reference"}


def name_of(page):
    """Its path, without docs/: start/install.md."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def of(pages):
    return pytest.mark.parametrize("page", pages, ids=name_of)


def blocks(page, language):
    return [block.code for block in read(page) if block.language == language]


def prose(page):
    return FENCE.sub("", page.read_text())


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
        assert file.exists(), f"{name_of(page)} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}"


@of(ALL)
def test_files_of_the_source_exist(page):
    folders = "towers|input_pipeline|models|tests|scripts|docs"
    for path in re.findall(rf"(?<![\w/.])(?:{folders})/[\w/]*\.\w+", page.read_text()):
        # NAME stands for what somebody adds.
        assert "NAME" in path or (ROOT / path).is_file(), f"{page.name} names {path}"


def test_each_group_of_pages_has_a_folder():
    assert {path.parent for path in ROOT.glob("docs/**/*.md")} == {
        ROOT / "docs" / group for group in GROUPS
    }


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_every_page_is_in_the_table_of_its_group_and_in_the_site(group):
    table = (ROOT / f"docs/{group}/README.md").read_text()
    site = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob(f"docs/{group}/*.md"):
        assert re.search(rf"(: |- ){group}/{page.name}\n", site), page
        if page.name != "README.md":
            assert f"]({page.name})" in table, page


def test_the_readme_leads_to_each_group():
    readme = (ROOT / "README.md").read_text()
    for group in GROUPS:
        assert f"](docs/{group}/" in readme, group


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_page_of_flags_is_what_the_source_says():
    assert docs_flags.PAGE.read_text() == docs_flags.page(), (
        "Flags have changed: run `python -m scripts.docs_flags`."
    )


@pytest.mark.parametrize("command", ["scaling", "find_batch_size"])
def test_help_shows_flags_whose_heading_is_also_one_of_training(command):
    assert {"--plot", "--json", "--model_dir"} <= docs_flags.flags_of(command)


def test_what_shows_a_promise_exists():
    page = (ROOT / "docs/trust/reliability.md").read_text()
    code = [file.read_text() for file in ROOT.glob("tests/**/*.py")]
    for name in re.findall(r"`([Tt]est\w+)`", page):
        assert any(re.search(rf"(def|class) {name}\b", each) for each in code), name
    for name in re.findall(r"`(test_\w+\.py)`", page):
        assert [*ROOT.glob(f"tests/**/{name}")], name
    for module in re.findall(r"`python -m (scripts[\w.]+)`", page):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


# Commands.


def command_of(words):
    """The command of Towers that words start, or `None`; and the words behind it."""
    modules = {module: name for name, (module, _) in COMMANDS.items()}
    for k, word in enumerate(words):
        # Others start it, too: mpirun, torchrun, docker.
        if word == "towers" and (k == 0 or {*words[k + 1 : k + 2]} & COMMANDS.keys()):
            return words[k + 1].replace("-", "_"), words[k + 2 :]
        if word in modules:
            return modules[word], words[k + 1 :]
        ours = word.startswith("towers.") and words[k - 1] == "-m"
        assert not ours, f"there is no module {word}"
    return None, []


@of([*PAGES, ROOT / "BENCHMARKS.md", ROOT / "CONTRIBUTING.md"])
def test_commands_have_the_flags_that_are_shown(page):
    for words in (words for code in blocks(page, "bash") for words in commands(code)):
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert set(targets) <= set(MAKE), words
        command, arguments = command_of(words)
        if command is None:
            continue
        if "--" in arguments:
            end = arguments.index("--")
            known = docs_flags.flags_of("train")
            assert flags_in(arguments[end + 1 :]) <= known, words
            arguments = arguments[:end]
        assert flags_in(arguments) <= docs_flags.flags_of(command) | FOREIGN, words


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
    found = {}
    for block in (block for block in read(page) if block.language == "python"):
        nodes = [*ast.walk(ast.parse(block.code))]
        imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        try:
            exec(compile(ast.Module(imports, []), page.name, "exec"), found)
        except ModuleNotFoundError:
            if not block.no_run and not block.title:
                raise
            continue  # of a package that is to be installed
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


def test_a_flag_as_long_as_its_column():
    text = (
        "Devices:\n  --gpu_memory_limit_mb Most memory, in MB.\n  --hosts N  Number.\n"
    )
    found = docs_flags.read(text)["Devices"]
    assert found == {
        "--gpu_memory_limit_mb": "Most memory, in MB.",
        "--hosts N": "Number.",
    }

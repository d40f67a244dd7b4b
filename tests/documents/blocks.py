"""Reads the fenced blocks of a page into values."""

import ast
import dataclasses
import itertools
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).parents[2]
# Commands are made of these: others only show something.
RUN = ("bash", "python")
# What a fence may name, and what its blocks hold. An old program in `py` is one for
# TensorFlow 1, which does not run with any TensorFlow that Towers supports.
LANGUAGES = {
    "bash": "commands, which run",
    "python": "a part of the page's program, which runs",
    "py": "a program for TensorFlow 1, to compare with",
    "text": "output, or a drawing",
    "diff": "a change of a program",
    "csv": "rows of a file",
    "json": "a file",
    "yaml": "a file",
    "toml": "a file",
    "ini": "a file",
    "html": "a file",
    "mermaid": "a drawing",
}
# Why a block may be left out, and what shows that this is true: an expression that is
# found in such a block.
NO_RUN = {
    "needs docker": r"docker",
    "needs a GPU": r"gpu",
    "needs another machine": r"\bnode\d|\bssh\b|/shared",
    "needs a cluster": r"srun|sbatch|kubectl|[Rr]ay|mpirun|torchrun|hostfile|SLURM",
    "needs a download": r"tfds:|imagenet|hub:|\b(keras_hub|pip|git clone|ray|mlflow)\b"
    r"|https://|--scheduler=asha",
    "needs root": r"\b(ufw|nft|apt|sudo|sysctl|systemctl|mount|tc)\b|/run/|/etc/|sysfs",
    "needs a store": r"s3:|gs:|az:|https?:|hdfs:|bucket",
    "needs a cloud": r"169\.254|metadata|aws|gcloud|az |kubectl",
}
_OLD = r"tf\.(compat\.v1|train|Session|split|variable_scope|contrib)\b"
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`\n]*)\n"
    r"(?P<code>.*?)^ *(?P=ticks)`* *$",
    re.DOTALL | re.MULTILINE,
)
# What looks like a fence to a reader, or to Markdown.
_LIKE_FENCE = re.compile(r"^(?:[ \t>]|[-*+] |\d+[.)] )*(?:`{3,}|~{3,})", re.MULTILINE)
_INFO = re.compile(r'([\w-]+)="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: Path of the page, from the root of the checkout.
        line: Line of the page at which the code begins, from 1.
        language: As the fence says; "" without one.
        code: The code, without the indent of the fence.
        title: Name of the file that the code is to be written to.
        no_run: Why it is left out.
        program: "new" if a further program of the page begins here.
    """

    page: str
    line: int
    language: str
    code: str
    title: str | None = None
    no_run: str | None = None
    program: str | None = None

    @property
    def where(self) -> str:
        """The page and the line."""
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the code is run, and not only shown or written to a file."""
        return self.language in RUN and self.title is None and self.no_run is None


def read(path: pathlib.Path, root: pathlib.Path = ROOT) -> list[Block]:
    """Returns the blocks of a page, in order."""
    return parse(path.read_text(), path.relative_to(root).as_posix())


def parse(text: str, page: str) -> list[Block]:
    """Returns the blocks of a page's text, in order.

    Raises:
        ValueError: A fence has something that is not known here, or is none.
    """
    read_blocks = []
    fences = [*FENCE.finditer(text)]
    for like in _LIKE_FENCE.finditer(text):
        if not any(f.start() <= like.start() < f.end() for f in fences):
            line = text.count("\n", 0, like.start()) + 1
            raise ValueError(
                f"{page}:{line}: {like[0]!r} is no fence that is read here; expected "
                "``` alone, after spaces, and the same at the end of the block"
            )
    for fence in fences:
        line = text.count("\n", 0, fence.start("code")) + 1
        info = fence["info"].strip()
        language = re.match(r"[\w+-]*", info)[0]
        rest = info[len(language) :]
        if unknown := _INFO.sub("", rest).strip():
            raise ValueError(f"{page}:{line}: a fence has {unknown!r}, in {info!r}")
        given = dict(_INFO.findall(rest))
        attributes = {name.replace("-", "_"): value for name, value in given.items()}
        if others := attributes.keys() - {"title", "no_run", "program"}:
            raise ValueError(f"{page}:{line}: a fence has {sorted(others)}")
        indent = fence["indent"]
        code = re.sub(rf"^{indent}", "", fence["code"], flags=re.MULTILINE)
        read_blocks.append(Block(page, line, language, code, **attributes))
    return read_blocks


def faults(block: Block) -> list[str]:
    """Says what is wrong with a block, without running it."""
    said = []
    if block.language not in LANGUAGES:
        said.append(f"has the language {block.language!r}; see LANGUAGES")
    if block.language == "py" and not re.search(_OLD, block.code):
        said.append("is `py`, but no program for TensorFlow 1: `python` runs")
    if block.program not in (None, "new"):
        said.append(f'has program="{block.program}"; expected program="new"')
    if block.no_run is not None:
        said += _faults_of_reason(block)
    if block.language == "python":
        try:
            ast.parse(block.code)
        except SyntaxError as error:
            said.append(f"is no Python: {error}")
    if block.language == "bash" and not block.title and not commands(block.code):
        said.append("has no command")
    if block.language == "bash" and block.runs and "&&" in block.code:
        said.append("has `&&`: bash goes on if what is before it fails; use lines")
    return [f"{block.where}: the block {fault}" for fault in said]


def _faults_of_reason(block):
    if block.language not in RUN:
        yield "says why it is not run, but only shows something"
    elif block.no_run not in NO_RUN:
        yield f'has no-run="{block.no_run}"; expected one of {", ".join(NO_RUN)}'
    elif not re.search(NO_RUN[block.no_run], block.code):
        yield f'has no-run="{block.no_run}", but nothing in it shows this'


def commands(code: str) -> list[list[str]]:
    """Returns the words of each command, without comments.

    Lines that go on are joined, and those of several commands are divided. Words keep
    their `$NAME`: no shell has read them.
    """
    lines = []
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        lexer.commenters = ""
        try:
            words = [*lexer]
        except ValueError:  # a quoted text goes on in the next line
            words = line.split()
        comment = (k for k, word in enumerate(words) if word.startswith("#"))
        words = words[: next(comment, None)]
        for separates, one in itertools.groupby(words, key=_separates):
            if not separates:
                lines.append([*one])
    return lines


def _separates(word):
    return bool(word) and not word.strip("|&;")

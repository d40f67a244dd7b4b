"""Reading the blocks of a page, and shortening its programs."""

import pytest

from tests.documents import blocks, python

_PAGE = """# Title

```python title="my model.py"
x = 1
```

- In a list:

  ```bash no-run="needs a GPU"
  towers train \\
    --num_gpus=2  # both
  ```

````text
```bash
not one
```
````
"""


def test_the_blocks_of_a_page():
    model, command, drawing = blocks.parse(_PAGE, "docs/page.md")
    assert (model.line, model.language, model.code) == (4, "python", "x = 1\n")
    assert (model.title, model.no_run, model.runs) == ("my model.py", None, False)
    assert command.where == "docs/page.md:10"
    assert command.no_run == "needs a GPU" and not command.runs
    assert command.code == "towers train \\\n  --num_gpus=2  # both\n"
    assert drawing.language == "text"
    assert blocks.commands(command.code) == [["towers", "train", "--num_gpus=2"]]


def test_commands_of_lines():
    code = "a 'b c' | d  # e\n\n# f\nG=1 h && i & # j\nk \\\n  l; m $N\n"
    assert blocks.commands(code) == [
        ["a", "b c"],
        ["d"],
        ["G=1", "h"],
        ["i"],
        ["k", "l"],
        ["m", "$N"],
    ]


@pytest.mark.parametrize("info", ['bash norun="x"', "bash no-run", "bash title=x"])
def test_a_fence_that_is_not_understood(info):
    with pytest.raises(ValueError, match=r"page\.md:2: a fence has"):
        blocks.parse(f"```{info}\nls\n```\n", "page.md")


@pytest.mark.parametrize(
    "text",
    [
        "~~~bash\nls\n~~~\n",
        "> ```bash\n> ls\n> ```\n",
        "-\tA list:\n\n\t```bash\n\tls\n\t```\n",
        "1. ```bash\n   ls\n   ```\n",
        "```bash\nls\n",
    ],
)
def test_what_looks_like_a_fence_is_one(text):
    with pytest.raises(ValueError, match=r"page\.md:\d: .* is no fence"):
        blocks.parse(f"Text\n\n{text}", "page.md")


@pytest.mark.parametrize(
    ("info", "code", "said"),
    [
        ("", "ls", "has the language ''"),
        ("sh", "ls", "has the language 'sh'"),
        ("py", "x = 1", "no program for TensorFlow 1"),
        ("bash", "# nothing", "has no command"),
        ("python", "x =", "is no Python"),
        ('python program="old"', "x = 1", 'expected program="new"'),
        ('bash no-run="too long"', "ls", "expected one of needs docker"),
        ('bash no-run="needs docker"', "ls", "nothing in it shows this"),
        ('bash no-run="needs a GPU"', "ls", "nothing in it shows this"),
        ('bash no-run="needs a download"', "ls arrays", "nothing in it shows this"),
        ('bash no-run="needs another machine"', "ls ghost", "nothing in it shows this"),
        ('bash no-run="needs root"', "ls etc x", "nothing in it shows this"),
        ("bash", "cd gone && ls", "has `&&`"),
        ('text no-run="needs a GPU"', "x", "only shows something"),
    ],
)
def test_what_is_wrong_with_a_block(info, code, said):
    (block,) = blocks.parse(f"```{info}\n{code}\n```\n", "page.md")
    (fault,) = blocks.faults(block)
    assert fault.startswith("page.md:2: the block") and said in fault


@pytest.mark.parametrize(
    ("info", "code"),
    [
        ("bash", "ls"),
        ("python", "x = 1"),
        ("text", "anything"),
        ("py", "tf.train.GradientDescentOptimizer(0.1)"),
        ('bash no-run="needs docker"', "docker run towers"),
        ('python title="x.py"', "x = 1"),
    ],
)
def test_nothing_is_wrong(info, code):
    (block,) = blocks.parse(f"```{info}\n{code}\n```\n", "page.md")
    assert blocks.faults(block) == []


def test_epochs_of_fit():
    code = "é = 1; m.fit(x, epochs=100)\nm.fit(\n    epochs=30, y=2\n)\nf(epochs=9)\n"
    short = "é = 1; m.fit(x, epochs=3)\nm.fit(\n    epochs=3, y=2\n)\nf(epochs=9)\n"
    assert python.shorten(code) == short
    few = "m.fit(x, epochs=2)\nm.fit(x, epochs=n)\n"
    assert python.shorten(few) == few

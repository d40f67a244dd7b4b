"""The runner of pages: what fails, fails, and says where."""

import os
import socket
import tempfile
import time

import psutil
import pytest

from tests.documents import blocks, runner
from tests.hosts import free_ports
from tests.limits import HANG_S


def run(folder, text, limit_s=HANG_S):
    page = folder / "page.md"
    page.write_text(text)
    work = folder / "work"
    work.mkdir()
    return runner.run(blocks.read(page, folder), work, limit_s, folder), work


def fails(folder, text, **limit):
    with pytest.raises(runner.PageError) as error:
        run(folder, text, **limit)
    return str(error.value)


def test_blocks_of_a_page_run_in_one_folder(tmp_path):
    text = """
```bash
NAME=two
for number in 1 2; do echo $number >> out; done  # a loop
```

```python title="more/file.py"
print("from a file")
```

```python
import inspect
def f():
    return 3
assert "return 3" in inspect.getsource(f)
```

```bash
echo $NAME >> out
python more/file.py >> out
```

```python
open("out", "a").write(f"{f()} {__name__}\\n")
```

```bash no-run="needs a GPU"
false
```

```python program="new"
assert "f" not in globals()
```
"""
    said, work = run(tmp_path, text)
    assert (work / "out").read_text() == "1\n2\ntwo\nfrom a file\n3 __main__\n"
    assert [line.split()[:2] for line in said] == [
        ["page.md:3", "bash"],
        ["page.md:12", "python"],
        ["page.md:19", "bash"],
        ["page.md:24", "python"],
        ["page.md:32", "python"],
    ]


@pytest.mark.parametrize(
    ("code", "line", "named"),
    [
        ("true\nfalse\ntrue", 5, "exit code 1: false"),
        ("ls \\\n  gone", 5, "ls gone"),  # the last line of it
        ("false | cat", 4, "exit code 1"),
        ("nobody_has_this", 4, "exit code 127"),
        ("true\n$(exit 7)", 5, "exit code 7"),
        ("towers trian", 4, "exit code 1: towers trian"),
        ("pip install -e '.[nothing]'", 4, "exit code 2: pip install"),
    ],
)
def test_a_command_that_fails(tmp_path, code, line, named):
    said = fails(tmp_path, f"# Page\n\n```bash\n{code}\n```\n")
    assert said.startswith(f"page.md:{line}: ") and named in said


def test_what_a_command_has_said_is_shown(tmp_path):
    said = fails(tmp_path, "```bash\necho hello; (echo bad >&2; exit 3)\n```\n")
    assert "\nhello\nbad\n" in said and "\necho hello; (echo bad" in said


def test_python_that_raises(tmp_path):
    text = "```python\nx = 1\n```\n\n```python\ny = x\nx / 0\n```\n"
    said = fails(tmp_path, text)
    assert said.startswith("page.md:7: the python block")
    assert "ZeroDivisionError" in said and "    x / 0" in said


def test_python_that_ends_its_process(tmp_path):
    said = fails(tmp_path, "```python\nimport os\nos._exit(0)\n```\n")
    assert "has ended with exit code 0" in said


def test_what_takes_too_long_is_ended(tmp_path):
    began = time.monotonic()
    said = fails(tmp_path, "```bash\ntrue\nsleep 1000\n```\n", limit_s=1)
    assert "is not done in time" in said
    assert time.monotonic() - began < HANG_S / 2


def test_a_command_in_the_background(tmp_path):
    text = "```bash\n(sleep 0.5; touch late) &\n```\n"
    _, work = run(tmp_path, text)
    assert (work / "late").exists()


def test_a_command_in_the_background_that_fails(tmp_path):
    said = fails(tmp_path, "```bash\n(sleep 0.5; exit 9) &\n```\n")
    assert "in the background" in said and "exit code 9" in said


def test_one_that_has_failed_long_before_the_end(tmp_path):
    block = "```bash\n{}\n```\n"
    codes = "(exit 9) &", "sleep 0.5\nls", "ls"
    said = fails(tmp_path, "".join(map(block.format, codes)))
    assert "in the background" in said and "exit code 9" in said


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nsetsid -f sleep 1000.{}\ntrue\n```\n",
        "```python\nimport subprocess\n"
        "subprocess.Popen(['sleep', '1000.{}'], start_new_session=True)\n```\n",
    ],
)
def test_no_process_is_left(tmp_path, text):
    mark = time.time_ns()
    run(tmp_path, text.format(mark))
    lines = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert ["sleep", f"1000.{mark}"] not in lines


def test_a_process_that_begins_a_program_is_found(tmp_path, monkeypatch):
    class InExec:
        """A process with no environment until it has been asked three times."""

        pid, asked, is_killed = os.getpid(), 0, False

        def environ(self):
            self.asked += 1
            return {runner._SESSION: session._own} if self.asked > 3 else {}

        def cmdline(self):
            return []

        def exe(self):
            return "/usr/bin/sleep"

        def kill(self):
            self.is_killed = True

    process = InExec()
    session = runner.Session(["true"], tmp_path, os.environ)
    monkeypatch.setattr(runner.psutil, "process_iter", lambda: [process])
    monkeypatch.setattr(runner.psutil, "wait_procs", lambda *args, **kwargs: None)
    session.close()
    assert process.is_killed


def test_a_title_stays_in_the_folder(tmp_path):
    said = fails(tmp_path, '```python title="../x.py"\nx = 1\n```\n')
    assert "leads out of the folder" in said


def test_a_server_lives_until_the_end_of_the_page(tmp_path, monkeypatch):
    # A lock of the port, which is another one each time, stays there.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (port,) = free_ports(1)
    text = f"""
```bash
towers service dispatcher --port={port}
```

```python
import os
import socket
socket.create_connection(("localhost", {port})).close()
```
"""
    run(tmp_path, text)
    with pytest.raises(OSError):
        socket.create_connection(("localhost", port))


def test_a_script_must_have_the_flags(tmp_path):
    said = fails(tmp_path, "```bash\npython scripts/race.py --nothing=1\n```\n")
    assert "page.md:2: " in said

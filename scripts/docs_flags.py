"""Writes docs/reference/flags.md: the flags of each command, as its help shows them.

python -m scripts.docs_flags
"""

import functools
import pathlib
import re
import subprocess
import sys

from towers.__main__ import COMMANDS

PAGE = pathlib.Path(__file__).parents[1] / "docs/reference/flags.md"
_TOP = """# Flags

All flags of each command, as `towers COMMAND --helpfull` shows them. `--[no]clean`
means that `--clean` turns it on and `--noclean` turns it off. `make docs` generates
this page.
"""

# The flags below a heading: name and meaning.
Groups = dict[str, dict[str, str]]


@functools.cache
def help_of(command: str) -> str:
    """Returns the whole help of a command, which lasts until its flags are read."""
    module, _ = COMMANDS[command]
    done = subprocess.run(
        [sys.executable, "-m", module, "--helpfull"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def read(text: str) -> Groups:
    """Reads the flags and arguments in the help of a command."""
    groups: Groups = {}
    members, name = None, None
    for line in text.splitlines():
        if heading := re.fullmatch(r"([A-Z]\w.*):", line):
            members = groups.setdefault(heading[1], {})
        # Meanings begin in column 24, a single blank after the longest names.
        elif members is not None and (
            entry := re.match(r"  (\S.*?)(\s{2,}|$|(?<=^.{23}) (?=[A-Z]\w+ ))", line)
        ):
            name = entry[1]
            members[name] = line[entry.end() :].strip()
        elif members is not None and name and line.strip():
            members[name] = f"{members[name]} {line.strip()}".strip()
    return groups


def flags_of(command: str) -> set[str]:
    """Returns the names of a command's flags, such as "--clean" and "--noclean"."""
    names = set()
    for group in read(help_of(command)).values():
        for negated, name in re.findall(r"--(\[no\])?(\w+)", " ".join(group)):
            names |= {f"--{name}", f"--no{name}"} if negated else {f"--{name}"}
    return names


def page() -> str:
    """Returns the page."""
    train = read(help_of("train"))
    lines = [_TOP]
    for command, (_, purpose) in COMMANDS.items():
        lines += [f"## towers {command}", "", purpose, ""]
        groups = read(help_of(command))
        if command != "train" and train.keys() <= groups.keys():
            lines += ["It takes the flags of [`towers train`](#towers-train).", ""]
            groups = _without(groups, train)
        for title, members in groups.items():
            lines += [f"**{title}**", ""]
            # No table: on a narrow screen, long names would leave no room for meanings.
            lines += [f"- `{name}`: {meaning}" for name, meaning in members.items()]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _without(groups: Groups, others: Groups) -> Groups:
    """Leaves out the flags that stand under the same heading in `others`."""
    rest = {
        title: {
            name: meaning
            for name, meaning in members.items()
            if name not in others.get(title, {})
        }
        for title, members in groups.items()
    }
    return {title: members for title, members in rest.items() if members}


if __name__ == "__main__":
    PAGE.write_text(page())

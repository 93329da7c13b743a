"""The README says what is so: its commands are understood, its figures are those in docs/results/."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mtptrain.overrides import check
from mtptrain.run import VERBS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in re.split(r"\n|&&", block)
    if line.strip().startswith("mtptrain")
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_composes(command: list[str]) -> None:
    """Every mtptrain command in the README names a verb and keys that exist."""
    verb, arguments = command[1], [word for word in command[2:] if word not in ("-m", "data")]
    assert verb in VERBS
    check(verb, arguments, sweep="-m" in command)


def test_two_set_up_commands() -> None:
    """One line runs the main job and one line runs the tests, from nothing but Python."""
    lines = [line for line in README.split("\n") if line.startswith("python3 -m venv")]
    assert [line.rpartition("&& ")[2] for line in lines] == ["mtptrain fit", "pytest"]


def test_figures_are_written_by_the_tool() -> None:
    """README.md equals what tools/write_readme.py makes of docs/results/."""
    script = ROOT / "tools" / "write_readme.py"
    assert subprocess.run([sys.executable, str(script), "--check"], cwd=ROOT).returncode == 0

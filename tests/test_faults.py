"""What happens to runs, on a real small one: every drill of tools/fault_drill.py, at the size of a test.

The tool holds the drills (50 kills in its own right); here each kind is one test over its lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "fault_drill.py"
KILLS = 6


@pytest.fixture(scope="module")
def lines() -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(TOOL.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TOOL), f"--kills={KILLS}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "count"),
    [
        ("SIGKILL", KILLS),
        ("disk full", 3),
        ("flipped bit", 4),
        ("cut short", 5),
        ("missing", 2),
        ("of another version", 1),
        ("read-only", 2),
        ("two runs", 3),
    ],
)
def test_a_run_survives(fault: str, count: int, lines: list[str]) -> None:
    """It ends with the bits of a run that was left alone, having said what it could not mend."""
    tried = [line for line in lines if line.startswith(fault)]
    assert len(tried) == count
    assert all(" survived " in line for line in tried), "\n".join(tried)


def test_the_last_line_counts(lines: list[str]) -> None:
    """One JSON object with what was tried, survived and lost."""
    counts = json.loads(lines[-1])
    assert counts == {"tried": KILLS + 20, "survived": KILLS + 20, "lost": 0}

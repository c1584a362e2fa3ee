"""What only asks about a scenario must not load the heavy packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import sys
from usp_viz.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
heavy = {"torch", "gradio", "plotly", "pandas", "networkx"} & set(sys.modules)
sys.exit(f"loaded {sorted(heavy)}" if heavy else code)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["scenarios"], 0),
        (["schema"], 0),
        (["check", "varlen-ring", "--policy", "sglang"], 3),
        (["check", "dense-2x2"], 0),
        (["simulate", "varlen-ring", "--json"], 0),
        (["simulate", "varlen-ring", "--frames"], 0),
    ],
    ids=str,
)
def test_command_loads_no_heavy_package(arguments: list[str], code: int) -> None:
    probe = [sys.executable, "-c", PROBE, *arguments]
    ended = subprocess.run(probe, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr

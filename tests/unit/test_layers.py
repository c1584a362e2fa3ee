"""Who may import the heavy packages and the kernels. The order of the rooms is import-linter's."""

from __future__ import annotations

import ast
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The heavy packages, and the only places whose own code imports them.
HOMES = {
    "torch": (
        "usp_viz/attention",
        "usp_viz/bench",
        "usp_viz/engines",
        "usp_viz/runtime",
        "kernels",
    ),
    "gradio": ("usp_viz/ui", "app.py"),
    "plotly": ("usp_viz/views", "usp_viz/ui"),
    "flash_attn": ("kernels",),
    "triton": ("kernels",),
    "usp_viz.kernels": ("usp_viz/attention", "usp_viz/engines", "usp_viz/runtime", "kernels"),
}


def imported(source: str, package: str) -> set[str]:
    """Every dotted name that an import may load, wherever it stands in a module of this package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return names


def loads(source: str, package: str, wanted: str) -> bool:
    return any(f"{name}.".startswith(f"{wanted}.") for name in imported(source, package))


def modules() -> list[Path]:
    """Every module of the project, relative to its root."""
    found = [
        *(ROOT / "usp_viz").rglob("*.py"),
        *(ROOT / "kernels").rglob("*.py"),
        *ROOT.glob("*.py"),
    ]
    return [path.relative_to(ROOT) for path in found]


@pytest.mark.parametrize("wanted", HOMES)
def test_package_is_imported_only_at_home(wanted: str) -> None:
    strays = [
        str(path)
        for path in modules()
        if not any(path.is_relative_to(home) for home in HOMES[wanted])
        and loads((ROOT / path).read_text("utf-8"), ".".join(path.parent.parts), wanted)
    ]
    assert not strays


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import usp_viz.kernels", True),
        ("import os, usp_viz.kernels.block as block", True),
        ("from usp_viz import kernels", True),
        ("from usp_viz.kernels.block import attend", True),
        ("def f():\n    from ..kernels.block import attend", True),
        ("from .. import kernels", True),
        ("import usp_viz.kernels_of_truth", False),
        ("from .kernels import block", False),
        ("'import usp_viz.kernels'", False),
    ],
)
def test_the_search_sees_every_form_of_import(source: str, found: bool) -> None:
    assert loads(source, "usp_viz.views", "usp_viz.kernels") is found


def test_kernels_never_shadow_the_package_of_that_name() -> None:
    """A folder with __init__.py on the path would win over an installed `kernels`."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "usp_viz" / "kernels").resolve() == ROOT / "kernels"
    assert (ROOT / "usp_viz" / "assets").resolve() == ROOT / "assets"


def test_every_room_is_a_package() -> None:
    """import-linter passes over a folder without __init__.py, so its layer would go unchecked."""
    rooms = {path.parent for path in modules() if path.is_relative_to("usp_viz")}
    assert not [str(room) for room in rooms if not (ROOT / room / "__init__.py").exists()]


def test_kernels_know_nothing_of_the_rooms_above() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        ours = {
            name
            for name in imported(path.read_text("utf-8"), "kernels")
            if f"{name}.".startswith("usp_viz.") and name != "usp_viz"
        }
        strays = {n for n in ours if not n.startswith(("usp_viz.kernels", "usp_viz.errors"))}
        assert not strays, path.name

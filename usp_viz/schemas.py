"""The published JSON Schemas; ``python -m usp_viz.schemas`` writes the checked-in copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from usp_viz.runtime.result_schema import result_schema
from usp_viz.scenario import json_schema
from usp_viz.trace_schema import trace_schema

FOLDER = Path(__file__).parent / "assets" / "schemas"


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each format, by its name."""
    return {"scenario": json_schema(), "trace": trace_schema(), "result": result_schema()}


def files() -> dict[Path, str]:
    """What the checked-in copies should hold."""
    return {
        FOLDER / f"{name}.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for name, schema in schemas().items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, "utf-8")
        print(path)

"""The page's script, from the files in assets/: one text that gr.HTML runs when it is mounted.

Styles travel in it too, as a JSON string: so the page looks the same under `launch`, under
``gradio app.py``, mounted below a path, and as a Space, and no file has to be served.
"""

from __future__ import annotations

import json
from typing import Any

from usp_viz.views.html import asset

STYLES = ("theme.css", "player.css", "verdicts.css", "app.css")
SCRIPTS = ("player.js", "verdicts.js", "app.js")

MOUNT = """
if (!document.getElementById('uspage-style')) {{
  const style = document.createElement('style');
  style.id = 'uspage-style';
  style.textContent = {style};
  document.head.append(style);
}}
USPApp(element, server, {data});
"""


def script(catalog: list[dict[str, Any]]) -> str:
    """All scripts, and the call that starts the page.

    Args:
        catalog: Groups of scenarios to choose from.
    """
    style = "\n".join(map(asset, STYLES))
    start = MOUNT.format(style=_literal(style), data=_literal({"catalog": catalog}))
    return "\n".join([*map(asset, SCRIPTS), start])


def _literal(value: Any) -> str:
    """A JavaScript expression: JSON, in which nothing can end a script or start a template."""
    text = json.dumps(value)
    for mark, code in (("<", "\\u003c"), ("$", "\\u0024"), ("`", "\\u0060")):
        text = text.replace(mark, code)
    return text

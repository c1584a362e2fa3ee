"""A replay as one HTML file: opens from disk, offline, and asks nobody for anything.

Style, script and scene are inlined; the content security policy names the hashes of the two, so the
file can load or run nothing else. The scene is data, never markup: the player sets text only.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files

from usp_viz.views.scene import Scene

PAGE = """\
<!doctype html>
<html lang="en" data-theme="auto">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src '{script_hash}'; style-src '{style_hash}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<p>{description}</p>
</header>
<div id="player"></div>
<noscript>This replay needs JavaScript; the file itself holds everything else.</noscript>
</main>
<script type="application/json" id="scene">{scene}</script>
<script>{script}</script>
</body>
</html>
"""
STYLE = """
html { font-size: clamp(14px, .8vw + 4px, 40px); background: var(--usp-page); }
body { margin: 0; color: var(--usp-ink); background: var(--usp-page);
  font: 1rem/1.5 var(--usp-font); }
main { display: flex; flex-direction: column; min-height: 100vh; box-sizing: border-box;
  gap: .9rem; padding: 1rem 1.7rem; }
h1 { margin: 0; font-size: 1.43rem; line-height: 1.3; letter-spacing: -.015em;
  overflow-wrap: anywhere; }
header p { margin: .1rem 0 0; color: var(--usp-muted); max-width: 90em; overflow-wrap: anywhere; }
header > * { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3;
  overflow: hidden; }
#player { flex: 1; display: flex; flex-direction: column; }
#player > .usp { flex: 1; }
#player .usp-stage { flex: 1 1 auto; height: auto; min-height: 22em; }
@media (max-width: 660px) {
  main { padding: 1rem; }
  header p { -webkit-line-clamp: 2; }
  #player .usp-stage { flex: none; height: 42em; }
}
"""
START = """
window.player = USPPlayer(document.getElementById('player'), {globalKeys: true});
window.player.load(document.getElementById('scene').textContent);
"""


@cache
def asset(name: str) -> str:
    """The text of a file in assets/."""
    return (files("usp_viz") / "assets" / name).read_text("utf-8")


def player_style() -> str:
    """Design tokens and the player's own style."""
    return asset("theme.css") + asset("player.css")


def player_script() -> str:
    """The script that defines `USPPlayer`."""
    return asset("player.js")


def html(scene: Scene) -> str:
    """The stand-alone page of a scene."""
    style, script = player_style() + STYLE, player_script() + START
    return PAGE.format(
        title=escape(scene.data["title"]),
        description=escape(scene.data["description"]),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        scene=scene.to_json_text().replace("<", "\\u003c"),
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

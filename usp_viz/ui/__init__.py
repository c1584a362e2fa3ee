"""The page and the HTTP endpoints behind it: the only home of gradio.

    page ──▶ answers (scenario text in, JSON or cards out) ──▶ runtime, plan, checking
      └────▶ serve (loopback unless asked, behind `door`)

Nothing here imports torch, and nothing that a visitor sends is opened, loaded or shown as HTML.
"""

"""The page and the HTTP endpoints behind it: the only home of gradio.

    page ──▶ look (everything about one scenario) ──▶ legal, writing, url ──▶ plan, checking, views
      ├────▶ paste ──▶ shrink        an error text or a launch command as a scenario
      ├────▶ answers (a scenario in, the contract's JSON out) ──▶ runtime, plan, checking
      ├────▶ desk                    whose run it is, and how it is cancelled
      └────▶ serve (loopback unless asked, behind `door`)

The browser's side is in assets/: `app.js` holds the state, and mounts the player and the verdicts.
Nothing here imports torch, and nothing that a visitor sends is opened, loaded or shown as HTML.
"""

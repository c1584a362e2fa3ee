"""The page as `demo`, for whoever looks for one (a Hugging Face Space, ``gradio app.py``)."""

from __future__ import annotations

import argparse
import sys

import gradio as gr

from usp_viz.errors import MissingRequirement
from usp_viz.ui.page import build

demo = build()

if __name__ == "__main__" and gr.NO_RELOAD:  # `gradio app.py` runs this file again and again
    from usp_viz.ui.serve import serve

    parser = argparse.ArgumentParser(description="Serve the USP Viz page on this machine.")
    parser.add_argument(
        "--port", type=int, help="0 picks a free one (default: the first from 7860)"
    )
    parser.add_argument("--host", help="default: this machine only")
    arguments = parser.parse_args()
    try:
        serve(arguments.port, arguments.host, demo)
    except KeyboardInterrupt:
        sys.exit(130)
    except MissingRequirement as error:
        sys.exit(f"app.py: {error}")

"""The page below a path of another program's server, as behind a proxy."""

from __future__ import annotations

import socket

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware

from usp_viz.ui.door import Door
from usp_viz.ui.page import build

PATH = "/deep/below"

if __name__ == "__main__":
    app = FastAPI(middleware=[Middleware(Door)])
    gr.mount_gradio_app(app, build(), path=PATH, ssr_mode=False, run_history=False)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        print(f"USP Viz: http://127.0.0.1:{bound.getsockname()[1]}{PATH}/", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([bound])

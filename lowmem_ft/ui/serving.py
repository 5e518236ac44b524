"""The server of the page: only for this machine, with headers that let a browser load nothing from elsewhere."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr  # pyright: ignore[reportMissingImports]
from starlette.datastructures import Headers, MutableHeaders  # pyright: ignore[reportMissingImports]
from starlette.middleware import Middleware  # pyright: ignore[reportMissingImports]
from starlette.middleware.trustedhost import TrustedHostMiddleware  # pyright: ignore[reportMissingImports]
from starlette.responses import PlainTextResponse  # pyright: ignore[reportMissingImports]
from starlette.types import ASGIApp, Message, Receive, Scope, Send  # pyright: ignore[reportMissingImports]

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.interrupts import on_interrupt
from lowmem_ft.ui.desk import Desk
from lowmem_ft.ui.kept_files import MOST_DATA_BYTES, KeptFiles
from lowmem_ft.ui.page import make_page

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")
"""Host names that the server answers to; another comes from a foreign page whose name points here (DNS rebinding)."""

CONTENT_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'self'; "
    "form-action 'self'; base-uri 'self'; object-src 'none'"
)
"""Gradio's page has inline scripts and compiles templates; nothing comes from, or goes to, another server."""

_FONTS = ["system-ui", "sans-serif"]
_MONO = ["ui-monospace", "monospace"]
_FROM_ENVIRONMENT = ("GRADIO_SHARE", "GRADIO_ROOT_PATH", "GRADIO_ALLOWED_PATHS", "GRADIO_NUM_WORKERS")


def serve(port: int, on_ready: Callable[[str], object]) -> None:
    """Serve the page until the process is stopped.

    Args:
        port: port of 127.0.0.1; 0: any that is free.
        on_ready: called with the address of the page.

    Raises:
        UserError: if the port is taken.
        KeyboardInterrupt: after a signal.
    """
    desk, kept = Desk(), KeptFiles.of_user()
    desk.start()
    page = make_page(desk, kept)
    try:
        with tempfile.TemporaryDirectory(prefix="uploads-", dir=kept.folder) as uploads:
            launch(page, Path(uploads), port, on_ready)
            with on_interrupt("and the page is closed."):
                while page.is_running:  # Gradio's own wait takes Ctrl-C for a good end
                    time.sleep(0.1)
    finally:
        page.close(verbose=False)
        desk.close()


def launch(page: gr.Blocks, uploads: Path, port: int, on_ready: Callable[[str], object]) -> None:
    """Start the server in a thread of its own.

    Args:
        page: the page.
        uploads: the folder for what a browser sends.
        port: as for :func:`serve`.
        on_ready: likewise.

    Raises:
        UserError: if the port is taken.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    for name in _FROM_ENVIRONMENT:
        os.environ.pop(name, None)
    settings: dict[str, Any] = {"server_port": port} if port else {}
    try:
        _, address, _ = page.launch(
            server_name=HOST,
            share=False,
            inbrowser=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            run_history=False,
            footer_links=[],
            max_file_size=MOST_DATA_BYTES + 1,
            app_kwargs={
                "middleware": _middleware(),
                "docs_url": None,
                "redoc_url": None,
                "openapi_url": None,
            },
            theme=gr.themes.Base(font=_FONTS, font_mono=_MONO),
            head=_head(),  # Gradio's own argument for style sheets loses rules for narrow screens
            **settings,
        )
    except OSError as error:
        raise UserError(
            f"--port must be a free port of this machine, got {port}, which is in use or reserved. Name another, or 0 "
            "for any."
            if port
            else f"The page needs a free port of this machine, and none was found: {error}"
        ) from error
    on_ready(address)


def _head() -> str:
    """Return the page's own style and script."""
    folder = files("lowmem_ft.ui")
    style, script = (folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    return f"<style>{style}</style><script>{script}</script>"


def _middleware() -> list[Middleware]:
    """Return what each request passes: names of this machine, pages of this server, headers of the answer."""
    return [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS)),
        Middleware(_WithoutForeignPages),
        Middleware(_WithHeaders),
    ]


class _WithoutForeignPages:
    """Refuses what a page of another server sends here: a browser lets it send files and forms, unasked."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else {}
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            refusal = PlainTextResponse("The page takes nothing from the pages of other servers.", 403)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _WithHeaders:
    """Adds the content policy to each answer, and has browsers send no referrer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = CONTENT_POLICY
                headers["Referrer-Policy"] = "no-referrer"
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)

"""``lowmem-ft ui``: estimates and plans on a page in the browser of this machine."""

from __future__ import annotations

import os
import webbrowser

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.packages import require_package

PORT, MOST_PORT = 7860, 65535

_EXAMPLES = f"""\
examples:
  lowmem-ft ui
  lowmem-ft ui --port 0 --open

The page is served to this machine alone, on 127.0.0.1, until Ctrl-C. It looks nothing up in the network: models are
those of `lowmem-ft models`, or a config.json that is dropped on the page, which never brings code. The newest dropped
files are kept in ~/.cache/lowmem_ft/ui. The page answers one question at a time, in a process of its own. From another
machine: ssh -L {PORT}:127.0.0.1:{PORT} HOST.

Needs the extra ui: pip install 'lowmem-ft[ui]'."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Serve the page until the user stops it.

    Args:
        arguments: options.

    Returns:
        The exit code, 0 if something other than a signal closed the page.
    """
    options, others = _parser().parse_options(arguments)
    if others:
        raise UserError(f"`lowmem-ft ui` takes no settings, got {' '.join(others)}. Set them on the page.")
    port = PORT if options.port is None else options.port
    if not 0 <= port <= MOST_PORT:
        raise UserError(
            f"--port must be a number from 0 to {MOST_PORT}, got {port}. Leave it out for {PORT}."
        )
    require_package("lowmem-ft ui", "gradio", "ui")
    # Set before the libraries read them: the page asks no hub, and sends no telemetry.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", GRADIO_ANALYTICS_ENABLED="False")
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"  # a proxy is another machine
    with progress_line("loading torch and gradio"):
        from lowmem_ft.cli.console.output import Output
        from lowmem_ft.ui.serving import serve

    def tell(address: str) -> None:
        Output().add(f"The page is at {address} on this machine. Ctrl-C ends it.")
        if options.open:
            webbrowser.open(address)

    serve(port, tell)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft ui",
        description="Estimates and plans on a page in the browser: what a run needs, on which GPUs, and what would "
        "change that.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_once({"--port N": f"port of the page (default: {PORT}; 0: any that is free)"}, type=int)
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    return parser

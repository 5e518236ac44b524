"""``lowmem-ft measure-host``: how fast this machine's host issues work to its GPU."""

from __future__ import annotations

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser

_DESCRIPTION = """\
Measure for five seconds how long this machine's host takes for an operator of torch, a further kernel and a launch by
Triton. What is measured with an NVIDIA GPU is kept, and estimates, plans and pre-flights for that GPU on this machine
take it in place of a usual host; other GPUs keep the usual one. Other programs should be idle meanwhile."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Measure, print what was found, and keep it if this machine has an NVIDIA GPU.

    Args:
        arguments: ``--json``.

    Returns:
        The exit code, 0.
    """
    parser = Parser(prog="lowmem-ft measure-host", description=_DESCRIPTION)
    parser.add_json()
    options = parser.parse_args(arguments)

    from lowmem_ft.cli.answers.measure_host import print_host

    return print_host(options)

"""Where the `infinity` command begins: until everything is loaded Ctrl-C ends it at once, without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line and exit with its code. A SIGINT that the caller has ignored or handles stays as it is."""
    at_start = signal.getsignal(signal.SIGINT)
    if at_start is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing has begun that would have to be undone
    from infinity.cli.main import main as run

    signal.signal(signal.SIGINT, at_start)
    run()

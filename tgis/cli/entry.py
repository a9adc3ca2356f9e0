"""Entry points of the installed commands. Ctrl-C ends them without a traceback while they import."""

import signal


def main() -> None:
    _run("main")


def launcher_main() -> None:
    _run("launcher_main")


def router_main() -> None:
    _run("router_main")


def server_main() -> None:
    _run("server_main")


def _run(name: str) -> None:
    """Run a command of `tgis.cli.main`. During its import, SIGINT ends the process as it ends other programs,
    unless SIGINT is ignored, as in background jobs of scripts."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tgis.cli import main

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    getattr(main, name)()

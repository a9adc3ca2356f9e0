"""Settings of all tests."""

import signal


def pytest_configure() -> None:
    # A run in the background of a shell ignores SIGINT, and the processes that tests start would too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

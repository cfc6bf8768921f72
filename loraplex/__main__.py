"""The `loraplex` command, as a script and by `python -m loraplex`."""

import os
import signal


def main() -> None:
    """Runs the command. Ctrl-C while its modules are imported ends it at once: nothing has begun,
    and an exception could be lost in the import.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # not where a shell has Ctrl-C ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from loraplex.launcher.__main__ import main as command

    signal.signal(signal.SIGINT, usual)
    command()


if __name__ == "__main__":
    main()

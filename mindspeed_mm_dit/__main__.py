"""``mm-dit COMMAND``, and ``python -m mindspeed_mm_dit COMMAND``."""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C during the imports below

from mindspeed_mm_dit.framework.exits import raise_outside_imports


def main() -> int:
    """Run one command, as ``cli.main.main`` does; Ctrl-C prints one line instead of a traceback."""
    raise_outside_imports()
    from mindspeed_mm_dit.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())

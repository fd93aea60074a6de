"""``mm-dit COMMAND``, and ``python -m mindspeed_mm_dit COMMAND``."""

import sys

from mindspeed_mm_dit.framework.ending import raise_outside_imports


def main() -> int:
    """Run one command, as ``cli.main.main`` does; from its first lines on Ctrl-C ends in a line."""
    raise_outside_imports()
    from mindspeed_mm_dit.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())

"""torchrun, without a traceback of its own where a rank has said what is wrong: the same arguments."""

from __future__ import annotations

import sys

USER_ERROR = 2
"""Exit code of a rank that named a mistake of the user's and ended."""
INTERRUPTED = 130
"""Exit code after Ctrl-C; after another signal it is 128 and its number too."""


def main() -> int:
    """Start the processes and wait for them."""
    try:
        return _launch()
    except KeyboardInterrupt:  # no rank has been started
        print("interrupted", file=sys.__stderr__)
        return INTERRUPTED


def _launch() -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(sys.argv[1:]))
    except SignalException as error:  # passed on to the ranks, which have ended by now
        return 128 + error.sigval
    except ChildFailedError as error:
        if any(failure.exitcode == USER_ERROR for failure in error.failures.values()):
            return USER_ERROR
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""torchrun, without a traceback of its own where a rank has said what is wrong: the same arguments."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

USER_ERROR = 2
"""Exit code of a rank that named a mistake of the user's and ended."""


def main() -> int:
    """Start the processes and wait for them."""
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        if any(failure.exitcode == USER_ERROR for failure in error.failures.values()):
            return USER_ERROR
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How a run ends before its last step: the signals that ask for it, and its exit codes."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a run to stop: from outside, Ctrl-C, a closed shell, Ctrl-\\. If several arrive, the first in this
order gives the exit code."""

USER_ERROR = 2
"""Exit code of a run, or of one of its processes, that has reported what was wrong."""

SAID = (USER_ERROR, *(128 + number for number in SIGNALS))
"""Exit codes of processes that have reported why they end; a launcher adds nothing."""

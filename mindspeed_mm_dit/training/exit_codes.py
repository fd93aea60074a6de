"""How a run ends before its last step: the signals that ask for it, and what the shell is told."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What asks politely: an order from outside, Ctrl-C, a shell that is closed, its Ctrl-\\. The first gives the
code."""

USER_ERROR = 2
"""A run, or a process of it, that has named what was wrong."""

SAID = (USER_ERROR, *(128 + number for number in SIGNALS))
"""Codes of processes that have said why they end; a launcher adds nothing."""

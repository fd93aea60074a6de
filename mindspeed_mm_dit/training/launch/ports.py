"""TCP ports of this machine."""

from __future__ import annotations

import socket

from mindspeed_mm_dit.errors import ConfigError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(address: str, port: int, cure: str) -> None:
    """Raise ConfigError where nobody could listen on ``port`` of ``address`` ("" for all of this machine's)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was used until just now is free
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            raise ConfigError(f"MASTER_PORT = {port}", f"cannot be listened on: {error.strerror}", cure) from None

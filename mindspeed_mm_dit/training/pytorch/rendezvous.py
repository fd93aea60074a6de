"""Where the processes of one machine meet under torchrun: a store that other machines cannot reach."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

STORE_SECONDS = 60


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of torchrun's agent alone, with a store on the loopback address (torchrun's own listens on all).

    endpoint: "127.0.0.1:PORT".
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        address, port = parameters.endpoint.split(":")
        self._info = RendezvousStoreInfo(address, int(port))
        self._listening = socket.create_server((address, int(port)), backlog=1024)
        # In PyTorch 2.7, libuv does not accept a socket that already listens.
        self._store = TCPStore(
            address,
            int(port),
            1,
            True,
            timedelta(seconds=STORE_SECONDS),
            multi_tenant=True,
            master_listen_fd=self._listening.detach(),
            use_libuv=False,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, self._info)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no other agents to notify."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

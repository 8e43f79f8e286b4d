"""A process group of replicas: collectives over torch's gloo backend.

Groups are torch's `ProcessGroupGloo` objects, created and dropped directly. `init_process_group` would create
the same object but keep it in process-wide state, and a replica changes its group many times in its life.
"""

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store


class GroupBroken(Exception):
    """A peer died, did not come, or did not answer in time; the text says which."""


class Group:
    """Replicas that train together. A group of one rank sends nothing."""

    def __init__(self, rank: int, size: int, backend: ProcessGroupGloo | None) -> None:
        self.rank, self.size, self._backend = rank, size, backend

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all ranks, in place. Raises GroupBroken."""
        self._run(lambda backend: backend.allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill `tensor` with that of rank `root`. Raises GroupBroken."""
        self._run(lambda backend: backend.broadcast(tensor, root))

    def _run(self, start: Callable[[Any], Any]) -> None:
        if self._backend is None:
            if self.size > 1:
                raise GroupBroken("the group has been left")
            return
        try:
            start(self._backend).wait()
        except RuntimeError as error:
            raise GroupBroken(first_sentence(error)) from error

    def leave(self) -> None:
        """Close the connections, in the background: gloo takes 10 to 30 ms for that."""
        backend, self._backend = [self._backend], None
        if backend[0] is not None:
            threading.Thread(target=backend.clear, daemon=True).start()


def single_member_group() -> Group:
    """The group of a process that trains or evaluates alone."""
    return Group(0, 1, None)


def connect_group(
    store: Store, rank: int, size: int, store_host: str, store_port: int, timeout_s: float
) -> Group:
    """Connect `size` ranks that all call this with the same `store`. Raises RuntimeError or OSError.

    Gloo listens on the network interface from which this machine reaches the store: by default it would look
    up the machine's own name, which may belong to another interface or to none.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _interface_towards(store_host, store_port)
    return Group(rank, size, ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s)))


def _interface_towards(host: str, port: int) -> str:
    """Name of the network interface from which `host` is reached; sends nothing. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        local = str(probe.getsockname()[0])
    for interface, addresses in psutil.net_if_addrs().items():
        if any(known.address.split("%")[0] == local for known in addresses):
            return str(interface)
    raise OSError(f"no network interface has the address {local}, from which {host} is reached")


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error raised by torch, without the position in torch's source."""
    text = str(error).split("\n", 1)[0]
    if text.startswith("[/"):
        text = text.split("] ", 1)[-1]
    return text.split(". ", 1)[0][:200]

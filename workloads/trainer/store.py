"""A node's TCPStore, where the members of process groups meet. It runs in a process of its own and outlives
every job."""

import contextlib
import ctypes
import socket
from multiprocessing.connection import Connection

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not marked as exported


def run_store(connection: Connection, host: str) -> None:
    """Body of the process: serve a store on `host` until the other end of the pipe closes.

    The system chooses the port; it is sent on `connection` as a msgpack integer.
    """
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # We bind the socket ourselves because the store would listen on every address of the machine.
    listener.bind((host, 0))
    listener.listen(socket.SOMAXCONN)
    address, port = listener.getsockname()[:2]
    _disable_name_lookups()
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(msgspec.msgpack.encode(store.port))
        while True:
            connection.recv_bytes()


def _disable_name_lookups() -> None:
    """From now on this process reads host names from /etc/hosts only.

    torch looks up the name of every address that connects, only for its log, and answers no other client
    meanwhile: for 5 s if the name server does not answer.
    """
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")

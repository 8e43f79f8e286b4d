"""A node's TCPStore, where process groups meet, in a process of its own that outlives every job."""

import contextlib
import ctypes
import socket
from multiprocessing.connection import Connection

import msgspec
from torch._C._distributed_c10d import TCPStore


def run_store(connection: Connection, host: str) -> None:
    """Serve a store on `host`, on a port that the system chooses and that is sent as a msgpack integer; end
    when the other end of the pipe closes."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Bound here, since the store itself would listen on every address of the machine.
    listener.bind((host, 0))
    listener.listen(socket.SOMAXCONN)
    address, port = listener.getsockname()[:2]
    _look_up_no_names()
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


def _look_up_no_names() -> None:
    """torch looks up the name of every address that connects, for its log alone, and answers nobody
    meanwhile: 5 s where the name server does not answer. From here on this process knows /etc/hosts only."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")

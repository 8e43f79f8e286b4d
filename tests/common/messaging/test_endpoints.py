"""Which endpoints only this machine can reach, and which ipc paths are in use."""

import socket

import pytest

from common.messaging.endpoints import ipc_in_use, is_loopback


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:7801", "tcp://127.9.8.7:*", "tcp://localhost:1", "tcp://[::1]:7801", "ipc:///tmp/x"],
)
def test_loopback(endpoint):
    assert is_loopback(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:7801",
        "tcp://*:7801",
        "tcp://10.0.0.1:7801",
        "tcp://[::]:7801",
        "tcp://eth0:7801",
        "tcp://localhost.example.org:7801",
        "tcp://127.0.0.1.example.org:7801",
        "udp://127.0.0.1:7801",
        "127.0.0.1:7801",
        "",
    ],
)
def test_not_loopback(endpoint):
    assert not is_loopback(endpoint)


def test_an_ipc_path_is_in_use_while_a_process_listens(tmp_path):
    path = tmp_path / "socket"
    assert not ipc_in_use(f"ipc://{path}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert ipc_in_use(f"ipc://{path}")
    assert path.exists()
    assert not ipc_in_use(f"ipc://{path}")

"""What can be told of a ZeroMQ endpoint without ZeroMQ."""

import socket
from ipaddress import ip_address

from common.lifecycle import EndpointError


def check_bindable(endpoint: str, *, with_keys: bool) -> None:
    """Raises EndpointError for an address that others can reach, where no keys protect it, and for an ipc
    path in use: libzmq would take it away from the process that listens there."""
    if not with_keys and not is_loopback(endpoint):
        raise EndpointError(
            endpoint,
            "not a loopback address (tcp://127.0.0.1:PORT, ipc://PATH), so it may only be bound with "
            "CURVE keys: set endpoints.keys_dir",
        )
    if ipc_in_use(endpoint):
        raise EndpointError(endpoint, EndpointError.TAKEN)


def is_loopback(endpoint: str) -> bool:
    """Whether only processes of this machine can reach what is bound here."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return scheme == "tcp" and (host == "localhost" or ip_address(host).is_loopback)
    except ValueError:
        return False


def ipc_in_use(endpoint: str) -> bool:
    """Whether a process listens at an ipc path."""
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(endpoint.removeprefix("ipc://")) == 0

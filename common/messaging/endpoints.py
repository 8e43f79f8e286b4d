"""Checks of a ZeroMQ endpoint that need no ZeroMQ."""

import socket
from ipaddress import ip_address

from common.lifecycle import EndpointError


def check_bindable(endpoint: str, *, with_keys: bool) -> None:
    """Raises EndpointError for an address that other machines can reach without keys, and for an ipc path in
    use, which libzmq would take away from the process that listens there."""
    if not with_keys and not is_loopback(endpoint):
        raise EndpointError(
            endpoint,
            "not a loopback address (tcp://127.0.0.1:PORT, ipc://PATH), so it may only be bound with "
            "CURVE keys: set endpoints.keys_dir",
        )
    if ipc_in_use(endpoint):
        raise EndpointError(endpoint, EndpointError.TAKEN)


def is_loopback(endpoint: str) -> bool:
    """Whether only processes on this machine can reach the endpoint."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return scheme == "tcp" and (host == "localhost" or ip_address(host).is_loopback)
    except ValueError:
        return False


def ipc_in_use(endpoint: str) -> bool:
    """Whether the endpoint is an ipc path at which a process listens."""
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(endpoint.removeprefix("ipc://")) == 0

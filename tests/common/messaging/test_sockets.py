"""Which endpoints can be bound and connected to."""

import pytest

from common.lifecycle import EndpointError
from common.messaging.request_reply import ReplyServer
from common.protocol import Done, GetJobs
from tests.fixtures.messaging_servers import client_of, serving


class TestEndpoints:
    def test_a_taken_port_is_an_error_that_says_so(self, reactor, recorder):
        with serving(recorder) as server, pytest.raises(EndpointError) as caught:
            ReplyServer(reactor, server.endpoint, recorder)
        assert str(caught.value) == f"{server.endpoint}: already taken: is another stack running?"

    def test_a_taken_ipc_path_is_not_stolen(self, reactor, recorder, tmp_path):
        endpoint = f"ipc://{tmp_path}/socket"
        with serving(recorder, endpoint), pytest.raises(EndpointError, match="already taken"):
            ReplyServer(reactor, endpoint, recorder)

    def test_ipc_carries_requests_and_a_path_without_listener_is_free(self, recorder, tmp_path):
        endpoint = f"ipc://{tmp_path}/socket"
        for _ in range(2):
            with serving(recorder, endpoint), client_of(endpoint) as client:
                assert client.request(GetJobs()) == Done()

    @pytest.mark.parametrize("endpoint", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:*", "inproc://x"])
    def test_an_address_that_others_can_reach_is_refused_without_keys(self, reactor, endpoint):
        with pytest.raises(
            EndpointError, match=r"not a loopback address .* CURVE keys: set endpoints.keys_dir"
        ):
            ReplyServer(reactor, endpoint, lambda request: Done())

    @pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:http", "tcp://127.0.0.1:x:1"])
    def test_binding_an_invalid_endpoint_is_an_error_for_people(self, reactor, endpoint):
        with pytest.raises(EndpointError, match=r"cannot be bound|not a loopback"):
            ReplyServer(reactor, endpoint, lambda request: Done())

    @pytest.mark.parametrize("endpoint", ["", "tcp://", "127.0.0.1:7801", "tcp://127.0.0.1"])
    def test_connecting_to_an_invalid_endpoint_is_an_error_for_people(self, endpoint):
        with client_of(endpoint) as client, pytest.raises(EndpointError, match=r"cannot be connected to"):
            client.request(GetJobs())

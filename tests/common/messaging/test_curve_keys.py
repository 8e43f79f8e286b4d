"""CURVE keys: the files, and what they protect."""

import pytest

from common.lifecycle import EndpointError, UserError
from common.messaging.curve_keys import load_keys, make_keys
from common.messaging.request_reply import ReplyServer, RequestClient, ServerUnavailable
from common.protocol import CancelJob, Done, GetJobs
from tests.fixtures.messaging_servers import ANY_PORT, client_of, serving


class TestKeys:
    @pytest.fixture
    def folders(self, tmp_path):
        """Keys of a stack, and those of a stranger who knows the server's public key."""
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        make_keys(ours)
        make_keys(theirs)
        (theirs / "server.key").write_bytes((ours / "server.key").read_bytes())
        return ours, theirs

    def test_a_client_with_a_known_key_is_served_beyond_loopback(self, folders, recorder):
        keys = load_keys(str(folders[0]))
        with serving(recorder, "tcp://0.0.0.0:*", keys) as server:
            client = RequestClient(server.endpoint.replace("0.0.0.0", "127.0.0.1"), keys)
            assert client.request(GetJobs()) == Done()
            client.close()

    def test_an_unknown_key_is_refused_and_logged(self, folders, recorder, capfd):
        ours, theirs = (load_keys(str(folder)) for folder in folders)
        with serving(recorder, keys=ours) as server, client_of(server.endpoint, keys=theirs) as client:
            with pytest.raises(ServerUnavailable):
                client.request(GetJobs(), timeout_s=0.5, attempts=2)
            with client_of(server.endpoint, keys=ours) as known:
                assert known.request(CancelJob(job_id="a")) == Done()
        assert recorder.requests == [CancelJob(job_id="a")]
        assert capfd.readouterr().err.count("refused an unknown key address=127.0.0.1") == 1

    def test_a_client_without_a_key_is_not_served(self, folders, recorder):
        keys = load_keys(str(folders[0]))
        unanswered = pytest.raises(ServerUnavailable)
        with serving(recorder, keys=keys) as server, client_of(server.endpoint) as client, unanswered:
            client.request(GetJobs(), timeout_s=0.3, attempts=1)
        assert recorder.requests == []

    def test_a_client_does_not_talk_to_a_server_with_another_key(self, folders, recorder):
        ours, theirs = folders
        (theirs / "server.key").unlink()
        (theirs / "server.key_secret").unlink()
        make_keys(theirs)
        ours, theirs = load_keys(str(ours)), load_keys(str(theirs))
        unanswered = pytest.raises(ServerUnavailable)
        with (
            serving(recorder, keys=ours) as server,
            client_of(server.endpoint, keys=theirs) as client,
            unanswered,
        ):
            client.request(GetJobs(), timeout_s=0.3, attempts=1)
        assert recorder.requests == []

    def test_an_agent_needs_no_secret_of_the_server(self, folders, recorder, reactor):
        (folders[0] / "server.key_secret").unlink()
        keys = load_keys(str(folders[0]))
        with pytest.raises(EndpointError, match=r"binding needs server\.key_secret"):
            ReplyServer(reactor, ANY_PORT, recorder, keys)

    def test_secrets_are_readable_by_their_owner_alone_and_never_made_twice(self, tmp_path):
        made = make_keys(tmp_path, ["one", "two"])
        assert sorted(p.name for p in made) == [
            f"{name}.{kind}" for name in ("one", "server", "two") for kind in ("key", "key_secret")
        ]
        assert {p.stat().st_mode & 0o777 for p in made if p.suffix == ".key_secret"} == {0o600}
        before = [p.read_bytes() for p in made]
        assert make_keys(tmp_path, ["one"]) == []
        assert [p.read_bytes() for p in made] == before

    def test_without_a_folder_there_are_no_keys(self):
        assert load_keys("") is None

    @pytest.mark.parametrize("missing", ["server.key", "client.key_secret"])
    def test_a_missing_key_is_named(self, folders, missing):
        (folders[0] / missing).unlink()
        with pytest.raises(
            UserError, match=r"endpoints\.keys_dir.*(server\.key cannot be read|needs a NAME\.key_secret)"
        ):
            load_keys(str(folders[0]))

    def test_a_file_without_a_key_is_an_error_for_people(self, folders):
        (folders[0] / "server.key").write_text("rubbish")
        with pytest.raises(UserError, match=r"server\.key holds no key"):
            load_keys(str(folders[0]))

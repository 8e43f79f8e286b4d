"""CURVE keys as files: NAME.key holds a public key and NAME.key_secret its secret, each as 40 characters of
Z85.

The pair "server" belongs to the processes that bind. They need server.key_secret, one more secret to connect
with, and the NAME.key of every client. All other processes need server.key and one secret of their own.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from common.lifecycle import UserError

SERVER = "server"
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class Keys(NamedTuple):
    """The keys of one process, as Z85 text."""

    server_public: bytes
    server_secret: bytes | None
    """None: this process may only connect."""
    own_public: bytes
    own_secret: bytes
    allowed: frozenset[bytes]
    """Public keys of the clients that may connect."""


def load_keys(folder: str) -> Keys | None:
    """Read the keys from `endpoints.keys_dir`; None if that is empty. Raises UserError naming what is
    missing."""
    if not folder:
        return None
    names = sorted(path.stem for path in Path(folder).glob("*.key_secret") if path.stem != SERVER)
    if not names:
        raise UserError(f"endpoints.keys_dir = {folder}: it needs a NAME.key_secret to connect with")
    server_secret = Path(folder) / f"{SERVER}.key_secret"
    return Keys(
        server_public=_read(Path(folder) / f"{SERVER}.key"),
        server_secret=_read(server_secret) if server_secret.exists() else None,
        own_public=_read(Path(folder) / f"{names[0]}.key"),
        own_secret=_read(Path(folder) / f"{names[0]}.key_secret"),
        allowed=frozenset(_read(path) for path in Path(folder).glob("*.key") if path.stem != SERVER),
    )


def make_keys(folder: Path, names: Sequence[str] = ("client",)) -> list[Path]:
    """Create the pair "server" and one pair for each name. Returns the files written; existing keys are
    kept."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    written = []
    for name in (SERVER, *names):
        public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
        if not public.exists():
            public_key, secret_key = zmq.curve_keypair()
            with open(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secret_key)
            public.write_bytes(public_key)
            written += [public, secret]
    return written


def _read(path: Path) -> bytes:
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"endpoints.keys_dir: {path} cannot be read: {error}") from error
    if not _KEY.fullmatch(key):
        raise UserError(f"endpoints.keys_dir: {path} holds no key; allowed: 40 characters of Z85")
    return key.encode()

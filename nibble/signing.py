"""Ed25519 signatures over JSON, so that a certificate that was edited is seen, and one by a stranger too.

The private key is made at first use, readable by its owner alone, at `NIBBLE_SIGNING_KEY` or in the user's
configuration folder. A document carries the public key; whose key that is, its fingerprint says: this machine's own
key is trusted, and so are the fingerprints in `NIBBLE_TRUSTED_KEYS` (separated by commas), for engines certified
elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from nibble.errors import NibbleError
from nibble.strict_yaml import StrictModel


class Signature(StrictModel):
    """A signature and the key that checks it, in hex. fingerprint: the first 16 hex digits of the key's SHA-256."""

    algorithm: str
    public_key: str
    fingerprint: str
    value: str


def signing_key_path() -> Path:
    """Where this user's private key lies."""
    configured = os.environ.get("NIBBLE_SIGNING_KEY")
    return Path(configured) if configured else Path.home() / ".config" / "nibble" / "signing_key.pem"


def sign(content: dict[str, Any]) -> Signature:
    """Sign JSON content with this user's key, which is made when there is none. NibbleError for a bad key file."""
    key = _read_key(signing_key_path()) or _make_key(signing_key_path())
    public = key.public_key().public_bytes_raw()
    return Signature(
        algorithm="ed25519",
        public_key=public.hex(),
        fingerprint=fingerprint(public),
        value=key.sign(canonical_bytes(content)).hex(),
    )


def is_valid(content: dict[str, Any], signature: Signature) -> bool:
    """True when the signature is of exactly this content and the fingerprint is that of its key."""
    try:
        public = bytes.fromhex(signature.public_key)
        key = Ed25519PublicKey.from_public_bytes(public)
        key.verify(bytes.fromhex(signature.value), canonical_bytes(content))
    except (InvalidSignature, ValueError):
        return False
    return signature.algorithm == "ed25519" and signature.fingerprint == fingerprint(public)


def is_trusted(signature: Signature) -> bool:
    """True for this user's own key and for those that NIBBLE_TRUSTED_KEYS names."""
    named = {part.strip() for part in os.environ.get("NIBBLE_TRUSTED_KEYS", "").split(",")} - {""}
    own = _read_key(signing_key_path())
    if own is not None:
        named.add(fingerprint(own.public_key().public_bytes_raw()))
    return signature.fingerprint in named


def fingerprint(public_key: bytes) -> str:
    """Short name of a public key (raw bytes)."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def canonical_bytes(content: dict[str, Any]) -> bytes:
    """JSON with sorted keys and no spaces: the same content gives the same bytes."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _read_key(path: Path) -> Ed25519PrivateKey | None:
    if not path.is_file():
        return None
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise NibbleError(
            f"{path}: can't be read as a private key ({error}); remove it or set NIBBLE_SIGNING_KEY"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise NibbleError(
            f"{path}: got another kind of key, allowed ed25519; set NIBBLE_SIGNING_KEY to one, or to a new path"
        )
    return key


def _make_key(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(pem)
    except FileExistsError:  # another process was faster
        found = _read_key(path)
        assert found is not None
        return found
    except OSError as error:
        raise NibbleError(f"signing key: can't write {path} ({error.strerror}); set NIBBLE_SIGNING_KEY") from error
    return key

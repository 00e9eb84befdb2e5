"""Who may ask, and how much: API keys, requests a minute, requests at once.

    keys.yaml:   keys:
                   - name: alice
                     sha256: <python -m serve.front.keys alice prints one>
                     requests_per_minute: 60
                     concurrent: 4
                     max_priority: 0

A key is kept as its hash. Without a key file everybody is the same caller, `anonymous`, under the limits of the command
line. A limit left out is none.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field

from nibble.errors import NibbleError
from nibble.stage import run_stage
from nibble.strict_yaml import StrictModel, read_mapping, validate
from serve.front.errors import OpenAIError

PREFIX = "nibble-"


class Limits(StrictModel):
    """What one caller may do. None is no limit."""

    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    concurrent: Annotated[int, Field(ge=1)] | None = None
    max_priority: int = 0


class Key(Limits):
    """One key of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class KeyFile(StrictModel):
    """keys.yaml."""

    keys: Annotated[list[Key], Field(min_length=1)]


class Caller:
    """A caller's limits and what it is doing now. Times come from the monotonic clock."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self._running = 0
        self._credit = float(limits.requests_per_minute or 0)
        self._credited_at = time.monotonic()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count one request while it runs. Raises OpenAIError (429) that says which limit and when to ask again."""
        if self.limits.concurrent is not None and self._running >= self.limits.concurrent:
            raise _too_many(f"{self.limits.concurrent} requests at once are allowed", 1.0)
        self._spend(time.monotonic())
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _spend(self, now: float) -> None:
        per_minute = self.limits.requests_per_minute
        if per_minute is None:
            return
        self._credit = min(per_minute, self._credit + (now - self._credited_at) * per_minute / 60)
        self._credited_at = now
        if self._credit < 1:
            raise _too_many(f"{per_minute} requests a minute are allowed", (1 - self._credit) * 60 / per_minute)
        self._credit -= 1


class Callers:
    """All callers of this server."""

    def __init__(self, anonymous: Limits, key_file: Path | None = None) -> None:
        """Raises NibbleError when the key file is missing or wrong."""
        self._anonymous = None if key_file else Caller("anonymous", anonymous)
        self._by_hash = {key.sha256: Caller(key.name, key) for key in read_keys(key_file)} if key_file else {}

    def identify(self, authorization: str | None) -> Caller:
        """The caller of an Authorization header. Raises OpenAIError (401); the message never shows the key."""
        if self._anonymous is not None:
            return self._anonymous
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise _unauthorized("an API key is needed: send the header 'Authorization: Bearer <key>'")
        digest = hash_key(key.strip())
        found = [caller for known, caller in self._by_hash.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise _unauthorized("this API key is not known to the server")
        return found[0]


def read_keys(path: Path) -> list[Key]:
    """The keys of a file. Raises NibbleError naming the file and the field."""
    keys = validate(KeyFile, read_mapping(path), str(path)).keys
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            raise NibbleError(f"{path}: two keys have the same {field}; each key needs its own")
    return keys


def hash_key(key: str) -> str:
    """How a key is kept. Keys are random, so a plain hash can't be guessed back."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def main() -> None:
    """Print a new key and its entry for keys.yaml."""
    parser = argparse.ArgumentParser(prog="python -m serve.front.keys", description="Make an API key.")
    parser.add_argument("name", help="whose key it is")
    key = PREFIX + secrets.token_urlsafe(32)
    entry = Key(name=parser.parse_args().name, sha256=hash_key(key))
    print(f'key (shown once): {key}\nentry of keys.yaml:\n  - name: {entry.name}\n    sha256: "{entry.sha256}"')


def _unauthorized(message: str) -> OpenAIError:
    return OpenAIError(401, message, kind="authentication_error", code="invalid_api_key")


def _too_many(allowed: str, wait_s: float) -> OpenAIError:
    return OpenAIError(
        429,
        f"rate limit: {allowed}; ask again in {wait_s:.1f} s",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )


if __name__ == "__main__":
    run_stage(main)

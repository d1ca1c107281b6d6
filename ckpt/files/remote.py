"""Objects below a prefix of an object store, S3 or one that speaks like it, or Google's, through tensorstore's key-value stores.

An object appears whole or not at all, so that nothing here is ever half-written. A listing names objects without their sizes, and
tensorstore has no other way to ask for them: one that somebody cut short is found when it is read.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import tensorstore as ts

from ckpt.files.protocol import Buffer
from core.errors import RequestError

Result = TypeVar("Result")

# Scheme of a URL -> driver of tensorstore, and which query parameters set what of it.
_DRIVERS = {"s3": "s3", "gs": "gcs"}
_SETTINGS = {"s3": {"endpoint": "endpoint", "region": "aws_region"}, "gs": {}}
# Together under ten seconds: a network's hiccup is bridged, a wrong address is said soon.
_RETRIES = {"max_retries": 4, "initial_delay": "500ms", "max_delay": "4s"}
# How long a server that does not answer is waited for, and how much longer for each MiB on the way.
TIMEOUT_SECONDS = 45.0
SECONDS_PER_MIB = 1.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """A prefix of a bucket. prefix: without '/' at its ends; '' is the whole bucket. query: as in the URL, with its '?'."""

    scheme: str
    bucket: str
    prefix: str
    query: str

    @property
    def url(self) -> str:
        """As a user would write it."""
        return f"{self.scheme}://{self.bucket}{'/' if self.prefix else ''}{self.prefix}{self.query}"

    def below(self, path: str) -> Place:
        """A place inside this one."""
        prefix = f"{self.prefix}/{path}".strip("/")
        return Place(scheme=self.scheme, bucket=self.bucket, prefix=prefix, query=self.query)

    @property
    def spec(self) -> dict[str, Any]:
        """What tensorstore calls it."""
        known = _SETTINGS[self.scheme]
        settings = {known[key]: value for key, value in parse_qsl(self.query.lstrip("?"))}
        path = f"{self.prefix}/" if self.prefix else ""
        return {"driver": _DRIVERS[self.scheme], "bucket": self.bucket, "path": path, **settings}


def place_of(url: str) -> Place:
    """The place that a URL names. Raises RequestError for a URL that nothing here can open."""
    parts = urlsplit(url, allow_fragments=False)
    works = "Works: a folder, s3://BUCKET/PREFIX (of another server: ?endpoint=http://HOST:PORT&region=NAME), or gs://BUCKET/PREFIX."
    if parts.scheme not in _DRIVERS:
        raise RequestError(f"{url}: {parts.scheme}:// is no object store that can be opened. {works}")
    if not parts.netloc:
        raise RequestError(f"{url}: names no bucket. {works}")
    known = _SETTINGS[parts.scheme]
    given = [part.partition("=") for part in parts.query.split("&") if part]
    unknown = [key for key, _, value in given if key not in known or not value]
    if unknown:
        raise RequestError(f"{url}: {', '.join(unknown)} sets nothing of {parts.scheme}://. {works}")
    query = f"?{parts.query}" if parts.query else ""
    return Place(scheme=parts.scheme, bucket=parts.netloc, prefix=parts.path.strip("/"), query=query)


class RemoteFiles:
    """Objects below a URL, such as `s3://bucket/prefix`. Credentials are found as tensorstore finds them.

    Parameters of the URL: `?endpoint=http://127.0.0.1:9000` for a server that is not Amazon's, `&region=us-east-1`.
    What a server does not answer for within 45 seconds, and one more per MiB on the way, has failed.
    """

    # What hides the time of a request over a network.
    reads_at_once = 16
    # Each is in memory as a whole.
    writes_at_once = 2

    def __init__(self, url: str) -> None:
        """Raises RequestError for a URL that cannot be opened; no server is asked."""
        self.place = place_of(url)
        try:
            self._store = ts.KvStore.open(self.place.spec, context=_context()).result(TIMEOUT_SECONDS)
        except (ValueError, TimeoutError) as error:
            raise RequestError(f"{url}: cannot be opened: {_said(error)}") from error

    @property
    def address(self) -> str:
        """The URL."""
        return self.place.url

    def read(self, path: str) -> bytes:
        """A whole object. Raises FileNotFoundError where there is none."""
        return self._read(path, None, 0)

    def read_into(self, path: str, offset: int, buffers: Sequence[np.ndarray]) -> None:
        """Fill uint8 arrays from byte `offset` on by one request. An object that ends before is an OSError."""
        size = sum(map(len, buffers))
        if not size:
            return
        content = np.frombuffer(self._read(path, slice(offset, offset + size), size), np.uint8)
        at = 0
        for buffer in buffers:
            buffer[:] = content[at : at + len(buffer)]
            at += len(buffer)

    def write(self, path: str, buffers: Iterable[Buffer], *, push: bool = True) -> int:
        """Make an object of the buffers by one request, which is there when it is answered; its bytes. It is in memory whole: stores make files of PIECE_BYTES at most."""
        joined = io.BytesIO()
        for buffer in buffers:
            joined.write(buffer.data if isinstance(buffer, np.ndarray) else buffer)
        size = joined.tell()
        self._wait(path, self._store.write(path, joined.getvalue()), size)
        return size

    def push(self, path: str) -> None:
        """Nothing is left to do."""

    def sizes(self) -> dict[str, int | None]:
        """Every object, by path; their sizes are not known."""
        keys = self._wait("", self._store.list(), 0)
        return {key.decode(): None for key in sorted(keys)}

    def remove(self, path: str) -> None:
        """Remove an object, and everything below it as a prefix; nothing, where there is nothing. The path '' is everything."""
        if not path and not self.place.prefix:
            raise OSError(errno.EPERM, "is a whole bucket, which is never emptied", self.address)
        below = ts.KvStore.KeyRange(f"{path}/", f"{path}0") if path else ts.KvStore.KeyRange()  # '0' follows '/'
        if path:
            self._wait(path, self._store.write(path, None), 0)
        self._wait(path, self._store.delete_range(below), 0)

    def free_bytes(self) -> None:
        """Nobody can say."""
        return

    def _read(self, path: str, part: slice | None, size: int) -> bytes:
        found = self._wait(path, self._store.read(path, byte_range=part), size)
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, "is missing", self.place.below(path).url)
        return found.value

    def _wait(self, path: str, under_way: ts.Future[Result], size: int) -> Result:
        """The result of a request that moves `size` bytes. Raises OSError in the server's words."""
        try:
            return under_way.result(timeout=TIMEOUT_SECONDS + SECONDS_PER_MIB * size / 2**20)
        except TimeoutError:
            under_way.cancel()
            where = self.place.below(path).url
            raise OSError(errno.ETIMEDOUT, "the object store does not answer", where) from None
        except (ValueError, LookupError, RuntimeError, PermissionError) as error:
            raise OSError(errno.EIO, _said(error), self.place.below(path).url) from error


@cache
def _context() -> ts.Context:
    """What all connections of this process share: finding credentials can take a request of its own."""
    return ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})


def _said(error: Exception) -> str:
    """What a server said, without the whole of its response."""
    return str(error).partition(" [")[0] or type(error).__name__

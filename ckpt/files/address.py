"""From what a user writes to the place that is meant: a folder, or a prefix of an object store by its URL."""

from __future__ import annotations

from pathlib import Path

from ckpt.files.local import LocalFiles
from ckpt.files.protocol import Address, Files
from ckpt.files.url import is_remote


def open_files(address: Address) -> Files:
    """The files at an address, which need not exist yet. Raises RequestError for a URL that nothing here can open."""
    if is_remote(address):
        # tensorstore takes its time to load, which folders need not pay for.
        from ckpt.files.remote import RemoteFiles

        return RemoteFiles(str(address))
    return LocalFiles(Path(address))

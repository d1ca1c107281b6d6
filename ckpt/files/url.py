"""Which addresses are URLs. Apart from what opens them, so that plans can ask without loading it."""

from __future__ import annotations

import re
from pathlib import Path

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_remote(address: str | Path) -> bool:
    """Whether an address is an object store's."""
    return isinstance(address, str) and _URL.match(address) is not None

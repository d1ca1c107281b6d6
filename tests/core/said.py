"""Faults as their sentences, for tests of the words."""

import re

from core.errors import Fault


def sentence(fault: Fault) -> str:
    """The fault without its code, which it must have: `area.what-it-asks`, said last."""
    text, code = str(fault).rsplit(" ", maxsplit=1)
    assert code == f"[{fault.code}]" and re.fullmatch(r"[a-z]+\.[a-z0-9-]+", fault.code), str(fault)
    return text

"""Every rule over a run, before any process starts (contract 9): all faults at once, each with the nearest values that work.

Settings are named as `--set` takes them; a part that many layers share is reported once.
"""

from __future__ import annotations

from core.check.mapping import check_mapping
from core.check.model import check_model
from core.check.run import check

__all__ = ["check", "check_mapping", "check_model"]

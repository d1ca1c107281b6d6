"""Every rule over a run, before any process starts (contract 9): all faults at once, each with the nearest values that work.

Settings are named as `--set` takes them; a part that many layers share is reported once. Every rule has a code, and a request in
tests/core/rules.py that breaks it. Rules that need to know the hardware are launch/hardware_rules.py's.

Some rules of other trainers are none here. What they forbid cannot be said: tp without sequence parallelism, a padded capacity without
a factor, shared experts of a part of an expert's width, DeepEP without a dispatcher that uses it. Or it works: a combined schedule
takes any number of prediction modules, any virtual stages, and shared experts that run beside the communication.
"""

from __future__ import annotations

from core.check.mapping import check_mapping
from core.check.model import check_model
from core.check.run import check

__all__ = ["check", "check_mapping", "check_model"]

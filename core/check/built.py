"""What can be declared, planned and priced, and cannot run yet: refused when a job starts, so that nothing asked for is left out silently."""

from __future__ import annotations

from collections.abc import Collection

from core.config.override import Assignment, override, value_text
from core.config.run import RunConfig
from core.errors import Fault

RULE = "can be planned and priced, and cannot run yet (launch plan --startable finds what can)"


def not_built(run: RunConfig) -> tuple[Fault, ...]:
    """A fault for each thing that `run` asks for and that the engine cannot do; empty where it can be started."""
    memory, execution = run.memory, run.execution
    asked = {
        "memory.offload": (",".join(memory.offload) or None, None),
        "execution.graphs": (",".join(execution.graphs) or None, None),
    }
    return tuple(
        Fault(code="built.not-yet", setting=key, value=value_text(value), rule=RULE, works=value_text(works))
        for key, (value, works) in asked.items()
        if value != works
    )


def startable(run: RunConfig, fixed: Collection[str] = ()) -> RunConfig:
    """The run without what cannot run yet, but for the settings in `fixed`: the same model, and with what `not_built` says would work."""
    asked = (Assignment(key=f.setting, text=f.works) for f in not_built(run) if f.setting not in fixed)
    return override(run, tuple(asked))[0]

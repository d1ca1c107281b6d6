"""Two pieces of work that take turns at their communication: while what one has sent is under way, the other computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Baton:
    """Whoever holds it runs; `give_way` hands it to the other until that gives way too, or ends (report section 4.2.3).

    Only one of the two ever runs, so that the order of collectives is the same on every rank that runs the same two pieces of
    work. One is handed to the groups whose communication is to be hidden.
    """

    turn: int = 0
    running: list[bool] = field(default_factory=lambda: [False, False])
    changed: threading.Condition = field(default_factory=threading.Condition)

    def together(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both, starting with `first`; raises what either raised, after both have ended."""
        self.turn, self.running = 0, [True, True]
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._side, args=(0, first, errors), name="combined")
        thread.start()
        self._side(1, second, errors)
        thread.join()
        if errors:
            raise errors[0]

    def give_way(self) -> None:
        """Let the other run until it gives way; returns at once where it has ended, or nothing runs together."""
        with self.changed:
            me = self.turn
            if not self.running[1 - me] or not self.running[me]:
                return
            self._pass_to(1 - me)
            self.changed.wait_for(lambda: self.turn == me)

    def _side(self, me: int, work: Callable[[], None], errors: list[BaseException]) -> None:
        try:
            with self.changed:
                self.changed.wait_for(lambda: self.turn == me)
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            with self.changed:
                self.running[me] = False
                self._pass_to(1 - me)

    def _pass_to(self, other: int) -> None:
        self.turn = other
        self.changed.notify_all()

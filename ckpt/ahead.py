"""Makes the next items of an iterator in a thread while those before are used, so that reading and writing happen at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sized
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Sized)


def ahead(items: Iterator[Item], most_bytes: int) -> Generator[Item, None, None]:
    """The items in order; of those that are made and not yet taken, no more than one begins beyond `most_bytes`, counted by `len`.

    What making them raises is raised here. Closing the iterator ends the thread.
    """
    line = _Line[Item](most_bytes)
    thread = threading.Thread(target=line.fill, args=(items,), daemon=True)
    thread.start()
    try:
        yield from line.taken()
    finally:
        line.end()
        thread.join()


class _Line(Generic[Item]):
    """What waits between the thread that makes and the one that takes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.changed = threading.Condition()
        self.waiting: deque[Item] = deque()
        self.bytes = 0
        self.closed = False
        self.done = False
        self.error: BaseException | None = None

    def fill(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                with self.changed:
                    self.changed.wait_for(lambda: self.bytes < self.most_bytes or self.closed)
                    if self.closed:
                        return
                    self.waiting.append(item)
                    self.bytes += len(item)
                    self.changed.notify_all()
        except BaseException as error:
            self.error = error
        finally:
            with self.changed:
                self.done = True
                self.changed.notify_all()

    def taken(self) -> Iterator[Item]:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.done)
                if not self.waiting:
                    break
                item = self.waiting.popleft()
                self.bytes -= len(item)
                self.changed.notify_all()
            yield item
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

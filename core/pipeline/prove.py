"""Proof that a schedule is complete, in order and free of deadlock; and how many activations it keeps at most.

The proof executes the lists: sends do not wait, receives do, and what one rank sends to another arrives in the order in which it
was sent (NCCL has no tags), activations and gradients apart. However fast the ranks are, such lists end in one and the same
way, so one execution proves all.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from core.pipeline.action import Action, Schedule
from core.pipeline.schedule import FORWARD_ONLY
from core.pipeline.transfers import next_part, previous_part

Key = tuple[str, int, int]

ACTIVATION, GRADIENT = "activation", "gradient"
BACKWARDS = ("backward", "input_gradient")
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "input_gradient": "input gradient",
    "weight_gradient": "weight gradient",
    "send_activation": "sending of the activation",
    "receive_activation": "receiving of the activation",
    "send_gradient": "sending of the gradient",
    "receive_gradient": "receiving of the gradient",
}


def faults(schedule: Schedule) -> tuple[str, ...]:
    """What is wrong with the schedule, each as a sentence that names rank and action; empty where it is proved.

    Proved: every part of every microbatch has one forward and one backward (or an input gradient and then a weight gradient; with
    the name FORWARD_ONLY, none); every result that another rank needs is sent and received once, in one order at both ends;
    nothing is used before it is there; the halves of a combined action need nothing of each other; every rank ends.
    """
    malformed = tuple(_malformed(schedule))
    if malformed:
        return malformed
    machine = _Machine(schedule)
    machine.run()
    return (*_incomplete(schedule), *machine.found, *machine.stuck())


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """For every rank, the most (chunk, microbatch) pairs whose forward is done and whose activations are still needed.

    They are needed until the backward, or the weight gradient, is done. A combined action counts with both of its halves.
    """
    return tuple(_most_live(actions) for actions in schedule.ranks)


def sentence(action: Action) -> str:
    """An action in words."""
    if action.kind == "combined":
        backward = f"backward of microbatch {action.backward_microbatch} in chunk {action.backward_chunk}"
        return f"forward of microbatch {action.microbatch} in chunk {action.chunk}, combined with the {backward}"
    return _words((action.kind, action.chunk, action.microbatch))


def _words(key: Key) -> str:
    kind, chunk, microbatch = key
    return f"{WORDS[kind]} of microbatch {microbatch} in chunk {chunk}"


def _most_live(actions: tuple[Action, ...]) -> int:
    live = most = 0
    for action in actions:
        if action.kind in ("forward", "combined"):
            live += 1
            most = max(most, live)
        if action.kind in ("backward", "weight_gradient", "combined"):
            live -= 1
    return most


def _malformed(schedule: Schedule) -> Iterator[str]:
    """Actions that mean nothing in a schedule of this size, so that nothing else can be asked about it."""
    s = schedule
    if min(s.stages, s.virtual, s.microbatches) < 1 or len(s.ranks) != s.stages:
        yield f"{s.name}: lists of {len(s.ranks)} ranks for {s.stages} ranks, {s.virtual} chunks, {s.microbatches} microbatches"
        return
    chunks, microbatches = range(s.virtual), range(s.microbatches)
    for rank, actions in enumerate(s.ranks):
        for at, action in enumerate(actions):
            known = action.chunk in chunks and action.microbatch in microbatches
            second = (action.backward_chunk, action.backward_microbatch)
            if action.kind == "combined":
                known = known and second[0] in chunks and second[1] in microbatches
            elif second != (None, None):
                yield f"rank {rank}, action {at} ({sentence(action)}): only a combined action has a second half"
            if not known:
                yield f"rank {rank}, action {at} ({sentence(action)}): there is no such chunk or microbatch"


def _incomplete(schedule: Schedule) -> Iterator[str]:
    """What is not done, sent or received, or too often, or for nobody."""
    trains = schedule.name != FORWARD_ONLY
    for rank, actions in enumerate(schedule.ranks):
        keys = _keys(actions)
        wanted = _wanted(schedule, rank, set(keys), trains)
        if len(keys) == len(wanted) and wanted == set(keys):
            continue
        done = Counter(keys)
        for key in sorted(done.keys() | wanted):
            if done[key] == 0:
                yield f"rank {rank}: the {_words(key)} is missing"
            elif key not in wanted:
                yield f"rank {rank}: the {_words(key)} has no place in the schedule"
            elif done[key] > 1:
                yield f"rank {rank}: the {_words(key)} is done {done[key]} times"


def _wanted(schedule: Schedule, rank: int, done: set[Key], trains: bool) -> set[Key]:
    """Every key that a rank must have once. A backward may be whole or halved: whole, unless a half of it is there alone."""
    wanted: list[Key] = []
    microbatches = range(schedule.microbatches)
    for chunk in range(schedule.virtual):
        before = previous_part(rank, chunk, stages=schedule.stages)
        after = next_part(rank, chunk, stages=schedule.stages, virtual=schedule.virtual)
        kinds = ["forward"]
        if before and before[0] != rank:
            kinds += ["receive_activation", "send_gradient"][: 1 + trains]
        if after and after[0] != rank:
            kinds += ["send_activation", "receive_gradient"][: 1 + trains]
        wanted += [(kind, chunk, j) for kind in kinds for j in microbatches]
        for j in microbatches if trains else ():
            halves, whole = [("input_gradient", chunk, j), ("weight_gradient", chunk, j)], ("backward", chunk, j)
            wanted += halves if whole not in done and not done.isdisjoint(halves) else [whole]
    return set(wanted)


def _keys(actions: Sequence[Action]) -> list[Key]:
    """What the actions do; a combined one does two things."""
    keys: list[Key] = []
    for action in actions:
        if action.kind == "combined":
            assert action.backward_chunk is not None and action.backward_microbatch is not None, "checked before"
            keys.append(("forward", action.chunk, action.microbatch))
            keys.append(("backward", action.backward_chunk, action.backward_microbatch))
        else:
            keys.append((action.kind, action.chunk, action.microbatch))
    return keys


class _Machine:
    """Executes the lists of all ranks at once, and notes every use of something that is not there."""

    def __init__(self, schedule: Schedule) -> None:
        s = schedule
        self.schedule = s
        self.at = [0] * s.stages
        self.found: list[str] = []
        self.awake: deque[int] = deque()
        # what a rank has computed, and what it was sent: (forward | input_gradient | activation | gradient, chunk, microbatch)
        self.there: list[set[Key]] = [set() for _ in range(s.stages)]
        # what is on its way, by source, destination and kind, as (chunk at the destination, microbatch)
        self.channels: dict[tuple[int, int, str], deque[tuple[int, int]]] = defaultdict(deque)
        self.before = [[previous_part(r, c, stages=s.stages) for c in range(s.virtual)] for r in range(s.stages)]
        self.after = [
            [next_part(r, c, stages=s.stages, virtual=s.virtual) for c in range(s.virtual)] for r in range(s.stages)
        ]

    def run(self) -> None:
        """Until no rank can go on: each goes as far as it can, and again when something was sent to it."""
        self.awake.extend(range(self.schedule.stages))
        while self.awake:
            rank = self.awake.popleft()
            actions = self.schedule.ranks[rank]
            while self.at[rank] < len(actions) and self._step(rank, actions[self.at[rank]]):
                self.at[rank] += 1

    def stuck(self) -> Iterator[str]:
        """Who waits for what will never come: one sentence for each circle, and for each wait for a rank that has ended."""
        waits = {r: self._source(r) for r in range(self.schedule.stages) if self.at[r] < len(self.schedule.ranks[r])}
        told: set[int] = set()
        for start in waits:
            trail = [start]
            while waits[trail[-1]] in waits and waits[trail[-1]] not in trail:
                trail.append(waits[trail[-1]])
            last = waits[trail[-1]]
            circle = trail[trail.index(last) :] if last in trail else trail[-1:]
            if told.isdisjoint(circle):
                told.update(circle)
                texts = [f"{self._place(r)} waits for rank {waits[r]}" for r in circle]
                yield "; ".join(texts) + ("" if last in waits else ", which has ended without sending it")

    def _step(self, rank: int, action: Action) -> bool:
        """Do the action, or say that it has to wait."""
        kind, pair = action.kind, (action.chunk, action.microbatch)
        if kind in ("receive_activation", "receive_gradient"):
            return self._receive(rank, *pair, ACTIVATION if kind == "receive_activation" else GRADIENT)
        if kind == "forward":
            self._need_forward(rank, *pair)
            self.there[rank].add(("forward", *pair))
        elif kind in BACKWARDS:
            self._need_backward(rank, *pair)
            self.there[rank].add(("input_gradient", *pair))
        elif kind == "combined":
            self._combined(rank, action)
        elif kind == "weight_gradient":
            self._need(rank, ("input_gradient", *pair), "the input gradient of the same is not done")
        elif kind == "send_activation":
            self._send(rank, *pair, ACTIVATION, "forward", self.after[rank][action.chunk])
        else:
            self._send(rank, *pair, GRADIENT, "input_gradient", self.before[rank][action.chunk])
        return True

    def _combined(self, rank: int, action: Action) -> None:
        """Both halves from what is there before either; of one microbatch, the backward would need the forward."""
        assert action.backward_chunk is not None and action.backward_microbatch is not None, "checked before"
        chunk, microbatch = action.backward_chunk, action.backward_microbatch
        if microbatch == action.microbatch:
            self._note(rank, f"its halves are both of microbatch {microbatch}, and so depend on each other")
        self._need_forward(rank, action.chunk, action.microbatch)
        self._need_backward(rank, chunk, microbatch)
        self.there[rank] |= {("forward", action.chunk, action.microbatch), ("input_gradient", chunk, microbatch)}

    def _need_forward(self, rank: int, chunk: int, microbatch: int) -> None:
        source = self.before[rank][chunk]
        if source and source[0] == rank:
            self._need(rank, ("forward", source[1], microbatch), "the forward in the chunk before is not done")
        elif source:
            self._need(rank, (ACTIVATION, chunk, microbatch), "the activation has not arrived")

    def _need_backward(self, rank: int, chunk: int, microbatch: int) -> None:
        self._need(rank, ("forward", chunk, microbatch), "the forward of the same is not done")
        source = self.after[rank][chunk]
        if source and source[0] == rank:
            self._need(rank, ("input_gradient", source[1], microbatch), "the backward in the chunk after is not done")
        elif source:
            self._need(rank, (GRADIENT, chunk, microbatch), "the gradient has not arrived")

    def _send(
        self, rank: int, chunk: int, microbatch: int, what: str, made_by: str, target: tuple[int, int] | None
    ) -> None:
        self._need(rank, (made_by, chunk, microbatch), "what it sends is not there")
        if target and target[0] != rank:
            self.channels[(rank, target[0], what)].append((target[1], microbatch))
            if target[0] not in self.awake:
                self.awake.append(target[0])

    def _receive(self, rank: int, chunk: int, microbatch: int, what: str) -> bool:
        source = (self.before if what == ACTIVATION else self.after)[rank][chunk]
        if source is None or source[0] == rank:
            return True
        channel = self.channels[(source[0], rank, what)]
        if not channel:
            return False
        arrived = channel.popleft()
        if arrived != (chunk, microbatch):
            self._note(
                rank, f"what rank {source[0]} sent is the {what} of microbatch {arrived[1]} for chunk {arrived[0]}"
            )
        self.there[rank].add((what, *arrived))
        return True

    def _need(self, rank: int, key: Key, what: str) -> None:
        if key not in self.there[rank]:
            self._note(rank, what)

    def _note(self, rank: int, what: str) -> None:
        self.found.append(f"{self._place(rank)}: {what}")

    def _place(self, rank: int) -> str:
        return f"rank {rank}, action {self.at[rank]} ({sentence(self.schedule.ranks[rank][self.at[rank]])})"

    def _source(self, rank: int) -> int:
        """The rank for which `rank` waits at a receive."""
        action = self.schedule.ranks[rank][self.at[rank]]
        source = (self.before if action.kind == "receive_activation" else self.after)[rank][action.chunk]
        assert source is not None, "only a receive from another rank waits"
        return source[0]

"""Which windows a step trains on: a pure function of (seed, epoch, step), the same for every mapping; nothing to save but the step."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from core.config.run import IGNORE
from core.data.packing import Microbatch, count_valid, count_windows, pack, silent
from core.data.storage import TokenSplit
from core.errors import ConfigError, DataError, Fault

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class Loader:
    """Batches of one split for one of `replicas` data-parallel replicas.

    A global batch is `global_batch` windows in one fixed order, dealt out in microbatches of `microbatch` windows to one replica
    after the other: the replicas' microbatches of one number are neighbours, whatever their size. Raises ConfigError if that does not divide, DataError if the split has no whole window.
    """

    split: TokenSplit
    _: KW_ONLY
    sequence_tokens: int
    global_batch: int
    microbatch: int
    seed: int
    replica: int
    replicas: int

    def __post_init__(self) -> None:
        assert 0 <= self.replica < self.replicas, f"replica {self.replica} of {self.replicas}"
        _check_sizes(self)
        if self.num_windows == 0:
            raise DataError(
                f"{self.split.folder}: {self.split.name} is too short: {len(self.split.tokens)} tokens, but "
                f"train.sequence_tokens={self.sequence_tokens}. Give more text, set train.sequence_tokens to at most "
                f"{len(self.split.tokens)}, or change data.validation_fraction."
            )

    @property
    def num_windows(self) -> int:
        """Windows in an epoch."""
        return count_windows(self.split, self.sequence_tokens)

    def windows(self, step: int) -> np.ndarray:
        """The windows of the whole global batch of `step`: [global_batch] int64. Every epoch has each window once, in a new order."""
        positions = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        return _shuffle(positions, self.num_windows, self.seed)

    def batches(self, step: int) -> tuple[Microbatch, ...]:
        """This replica's microbatches of `step`, counted from 0: global_batch / replicas / microbatch of them."""
        mine = self.windows(step).reshape(-1, self.replicas, self.microbatch)[:, self.replica]
        packed = (pack(self.split, windows, self.sequence_tokens) for windows in mine)
        tokens = self.microbatch * self.sequence_tokens
        return tuple(
            replace(microbatch, first=(number * self.replicas + self.replica) * tokens)
            for number, microbatch in enumerate(packed)
        )

    def valid_tokens(self, step: int) -> int:
        """Labels that count in the whole global batch of `step`, over all replicas; without communication."""
        return count_valid(self.split, self.windows(step), self.sequence_tokens)

    def validation_windows(self, count: int) -> np.ndarray:
        """`count` windows spread evenly over this split, always the same; all of them if it has no more."""
        count = min(count, self.num_windows)
        return np.arange(count, dtype=np.int64) * self.num_windows // max(1, count)

    def validation(self, count: int) -> tuple[Microbatch, ...]:
        """This replica's microbatches of the validation windows of this loader's split.

        Every replica has equally many, all of full size: where the windows do not divide, places are filled with windows whose
        labels are all IGNORE, so that ranks stay in step in their collectives.
        """
        windows = self.validation_windows(count)
        per_round = self.replicas * self.microbatch
        padded = np.resize(windows, -(-len(windows) // per_round) * per_round)
        shape = (-1, self.replicas, self.microbatch)
        real = (np.arange(len(padded)) < len(windows)).reshape(shape)[:, self.replica]
        mine = padded.reshape(shape)[:, self.replica]
        packed = (pack(self.split, rows, self.sequence_tokens) for rows in mine)
        return tuple(_keep(microbatch, rows) for microbatch, rows in zip(packed, real, strict=True))

    def validation_tokens(self, count: int) -> int:
        """Labels that count in `validation(count)` over all replicas."""
        return count_valid(self.split, self.validation_windows(count), self.sequence_tokens)


def _check_sizes(loader: Loader) -> None:
    sizes = (
        ("sequence_tokens", loader.sequence_tokens),
        ("global_batch", loader.global_batch),
        ("microbatch", loader.microbatch),
    )
    faults = [
        Fault(setting=f"train.{name}", value=value, rule="must be at least 1", works="1 or more")
        for name, value in sizes
        if value < 1
    ]
    unit = loader.replicas * loader.microbatch
    if not faults and loader.global_batch % unit:
        rule = f"must be a multiple of train.microbatch={loader.microbatch} times the {loader.replicas} replicas"
        lower = loader.global_batch // unit * unit
        works = f"{lower} or {lower + unit}" if lower else str(unit)
        faults.append(Fault(setting="train.global_batch", value=loader.global_batch, rule=rule, works=works))
    if faults:
        raise ConfigError(faults)


def _keep(microbatch: Microbatch, real: np.ndarray) -> Microbatch:
    """The microbatch with the labels of its windows that are not `real` set to IGNORE."""
    if real.all():
        return microbatch
    if not real.any():
        return silent(microbatch)
    labels = np.where(np.repeat(real, len(microbatch.labels) // len(real)), microbatch.labels, IGNORE)
    return Microbatch(tokens=microbatch.tokens, labels=labels, cu_seqlens=microbatch.cu_seqlens)


# ------------------------------------------------------------------------------------------------------- order


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): uint64 to uint64, modulo 2 ** 64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _shuffle(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Where each position of an endless run of epochs lands: in every epoch of `size` positions each of range(size) once.

    A Feistel network over the next even power of two, walked until it lands inside (cycle walking): a bijection for any round
    function. It needs no table, however many windows there are, and unlike numpy's permutations cannot change with a version.
    """
    epochs, places = np.divmod(positions, size)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    base = _mix(np.full(len(positions), (seed + 1) * GOLDEN % 2**64, dtype=np.uint64))
    keys = _mix(base + epochs.astype(np.uint64) * np.uint64(GOLDEN))
    rounds = [_mix(keys + np.uint64((i + 1) * GOLDEN % 2**64)) for i in range(ROUNDS)]
    values, outside = places.astype(np.uint64), np.ones(len(positions), dtype=bool)
    while outside.any():
        left, right = values >> half, values & mask
        for key in rounds:
            left, right = right, left ^ (_mix(right + key) & mask)
        values = np.where(outside, (left << half) | right, values)
        outside = values >= size
    return values.astype(np.int64)

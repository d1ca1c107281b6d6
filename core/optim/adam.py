"""AdamW (arXiv 1711.05101) over a few flat tensors: torch's fused update, of states that may be kept in fewer bits or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from core.config.run import OptimizerConfig
from core.optim.kept import Kept, Shuttle, pieces, share_on_host
from core.optim.masters import HostMaster, Master, Remainder, WholeMaster, worked_on
from core.optim.moments import Moment, Place, kept_moments, noise_of

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements that are widened at once, into three temporary copies: on a CPU what stays in its cache, elsewhere so many that launches do
# not count (192 MiB). Whole vectors, so that an element is rounded alike wherever a piece ends, and whole blocks of one scale.
_PIECES = {"cpu": 1 << 16}
_LARGE_PIECE = 1 << 24


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """Elements that are updated together: `master` is changed in place by `gradient`, of equal shape, which may be of fewer bits.

    places: which tensors they are, for the noise of stochastic rounding; nothing else needs them.
    """

    master: Master
    gradient: Tensor
    decay: bool
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Held:
    """The states of a shard. steps: how many updates it has had, as torch counts them: a float32 scalar on the device."""

    master: WholeMaster | HostMaster | Remainder
    moments: tuple[Moment, Moment]
    steps: Tensor

    @property
    def parts(self) -> tuple[Kept, ...]:
        return tuple(part for state in (self.master, *self.moments) for part in state.parts)


class AdamW:
    """The update of all shards of a rank, decayed ones and others.

    moments: the dtype in which both moments are kept between steps; None: that of the master; float16 and float8_e4m3fn are kept under scales
    (core/optim/moments.py). on_host: the share of every shard whose moments wait in host memory. seed: of stochastic rounding. The
    arithmetic is the master's (float32) whatever is kept: gradient and moments are widened exactly, the update uses this step's
    moments before they are rounded, and they are rounded when they are written (report section 4.1.6).

    What is lost in bfloat16, with its 8 significant bits: each step rounds both moments by up to u = 2**-8 of themselves, and
    what was rounded before fades by beta. So the second moment is off by at most u / (1 - beta2), with beta2 = 0.95 8 %, and
    as roundings go either way rather by u / sqrt(3 * (1 - beta2**2)), 0.7 %; the step, which has its root, by half of
    that. A gradient's own noise moves it by more: one that is independent from step to step makes the second moment fluctuate by
    sqrt(2 * (1 - beta2) / (1 + beta2)), 23 %. And the moment still decays: a step without gradient takes 5 % of
    it, more than a rounding can give back. That is why it is accepted, and why beta > 1 - u, where rounding would undo every decay
    and a moment could only grow, is refused (core/check/precision.py).

    In float16, with 11 bits, u = 2**-11 for the first moment and, as the second is kept as its root, 2**-10 for that: a quarter of
    bfloat16's losses, typically 0.14 % of the second moment, and beta2 = 0.999 still decays.

    In float8, with 4 bits, neighbours are 1/16 to 1/8 apart. Stochastic rounding has no bias, so what it loses does not add up but
    fades: one rounding moves a root by 3.6 % (root of the mean square over all mantissas), the second moment by twice that, and the
    sum of all that has not faded is 7.2 % / sqrt(1 - beta2**2), 23 %: as much as a gradient's own noise, so that together they
    are 1.4 times one of them; the step feels half. The first moment is off by 3.6 % / sqrt(1 - beta1**2), 8 %, on top of the noise
    of a tenth of the last gradient. Every beta is allowed; the nearer to one, the more of it is noise.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        config: OptimizerConfig,
        moments: torch.dtype | None = None,
        *,
        on_host: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.shards = tuple(shards)
        self.config = config
        self.seed = seed
        self.steps = 0
        self._held = {shard: _hold(shard, moments, on_host) for shard in self.shards}
        self._shuttle = Shuttle(self.shards[0].gradient.device) if self.shards else None
        # What is of one dtype is updated at once; the rest piece by piece.
        self._plain = [shard for shard in self.shards if _is_plain(shard, self._held[shard])]
        self._narrow = [shard for shard in self.shards if not _is_plain(shard, self._held[shard])]
        self._update = self._torchs_update()

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """One update at learning rate `rate` by `factor` times what the gradients hold."""
        for group in self._update.param_groups:
            group["lr"] = rate
        if factor != 1.0:
            for shard in self._plain:
                shard.gradient.mul_(factor)
        self._update.step()
        for shard in self._narrow:
            self._step_in_pieces(shard, self._held[shard], rate, factor)
        self.steps += 1

    @torch.no_grad()
    def states(self, shard: Shard) -> dict[str, Tensor]:
        """`exp_avg` and `exp_avg_sq` of a shard, and its `master` where that is put together, each flat and as a checkpoint has it.

        Shared with the optimizer where they are kept so on the device; else copies in host memory, to be given to `restore`.
        """
        held, shared = self._held[shard], self.shared(shard)
        if shared:
            return {kind: m.parts[0].here for kind, m in zip(MOMENTS, held.moments, strict=True)}
        elements = shard.gradient.numel()
        found = {k: torch.empty(elements, dtype=m.saved) for k, m in zip(MOMENTS, held.moments, strict=True)}
        put_together = held.master if not isinstance(held.master, WholeMaster) else None
        if put_together is not None:
            found["master"] = torch.empty(elements)
        assert self._shuttle is not None
        self._shuttle.wait()
        for each in self._pieces(shard):
            at = slice(*each)
            for kind, moment in zip(MOMENTS, held.moments, strict=True):
                found[kind][at] = moment.widen([p.fetch(*each) for p in moment.parts], torch.float32)
            if put_together is not None:
                found["master"][at] = put_together.widen([p.fetch(*each) for p in put_together.parts], each)
        return found

    @torch.no_grad()
    def restore(self, shard: Shard, states: dict[str, Tensor]) -> None:
        """Take what was written to the copies of `states`; moments that are rounded are so to the nearest."""
        held = self._held[shard]
        if self.shared(shard):
            return
        device = shard.gradient.device
        for each in self._pieces(shard):
            at = slice(*each)
            for kind, moment in zip(MOMENTS, held.moments, strict=True):
                numbers = [p.fetch(*each) for p in moment.parts]
                moment.narrow(numbers, states[kind][at].to(device), None)
                _put(moment.parts, each, numbers)
            if not isinstance(held.master, WholeMaster):
                numbers = [p.fetch(*each) for p in held.master.parts]
                held.master.settle(numbers, each, states["master"][at].to(device))
                _put(held.master.parts, each, numbers)

    def moments(self, shard: Shard) -> dict[str, Tensor]:
        """`exp_avg` and `exp_avg_sq` of a shard, in its shape; shared or not as `states` has it."""
        found = self.states(shard)
        return {kind: found[kind].view(shard.gradient.shape) for kind in MOMENTS}

    def shared(self, shard: Shard) -> bool:
        """Whether `states` of a shard are the optimizer's own tensors, which whoever loads a checkpoint fills."""
        held = self._held[shard]
        whole = isinstance(held.master, WholeMaster) and all(part.on_host == 0 for part in held.parts)
        return whole and not any(moment.scaled for moment in held.moments)

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """All that is kept between steps besides masters that lie whole on the device: there, and in host memory."""
        parts = [part for held in self._held.values() for part in held.parts]
        steps = [held.steps for held in self._held.values()]
        return [*steps, *(part.here for part in parts)], [part.host for part in parts]

    def set_steps(self, steps: int) -> None:
        """Continue as after `steps` updates: bias correction depends on their number, and so does noise."""
        self.steps = steps
        for held in self._held.values():
            held.steps.fill_(float(steps))

    def _torchs_update(self) -> torch.optim.AdamW:
        """Torch's update of the plain shards, with the states that it would make in the first step: a checkpoint may be loaded before."""
        c, masters = self.config, [(shard, shard.master) for shard in self._plain]
        decayed = [master for shard, master in masters if shard.decay]
        others = [master for shard, master in masters if not shard.decay]
        groups = [{"params": decayed, "weight_decay": c.weight_decay}, {"params": others, "weight_decay": 0.0}]
        update = torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2), eps=c.eps, fused=True)
        for shard, master in masters:
            assert isinstance(master, Tensor)
            held = self._held[shard]
            update.state[master]["step"] = held.steps
            for kind, moment in zip(MOMENTS, held.moments, strict=True):
                update.state[master][kind] = moment.parts[0].here.view_as(master)
            master.grad = shard.gradient
        return update

    def _pieces(self, shard: Shard) -> list[tuple[int, int]]:
        """A shard in pieces, each on one side of what lies in host memory."""
        size = _PIECES.get(shard.gradient.device.type, _LARGE_PIECE)
        on_host = max(part.on_host for part in self._held[shard].parts)
        return pieces(shard.gradient.numel(), on_host, size)

    def _step_in_pieces(self, shard: Shard, held: _Held, rate: float, factor: float) -> None:
        """The same update of a shard whose states or gradient have fewer bits than its master, or wait in host memory."""
        assert self._shuttle is not None
        gradient = shard.gradient.view(-1)
        ends = [0, *accumulate(len(state.parts) for state in (held.master, *held.moments))]
        for each, numbers in self._shuttle.carry(held.parts, self._pieces(shard)):
            of_master, of_first, of_second = (numbers[a:b] for a, b in pairwise(ends))
            master = held.master.widen(of_master, each)
            # Moments of the master's dtype stay where they are: nothing is copied there or back.
            first, second = (
                moment.widen(own, master.dtype) for moment, own in zip(held.moments, (of_first, of_second), strict=True)
            )
            fresh = gradient[slice(*each)].to(master.dtype)
            adamw(
                [master],
                [fresh if factor == 1.0 else fresh * factor],
                [first],
                [second],
                [],
                # Counted up in there, once for every piece.
                [held.steps.clone()],
                fused=True,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=rate,
                weight_decay=self.config.weight_decay if shard.decay else 0.0,
                eps=self.config.eps,
                maximize=False,
            )
            noise = self._noise(shard, held, each)
            held.moments[0].narrow(of_first, first, noise[0])
            held.moments[1].narrow(of_second, second, noise[1])
            held.master.settle(of_master, each, master)
        held.steps.add_(1.0)

    def _noise(self, shard: Shard, held: _Held, each: tuple[int, int]) -> Sequence[Tensor | None]:
        if not held.moments[0].stochastic:
            return None, None
        device = shard.gradient.device
        return noise_of(shard.places, *each, seed=self.seed, step=self.steps + 1, device=device).unbind()


def _hold(shard: Shard, moments: torch.dtype | None, on_host: float) -> _Held:
    """The states of a shard before the first step."""
    device, elements = shard.gradient.device, shard.gradient.numel()
    wide = shard.master.dtype if isinstance(shard.master, Tensor) else torch.float32
    return _Held(
        master=worked_on(shard.master),
        moments=kept_moments(elements, moments or wide, device, share_on_host(elements, on_host)),
        steps=torch.zeros((), dtype=torch.float32, device=device),
    )


def _is_plain(shard: Shard, held: _Held) -> bool:
    """Whether all of a shard is of one dtype and lies on the device."""
    if not isinstance(shard.master, Tensor) or any(part.on_host for part in held.parts):
        return False
    return {shard.gradient.dtype, *(part.here.dtype for part in held.parts)} == {shard.master.dtype}


def _put(parts: Sequence[Kept], each: tuple[int, int], numbers: Sequence[Tensor]) -> None:
    for part, tensor in zip(parts, numbers, strict=True):
        part.put(*each, tensor)

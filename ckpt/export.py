"""The weights of a model under any mapping as published tensors, for an inference engine that runs beside the training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from ckpt.declared import canonical_shapes, family_for
from ckpt.gather import Format, Output, collect, plan_outputs, route
from ckpt.huggingface import origin_of, wish_of
from ckpt.store.safetensors import plan_shards
from core.errors import RequestError
from core.transformer.stage import Stage

BUCKET_BYTES = 1 << 28


def export_weights(
    model: Stage,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: Format = None,
    family: str | None = None,
    to: int | None = None,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Buckets of (published name, tensor) that together are the whole model; no file is involved. Collective over its world.

    Every rank takes every bucket from its iterator, in step with the others. A bucket has at most bucket_bytes, or one larger
    tensor; it costs one exchange of data, or none where nobody lacks anything of it, and before the first one there is one of
    names and boxes. At most two buckets are in memory beside what the caller keeps; the tensors are the caller's own, on the
    model's device. Parameters that are still on their way from an optimizer step are waited for.

    dtype: of all weights; `float8_blocks` for those in which the family (or the folder that the model came from) has float8 in
    blocks of 128 x 128, each followed by its scales, NAME_scale_inv; None for what the folder has or, without one, the model. What
    is not trained, such as the router's expert bias, stays as it is: float32. to: the position in the world of the one rank
    that gets the tensors, the others get empty buckets; None for all. family: as for `save_pretrained`.

    The model has to stay as it is until the last bucket. Raises RequestError where the family cannot express the model.
    """
    world, place = model.place.groups.world, model.place
    if to is not None and to not in range(world.size):
        raise RequestError(f"to={to}: is no rank of a world of {world.size}. Works: 0 to {world.size - 1}, or None.")
    origin = origin_of(model)
    chosen = family_for(model.config, family or (origin.family if origin else None))
    rules, shapes = chosen.huggingface.rules(model.config), canonical_shapes(model.config)
    outputs, held = plan_outputs(model, rules, shapes, wish_of(origin, dtype))
    receivers = tuple(range(world.size)) if to is None else (to,)
    load = Counter[int]()
    by_name = {output.published.name: output for output in _in_turn(outputs)}
    for names in plan_shards([(name, output.bytes) for name, output in by_name.items()], bucket_bytes):
        bucket = route([by_name[name] for name in names], receivers, load)
        arrived = collect([bucket], held, world, place.device)
        yield [pair for output, data in _taken(arrived) for pair in output.finish(data)]


def _in_turn(outputs: Sequence[Output]) -> list[Output]:
    """The outputs in such an order that those of different holders, such as pipeline stages, advance side by side: then every bucket
    is sent by all of them at once."""
    totals, done = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for output in outputs:
        totals[output.holders[0]] += output.bytes
    places = []
    for number, output in enumerate(outputs):
        done[output.holders[0]] += output.bytes
        places.append((done[output.holders[0]] / totals[output.holders[0]], number, output))
    return [output for _, _, output in sorted(places, key=lambda place: place[:2])]


def _taken(arrived: list[tuple[Output, Tensor]]) -> Iterator[tuple[Output, Tensor]]:
    """Each once, forgotten here, so that no bucket is there twice while it is quantised."""
    while arrived:
        yield arrived.pop(0)

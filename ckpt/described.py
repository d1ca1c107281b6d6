"""What a checkpoint says of the model in it, beside the tensors: in the manifest's `extra`, and in files under `assets/`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.files.protocol import Files
from ckpt.manifest import Manifest
from ckpt.source import Described
from core.config.architecture import ModelConfig
from core.config.mapping import ParallelConfig
from core.config.serial import from_json, run_from_json, to_json

ASSETS = "assets/"
# Keys of `extra`: a run's configuration, a model that no run has trained yet, and the mapping whose ranks the pieces are cut for.
RUN, MODEL, MAPPING = "run", "model", "mapping"


def describe_checkpoint(files: Files, manifest: Manifest) -> Described | None:
    """The model of a checkpoint: that of the run that saved it, or that it was converted from."""
    extra = manifest.extra
    assets = {path.removeprefix(ASSETS): files.read(path) for path in manifest.files if path.startswith(ASSETS)}
    if MODEL in extra:
        said = extra[MODEL]
        model = from_json(ModelConfig, said["config"], "model")
        return Described(family=said["family"], model=model, published=said["published"], assets=assets)
    if RUN in extra:
        run = run_from_json(extra[RUN])
        return Described(family=run.family, model=run.model, published=None, assets=assets)
    return None


def extra_of(described: Described) -> dict[str, Any]:
    """The entry of `extra` that `describe_checkpoint` reads back."""
    published = None if described.published is None else dict(described.published)
    return {MODEL: {"family": described.family, "config": to_json(described.model), "published": published}}


def mapping_of(extra: Mapping[str, Any]) -> ParallelConfig | None:
    """The mapping for whose ranks the pieces were cut, where anything says so."""
    said = extra.get(MAPPING) or extra.get(RUN, {}).get("parallel")
    return None if said is None else from_json(ParallelConfig, said, MAPPING)


def mapping_text(parallel: ParallelConfig) -> str:
    """The settings of a mapping that are not as they are without any."""
    plain = to_json(ParallelConfig())
    changed = {name: value for name, value in to_json(parallel).items() if plain[name] != value}
    return " ".join(f"{name}={value}" for name, value in changed.items()) or "one rank that holds everything"

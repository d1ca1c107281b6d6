"""The weights that a new run begins with (`--init`): opened, checked against what they say of themselves, and read by the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ckpt.agree import each
from ckpt.declared import canonical_shapes
from ckpt.opening import Opened, open_any
from ckpt.source import MODEL_PREFIX, Described
from ckpt.store.safetensors import INDEX
from core.config.architecture import ModelConfig
from core.config.family import find_family
from core.config.run import RunConfig
from core.data.storage import is_prepared, open_tokens
from core.data.tokenizer import load_tokenizer, vocabulary_size
from core.errors import CheckpointError, ConfigError, DataError, Fault, RequestError
from core.parallel.groups import Groups
from core.state.inventory import inventory
from core.transformer.stage import Stage
from launch.folder import Init, anywhere
from launch.request import INIT, Initial

TOKENIZER = "tokenizer.json"
SIZE_WITHOUT_NAME = "custom"
_KINDS = {"published": "a published folder", "gguf": "a GGUF file"}


def open_initial(address: str) -> Initial:
    """The weights at `address`: a checkpoint of the zoo, a run (its latest checkpoint), a published folder or a GGUF file.

    Raises RequestError where there is nothing, or nothing says what model it is; CheckpointError where it is damaged, or its tensors
    are not those of that model.
    """
    opened = open_any(anywhere(address))
    described = opened.source.describe()
    if described is None:
        raise RequestError(
            f"{INIT} {address}: does not say what model it is of. Give a checkpoint of the zoo, or a published folder."
        )
    there = _shapes(opened)
    faults = _differences(there, canonical_shapes(described.model))
    if faults:
        lines = [f"{INIT} {address}: does not hold the weights of the model that it is said to be:"]
        raise CheckpointError("\n".join([*lines, *(f"  {fault}" for fault in faults)]))

    def misfit(model: ModelConfig) -> str | None:
        found = _differences(there, canonical_shapes(model))
        return found[0] if found else None

    return Initial(
        init=Init(address=opened.found.address, what=_what(opened)),
        family=described.family,
        size=_size(described),
        model=described.model,
        # The index says in which file of a folder each tensor is, and there is no such folder any more.
        assets={name: content for name, content in described.assets.items() if name != INDEX},
        misfit=misfit,
    )


def tokenizer_for(initial: Initial, run: RunConfig) -> bytes | None:
    """The tokenizer.json that the weights came with, for the text of the run; None where the run names one, or has its data in tokens.

    Raises ConfigError where the weights were not made for these tokens, or have no tokenizer and the run has none either.
    """
    own, where = initial.assets.get(TOKENIZER), f"{initial.init.address}/{TOKENIZER}"
    prepared = run.data.path is not None and is_prepared(Path(run.data.path))
    if prepared or run.data.tokenizer is not None:
        path = open_tokens(Path(str(run.data.path))).tokenizer if prepared else Path(str(run.data.tokenizer))
        setting, value = ("--data", run.data.path) if prepared else ("data.tokenizer", run.data.tokenizer)
        if own is not None and _ids(load_tokenizer(path)) != _ids(_parsed(own, where)):
            rule = f"gives other ids to tokens than the tokenizer of the weights at {INIT}={initial.init.address}"
            works = "text, which is tokenised with theirs" if prepared else "none: theirs is used"
            raise ConfigError([Fault(setting=setting, value=value, rule=rule, works=works)])
        return None
    if own is None:
        rule = f"the weights at {INIT}={initial.init.address} came without one"
        works = f"the {TOKENIZER} that they were trained with, or --data of `launch prepare`"
        raise ConfigError([Fault(setting="data.tokenizer", value=None, rule=rule, works=works)])
    ids, vocab = vocabulary_size(_parsed(own, where)), run.model.vocab
    if ids > vocab:
        rule = f"has {ids} ids, and the weights rows for model.vocab={vocab}"
        raise ConfigError([Fault(setting=INIT, value=where, rule=rule, works="data.tokenizer of the weights")])
    return own


def load_initial(init: Init, model: Stage, groups: Groups) -> None:
    """Fill this rank's piece of a model; of the weights nothing else is read. Collective: where one rank fails all do, with CheckpointError."""
    each(groups.world, lambda: _fill(init, model, groups))


@torch.no_grad()
def _fill(init: Init, model: Stage, groups: Groups) -> None:
    source = open_any(init.address).source
    for name, piece in inventory(model, groups).items():
        piece.data.copy_(source.read(f"{MODEL_PREFIX}{name}", piece.box))


def _shapes(opened: Opened) -> dict[str, tuple[int, ...]]:
    """The model's tensors, optimizer states left out."""
    forms = opened.source.forms.items()
    return {name.removeprefix(MODEL_PREFIX): form.shape for name, form in forms if name.startswith(MODEL_PREFIX)}


def _differences(there: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Tensors that are missing, left over, or of another shape, in words."""
    found = [f"{name} is missing in them" for name in wanted if name not in there]
    found += [f"{name} would be left over" for name in there if name not in wanted]
    both = (name for name in wanted if name in there and there[name] != wanted[name])
    return found + [f"{name} has shape {list(there[name])} there, not {list(wanted[name])}" for name in both]


def _what(opened: Opened) -> str:
    step = None if opened.manifest is None else opened.manifest.step
    return _KINDS.get(opened.found.kind, "a checkpoint" + (f" of step {step}" if step else ""))


def _size(described: Described) -> str:
    """The size of the family that has this very model, or a word for one that has no name."""
    sizes = find_family(described.family).sizes if described.family else ()
    return next((size.name for size in sizes if size.model == described.model), SIZE_WITHOUT_NAME)


def _parsed(content: bytes, where: str) -> Tokenizer:
    """A tokenizer from the content of its file. Raises DataError where it is none."""
    try:
        return Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{where}: not a tokenizer.json: {error}. Name another one as data.tokenizer.") from error


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return ids

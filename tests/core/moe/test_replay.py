"""Routing to replay: what does not fit is refused by layer and token, and a file gives back any part of a global batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.config.architecture import Layer, ModelConfig, MoE
from core.errors import DataError
from core.moe.replay import RouterReplay, check_replay, ids_dtype, moe_layers
from core.moe.replay_file import read_replay, write_replay
from tests.core.tiny import deepseek, mixtral

MODEL = deepseek()
LAYERS = moe_layers(MODEL)
TOKENS, EXPERTS, TOP_K = 13, 16, 4
VALID = torch.ones(TOKENS, dtype=torch.bool)


def ids(tokens: int = TOKENS, shift: int = 0) -> Tensor:
    """Four different experts for every token."""
    return (torch.arange(tokens)[:, None] * 5 + torch.arange(TOP_K) + shift) % EXPERTS


def all_layers(**changed: Tensor) -> RouterReplay:
    """A replay that fits, but for what is changed; names with a double underscore for a dot."""
    named = {name.replace("__", "."): value for name, value in changed.items()}
    return RouterReplay(experts={name: ids() for name in LAYERS} | named)


def wrong(at: tuple[int, int], value: int) -> Tensor:
    found = ids()
    found[at] = value
    return found


def check(replay: RouterReplay, valid: Tensor = VALID) -> None:
    check_replay(replay, LAYERS, LAYERS, valid)


def test_the_layers_of_a_replay_are_the_moe_layers_by_canonical_name_without_dense_first_ones() -> None:
    assert list(LAYERS) == ["layers.1", "mtp.0.layer", "mtp.1.layer"]
    check(all_layers())


@pytest.mark.parametrize(
    ("replay", "words"),
    [
        (all_layers(layers__1=ids(12)), r"layers\.1: its shape is \[12, 4\], not \[13, 4\]"),
        (all_layers(layers__1=ids()[:, :3]), r"its shape is \[13, 3\], not \[13, 4\]"),
        (all_layers(mtp__1__layer=wrong((11, 2), 16)), r"mtp\.1\.layer: token 11 goes to expert 16"),
        (all_layers(layers__1=wrong((0, 3), -2)), "token 0 goes to expert -2"),
        (all_layers(layers__1=wrong((7, 1), -1)), r"token 7 has no expert as choice 1 \(-1\), and is no padding"),
        (all_layers(layers__1=wrong((2, 0), 13)), "token 2 goes twice to expert 13"),
        (all_layers(layers__1=ids().float()), "are torch.float32, not integers"),
        (all_layers(layers__0=ids()), r"layers\.0: is no MoE layer of this model. Its MoE layers are layers\.1, mtp"),
        (
            RouterReplay(experts={"layers.1": ids()}),
            r"mtp\.0\.layer: is missing. Give the experts of 13 tokens, 4 each",
        ),
        (RouterReplay(experts={}, own=("layers.9",)), r"layers\.9: is no MoE layer"),
    ],
)
def test_h2_what_does_not_fit_is_refused_by_layer_and_token(replay: RouterReplay, words: str) -> None:
    with pytest.raises(DataError, match=words):
        check(replay)


def test_every_layer_has_its_fault_told_at_once() -> None:
    with pytest.raises(DataError) as caught:
        check(RouterReplay(experts={"layers.1": ids(3)}))
    assert str(caught.value).count("\n") == 3


def test_padding_may_be_without_experts_or_with_any_and_layers_may_choose_themselves() -> None:
    padded = VALID.clone()
    padded[[4, 12]] = False
    changed = ids()
    changed[4] = -1
    changed[12] = 7
    check(all_layers(layers__1=changed), padded)
    with pytest.raises(DataError, match="token 4 has no expert"):
        check(all_layers(layers__1=changed))
    with pytest.raises(DataError, match="token 5 has no expert"):
        check(all_layers(layers__1=wrong((5, 0), -1)), padded)
    check(RouterReplay(experts={"layers.1": ids()}, own=("mtp.0.layer", "mtp.1.layer")))


def test_no_token_at_all_is_fine() -> None:
    check(RouterReplay(experts={name: ids(0) for name in LAYERS}), torch.ones(0, dtype=torch.bool))


def test_a_replay_gives_the_tokens_that_are_asked_for_in_their_order() -> None:
    replay = RouterReplay(experts={"layers.1": ids().to(torch.int16)}, own=("mtp.0.layer",))
    found = replay.of("layers.1", torch.tensor([12, 0, 5]))
    assert found is not None and found.dtype == torch.int64
    assert found.tolist() == ids()[[12, 0, 5]].tolist()
    assert replay.of("mtp.0.layer", torch.tensor([0])) is None


# ---------------------------------------------------------------------------------------------------- on the disk


def test_a_file_holds_small_integers_by_layer_and_gives_back_any_microbatch(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "step-3.safetensors"
    whole = {name: ids(31, shift) for shift, name in enumerate(LAYERS)}
    whole["layers.1"][30] = -1
    write_replay(path, whole, MODEL)
    stored = load_file(path)
    assert {name: tensor.dtype for name, tensor in stored.items()} == dict.fromkeys(LAYERS, torch.int16)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    for first, tokens in ((0, 13), (13, 18), (30, 1), (31, 0)):
        found = read_replay(path, MODEL, first=first, tokens=tokens)
        for name in LAYERS:
            assert found.experts[name].tolist() == whole[name][first : first + tokens].tolist()
    own = read_replay(path, MODEL, first=0, tokens=5, own=("mtp.1.layer",))
    assert set(own.experts) == {"layers.1", "mtp.0.layer"} and own.own == ("mtp.1.layer",)


def test_ids_beyond_two_bytes_take_four() -> None:
    assert ids_dtype(1 << 15) == torch.int16 and ids_dtype((1 << 15) + 1) == torch.int32


def test_what_is_no_global_batch_of_the_model_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\[12, 13\] tokens"):
        write_replay(tmp_path / "a", {"layers.1": ids(12), "mtp.0.layer": ids(13)}, MODEL)
    with pytest.raises(DataError, match=r"layers\.0"):
        write_replay(tmp_path / "a", {"layers.0": ids(12)}, MODEL)
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_model_or_of_too_few_tokens_or_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_replay(path, {"layers.1": ids(31)}, MODEL)
    with pytest.raises(DataError, match="holds a global batch of 31 tokens, but tokens up to 32 are asked for"):
        read_replay(path, MODEL, first=19, tokens=13)
    with pytest.raises(
        DataError, match=r"layers\.1 was recorded with 16 experts and top-4, but has 4 experts and top-2"
    ):
        read_replay(path, mixtral(), first=0, tokens=13)
    with pytest.raises(DataError, match="is no MoE layer here"):
        read_replay(path, _shorter(MODEL), first=0, tokens=13)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(DataError, match="cannot be read"):
        read_replay(path, MODEL, first=0, tokens=13)
    save_file({"layers.1": ids(31)}, path)
    with pytest.raises(DataError, match="format=router-replay/1"):
        read_replay(path, MODEL, first=0, tokens=13)
    with pytest.raises(DataError, match="cannot be read"):
        read_replay(tmp_path / "nothing", MODEL, first=0, tokens=13)


def test_the_header_says_what_the_file_was_made_for(tmp_path: Path) -> None:
    write_replay(tmp_path / "a", {"layers.1": ids(31)}, MODEL)
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == {"format": "router-replay/1", "tokens": "31", "layers": '{"layers.1": [16, 4]}'}


def _shorter(model: ModelConfig) -> ModelConfig:
    """Without its MoE layer."""
    dense: tuple[Layer, ...] = tuple(layer for layer in model.layers if not isinstance(layer.mlp, MoE))
    return replace(model, layers=dense, predict_ahead=None)

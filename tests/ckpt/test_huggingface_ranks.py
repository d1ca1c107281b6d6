"""Hugging Face folders with expert parallelism: every rank reads and writes its own part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt.huggingface import load_pretrained, save_pretrained
from ckpt.store.safetensors import Folder
from ckpt.store.tensorfile import TensorWriter
from core.config.mapping import ParallelConfig
from core.errors import CheckpointError
from core.state.box import Box
from core.state.inventory import inventory
from tests.ckpt.test_huggingface import TOKENS, files, settings_of
from tests.models import oracle
from tests.ranks import Ranks


def load_and_save(rank: int, world: int, source: Path, target: Path, ep: int) -> tuple[list[str], Tensor]:
    """What this rank read, and its logits; the model is saved by all ranks together."""
    read: list[str] = []
    original = Folder.read

    def recording(self: Folder, name: str, box: Box | None = None) -> Tensor:
        read.append(name)
        return original(self, name, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "read", recording)
        model = load_pretrained(source, parallel=ParallelConfig(ep=ep))
    assert not any(piece.data.isnan().any() for piece in inventory(model, model.place.groups).values())
    save_pretrained(model, target)
    return read, model(TOKENS).detach()


@pytest.mark.parametrize(("family", "world", "ep"), [("mixtral", 2, 2), ("deepseek_v3", 4, 2), ("qwen3", 2, 1)])
def test_ranks_read_their_own_experts_and_write_the_same_folder(
    ranks: Ranks, tmp_path: Path, family: str, world: int, ep: int
) -> None:
    theirs = oracle.save(family, settings_of(family), tmp_path / "source")
    found = ranks.run(load_and_save, world, tmp_path / "source", tmp_path / "target", ep)
    expected = theirs(TOKENS[None]).logits[0]
    for rank, (read, logits) in enumerate(found):
        assert len(read) == len(set(read))
        numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
        local = 12 // ep
        if family != "qwen3":
            assert numbers == set(range(rank % ep * local, (rank % ep + 1) * local))
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert files(tmp_path / "source") == files(tmp_path / "target")


def save_with_one_failing(rank: int, world: int, source: Path, target: Path) -> str:
    """What this rank is told when rank 1 cannot write."""
    model = load_pretrained(source, parallel=ParallelConfig(ep=world))

    def fail(*_: object) -> None:
        raise OSError("the disk of rank 1 is full")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(TensorWriter, "write", fail)
        with pytest.raises(CheckpointError) as raised:
            save_pretrained(model, target, shard_bytes=4000)
    return str(raised.value)


def test_one_rank_that_cannot_write_fails_all_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    oracle.save("mixtral", settings_of("mixtral"), tmp_path / "source")
    told = ranks.run(save_with_one_failing, 2, tmp_path / "source", tmp_path / "target")
    assert all("the disk of rank 1 is full" in message for message in told)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_fp32_bias_is_whole_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    theirs = oracle.transformers_model("deepseek_v3", settings_of("deepseek_v3"))
    bias = 7 + 0.001 * torch.arange(12)
    theirs.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    theirs.save_pretrained(tmp_path / "source")
    for got in ranks.run(bias_of, 2, tmp_path / "source"):
        assert torch.equal(got, bias)


def bias_of(rank: int, world: int, source: Path) -> Tensor:
    model = load_pretrained(source, dtype=torch.bfloat16, parallel=ParallelConfig(ep=world))
    return model.get_buffer("layers.1.mlp.router.bias")

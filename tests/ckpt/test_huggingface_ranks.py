"""Hugging Face folders under any mapping: every rank reads its own part, and writes some of the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ckpt.shards
from ckpt.huggingface import load_pretrained, save_pretrained
from ckpt.store.safetensors import Folder
from ckpt.store.tensorfile import TensorWriter
from core.config.mapping import ParallelConfig
from core.errors import CheckpointError
from core.optim.fsdp import shard
from core.state.box import Box
from core.state.inventory import inventory
from tests.ckpt.float8_folder import to_float8
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


CUTS = [
    ("mixtral", 2, ParallelConfig(tp=2, etp=2)),
    ("qwen3", 2, ParallelConfig(pp=2)),
    ("deepseek_v3", 4, ParallelConfig(tp=2, ep=2, pp=2)),
    ("mixtral", 4, ParallelConfig(cp=2, etp=2, ep=2)),
]


def saved_again(
    rank: int, world: int, source: Path, target: Path, parallel: ParallelConfig, how: dict[str, Any]
) -> None:
    """Load under a mapping, and save."""
    model = load_pretrained(source, parallel=parallel)
    if parallel.sharding == "fsdp":
        shard(model, model.place.groups)
    save_pretrained(model, target, **how)


@pytest.mark.parametrize(("family", "world", "parallel"), CUTS)
def test_tensors_that_the_mapping_cuts_are_whole_in_the_same_folder(
    ranks: Ranks, tmp_path: Path, family: str, world: int, parallel: ParallelConfig
) -> None:
    model = oracle.transformers_model(family, settings_of(family)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source", max_shard_size="4KB")
    ranks.run(saved_again, world, tmp_path / "source", tmp_path / "target", parallel, {})
    assert len(files(tmp_path / "source")) > 5
    assert files(tmp_path / "source") == files(tmp_path / "target")


def test_shards_of_fsdp_are_whole_in_the_same_folder(ranks: Ranks, tmp_path: Path) -> None:
    oracle.save("qwen3", settings_of("qwen3"), tmp_path / "source")
    ranks.run(saved_again, 2, tmp_path / "source", tmp_path / "target", ParallelConfig(sharding="fsdp"), {})
    assert files(tmp_path / "source") == files(tmp_path / "target")


@pytest.mark.parametrize(("world", "parallel"), [(1, ParallelConfig()), (4, ParallelConfig(tp=2, etp=2, ep=2))])
def test_a_float8_folder_comes_back_with_every_byte_from_any_mapping(
    ranks: Ranks, tmp_path: Path, world: int, parallel: ParallelConfig
) -> None:
    sizes = {"hidden_size": 136, "moe_intermediate_size": 130, "n_routed_experts": 4, "num_nextn_predict_layers": 0}
    oracle.save("deepseek_v3", settings_of("deepseek_v3", **sizes), tmp_path / "source")
    to_float8(tmp_path / "source")
    ranks.run(saved_again, world, tmp_path / "source", tmp_path / "target", parallel, {"dtype": "float8_blocks"})
    assert files(tmp_path / "source") == files(tmp_path / "target")


def logits_of(rank: int, world: int, source: Path, target: Path) -> Tensor:
    """Of a model that tp cuts, and that is then saved."""
    model = load_pretrained(source, parallel=ParallelConfig(tp=world))
    save_pretrained(model, target)
    return model(torch.arange(17) * 7 % 131).detach()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_vocabulary_that_tp_does_not_divide_has_no_row_more_in_the_folder(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    sizes = {"vocab_size": 131, "num_key_value_heads": 4, "tie_word_embeddings": False}
    theirs = oracle.save("qwen3", settings_of("qwen3", **sizes), tmp_path / "source")
    expected = theirs((torch.arange(17) * 7 % 131)[None]).logits[0]
    for logits in ranks.run(logits_of, world, tmp_path / "source", tmp_path / "target"):
        assert logits.shape == (17, 131)
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert load_file(tmp_path / "target" / "model.safetensors")["model.embed_tokens.weight"].shape == (131, 16)
    assert files(tmp_path / "source") == files(tmp_path / "target")


def test_rows_that_config_json_does_not_declare_are_refused(tmp_path: Path) -> None:
    oracle.save("qwen3", settings_of("qwen3", vocab_size=136), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text()) | {"vocab_size": 131}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight \[136, 16\] instead of \[131, 16\]"):
        load_pretrained(tmp_path / "source")


def peak(rank: int, world: int, source: Path, target: Path) -> int:
    """By how much this rank grows at most while a model is saved."""
    model = load_pretrained(source, parallel=ParallelConfig(ep=world))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt.shards, "ROUND_BYTES", 4 << 20)
        save_pretrained(model, target)
        Path("/proc/self/clear_refs").write_text("5")
        before = high_water()
        save_pretrained(model, target, overwrite=True)
    return high_water() - before


def high_water() -> int:
    (line,) = [n for n in Path("/proc/self/status").read_text().splitlines() if n.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def test_saving_takes_rounds_of_memory_and_not_files(ranks: Ranks, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_local_experts": 32}
    oracle.save("mixtral", settings_of("mixtral", **sizes), tmp_path / "source")
    assert (tmp_path / "source" / "model.safetensors").stat().st_size > 48 << 20
    for grew in ranks.run(peak, 2, tmp_path / "source", tmp_path / "target", timeout_seconds=60):
        assert grew < 16 << 20
    assert files(tmp_path / "source") == files(tmp_path / "target")

"""Folders read as sources and written from any source: the same bytes, bounded memory, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt import publish
from ckpt.huggingface import load_pretrained
from ckpt.publish import Publishing, plan_folder, write_published
from ckpt.published import PublishedSource
from ckpt.source import Described, Form
from ckpt.store.safetensors import INDEX, SINGLE
from core.errors import CheckpointError, RequestError
from core.parallel.groups import one_rank
from core.state.box import Box, whole
from core.state.inventory import inventory
from tests.ckpt.float8_folder import to_float8
from tests.ckpt.test_huggingface import files, predicting, rewrite, same, settings_of, tensors
from tests.models import oracle
from tests.ranks import Ranks

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A source in memory: what a checkpoint of the zoo would give."""

    tensors: Mapping[str, Tensor]
    described: Described | None

    @property
    def forms(self) -> Mapping[str, Form]:
        found = {}
        for name, tensor in self.tensors.items():
            found[name] = Form(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        return found

    def read(self, name: str, box: Box) -> Tensor:
        return self.tensors[name][box.slices].clone()

    def describe(self) -> Described | None:
        return self.described


def memory_of(folder: Path, **how: Any) -> Memory:
    """Everything in a folder, read into memory under canonical names."""
    source = PublishedSource(folder, **how)
    found = {name: source.read(name, whole(form.shape)) for name, form in source.forms.items()}
    described = source.describe()
    source.close()
    return Memory(tensors=found, described=described)


def published(folder: Path, out: Path, **how: Any) -> Path:
    """A folder written again from a folder."""
    return write_published(partial(PublishedSource, folder), out, identity="test", publishing=Publishing(**how))


def bfloat16_folder(family: str, folder: Path, **more: Any) -> Path:
    """A folder of several files, with a tokenizer."""
    model = oracle.transformers_model(family, settings_of(family, **more)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4KB")
    (folder / "tokenizer.json").write_text("{}")
    assert (folder / INDEX).is_file()
    return folder


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_a_source_has_what_the_model_would_have(family: str, tmp_path: Path) -> None:
    oracle.save(family, settings_of(family), tmp_path / "source")
    model = load_pretrained(tmp_path / "source")
    truth = {f"model.{name}": piece.data for name, piece in inventory(model, one_rank()).items()}
    source = PublishedSource(tmp_path / "source")
    assert {name: form.shape for name, form in source.forms.items()} == {n: tuple(t.shape) for n, t in truth.items()}
    for name, tensor in truth.items():
        low = tuple(size // 3 for size in tensor.shape)
        box = Box(offset=low, shape=tuple(-(-(size - o) // 2) for size, o in zip(tensor.shape, low, strict=True)))
        assert torch.equal(source.read(name, box), tensor[box.slices]), name
        assert source.forms[name].dtype == "float32"
    assert source.describe().model == model.config
    source.close()


@pytest.mark.parametrize("family", oracle.FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_is_written_again_with_every_byte(family: str, tied: bool, tmp_path: Path) -> None:
    source = bfloat16_folder(family, tmp_path / "source", tie_word_embeddings=tied)
    for number, out in enumerate((tmp_path / "a", tmp_path / "b")):
        if number:  # by way of memory, as from a checkpoint
            write_published(lambda: memory_of(source), out, identity="x")
        else:
            published(source, out)
        assert files(source) == files(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "source"]


def test_a_folder_of_one_file_and_its_copies_come_back(tmp_path: Path) -> None:
    source, _ = predicting(tmp_path)
    assert files(published(source, tmp_path / "out")) == files(source)
    write_published(lambda: memory_of(source), tmp_path / "again", identity="x")
    assert files(tmp_path / "again") == files(source)


def test_prediction_modules_can_be_dropped_on_the_way(tmp_path: Path) -> None:
    source, _ = predicting(tmp_path)
    write_published(partial(PublishedSource, source, mtp="drop"), tmp_path / "out", identity="x")
    kept = {n: t for n, t in tensors(source).items() if not n.startswith(("model.layers.2.", "model.layers.3."))}
    assert same(kept, tensors(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert load_pretrained(tmp_path / "out").config.predict_ahead is None


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_a_float8_folder_is_quantised_again_to_the_same_bytes(scales: torch.dtype, tmp_path: Path) -> None:
    oracle.save("deepseek_v3", settings_of("deepseek_v3", hidden_size=136, intermediate_size=129), tmp_path / "source")
    names = to_float8(tmp_path / "source", scales=scales)
    assert len(names) > 40
    source = tmp_path / "source"
    published(source, tmp_path / "out", format="float8_blocks")
    if scales == torch.float32:  # the folder's own dtype of scales is known to its source alone
        assert files(tmp_path / "out") == files(source)
        # As from a checkpoint: values in float32, and no scale anywhere.
        write_published(
            lambda: memory_of(source), tmp_path / "b", identity="x", publishing=Publishing(format="float8_blocks")
        )
        assert files(tmp_path / "b") == files(source)
    ours, theirs = tensors(tmp_path / "out"), tensors(source)
    assert {n: t for n, t in ours.items() if "_scale_inv" in n}.keys() == {f"{name}_scale_inv" for name in names}
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].to(tensor.dtype).view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_float8_folder_becomes_bfloat16_where_nothing_else_is_asked(tmp_path: Path) -> None:
    oracle.save("qwen3", settings_of("qwen3", hidden_size=136), tmp_path / "source")
    names = to_float8(tmp_path / "source")
    published(tmp_path / "source", tmp_path / "out")
    ours = tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    truth = memory_of(tmp_path / "source")
    assert torch.equal(
        ours["model.layers.1.mlp.experts.10.up_proj.weight"],
        truth.tensors["model.layers.1.mlp.experts.gate_up"][10, 1].bfloat16(),
    )
    assert "model.layers.1.mlp.experts.10.up_proj.weight" in names
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_the_expert_bias_stays_float32(tmp_path: Path) -> None:
    theirs = oracle.transformers_model("deepseek_v3", settings_of("deepseek_v3"))
    bias = 7 + 0.001 * torch.arange(12)
    theirs.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    theirs.save_pretrained(tmp_path / "source")
    published(tmp_path / "source", tmp_path / "out", format=torch.bfloat16)
    saved = tensors(tmp_path / "out")
    assert torch.equal(saved.pop("model.layers.1.mlp.gate.e_score_correction_bias"), bias)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def test_the_dry_run_says_the_bytes_of_every_file(tmp_path: Path) -> None:
    source = bfloat16_folder("qwen3", tmp_path / "source")
    for how in (Publishing(), Publishing(format=torch.float32, shard_bytes=9000), Publishing(format="float8_blocks")):
        plan = plan_folder(PublishedSource(source), how)
        out = write_published(
            partial(PublishedSource, source), tmp_path / "out", identity="x", publishing=replace(how, overwrite=True)
        )
        assert plan.file_bytes() == {path.name: path.stat().st_size for path in out.iterdir()}


def test_several_processes_write_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "ITEM_BYTES", 2000)
    source = bfloat16_folder("mixtral", tmp_path / "source")
    told: list[tuple[int, int]] = []
    write_published(
        partial(PublishedSource, source),
        tmp_path / "out",
        identity="x",
        publishing=Publishing(workers=2),
        progress=lambda done, total: told.append((done, total)),
    )
    assert files(tmp_path / "out") == files(source)
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] and told == sorted(told)


def stopping_after(limit: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done >= limit:
            raise KeyboardInterrupt

    return progress


def test_what_was_finished_before_an_interrupt_is_kept(tmp_path: Path) -> None:
    source = bfloat16_folder("qwen3", tmp_path / "source")
    out, left = tmp_path / "out", tmp_path / ".out.partial"
    with pytest.raises(KeyboardInterrupt):
        write_published(partial(PublishedSource, source), out, identity="x", progress=stopping_after(12000))
    assert not out.exists()
    done = {path.name: path.stat().st_mtime_ns for path in left.glob("*.safetensors")}
    assert 0 < len(done) < len(list(source.glob("*.safetensors")))
    told: list[int] = []
    write_published(partial(PublishedSource, source), out, identity="x", progress=lambda done, _: told.append(done))
    assert told[0] > 0
    assert files(out) == files(source)
    assert {name: (out / name).stat().st_mtime_ns for name in done} == done
    assert not left.exists()


def test_what_is_left_of_another_source_is_not_used(tmp_path: Path) -> None:
    first = bfloat16_folder("qwen3", tmp_path / "first")
    oracle.transformers_model("qwen3", settings_of("qwen3"), seed=1).to(torch.bfloat16).save_pretrained(
        tmp_path / "second", max_shard_size="4KB"
    )
    with pytest.raises(KeyboardInterrupt):
        write_published(
            partial(PublishedSource, first), tmp_path / "out", identity="first", progress=stopping_after(12000)
        )
    write_published(partial(PublishedSource, tmp_path / "second"), tmp_path / "out", identity="second")
    assert files(tmp_path / "out") == files(tmp_path / "second")


KILLED = """
import os, sys
from functools import partial
from ckpt.publish import Publishing, write_published
from ckpt.published import PublishedSource

def wait(done, total):
    if done > total // 3:
        print("there", flush=True)
        sys.stdin.read()

if __name__ == "__main__":
    opener = partial(PublishedSource, sys.argv[1])
    write_published(opener, sys.argv[2], identity="x", publishing=Publishing(shard_bytes=4000), progress=wait)
"""


def test_a_killed_writer_is_taken_over_and_while_it_lives_nobody_else_may_write(tmp_path: Path) -> None:
    source = bfloat16_folder("mixtral", tmp_path / "source")
    (tmp_path / "write.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "write.py"), str(source), str(tmp_path / "out")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"there\n"
        with pytest.raises(RequestError, match=r"out: another process is writing it"):
            published(source, tmp_path / "out", shard_bytes=4000)
        writer.send_signal(signal.SIGKILL)
    told: list[int] = []
    opener = partial(PublishedSource, source)
    how = Publishing(shard_bytes=4000)
    write_published(opener, tmp_path / "out", identity="x", publishing=how, progress=lambda done, _: told.append(done))
    assert told[0] > 0
    assert same(tensors(source), tensors(tmp_path / "out"))


class Dying(PublishedSource):
    """A source whose process is killed at the third read."""

    reads = 0

    def read(self, name: str, box: Box) -> Tensor:
        self.reads += 1
        if self.reads == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(name, box)


def test_a_worker_that_is_killed_is_said_and_the_rest_kept(tmp_path: Path) -> None:
    source = bfloat16_folder("mixtral", tmp_path / "source")
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="a worker process was killed"):
        write_published(partial(Dying, source), tmp_path / "out", identity="x", publishing=Publishing(workers=2))
    assert time.monotonic() - start < 50
    published(source, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def large_folder(folder: Path) -> int:
    """A Mixtral folder of 32 experts in files of 8 MB; its bytes."""
    sizes = {"hidden_size": 256, "intermediate_size": 1300, "num_hidden_layers": 1, "num_local_experts": 32}
    model = oracle.transformers_model("mixtral", settings_of("mixtral", **sizes))
    model.save_pretrained(folder, max_shard_size="8MB")
    return sum(path.stat().st_size for path in folder.iterdir())


def growth(rank: int, world: int, source: Path, out: Path) -> int:
    """By how much the process grows at most while it writes the folder again, in bfloat16."""

    def high() -> int:
        (line,) = [n for n in Path("/proc/self/status").read_text().splitlines() if n.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    how = Publishing(format=torch.bfloat16, memory_bytes=464 * MIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.stream.MOST_RUN_BYTES", 2 * MIB)  # ten of which may be on their way
        plan_folder(PublishedSource(source), how)
        Path("/proc/self/clear_refs").write_text("5")
        before = high()
        write_published(partial(PublishedSource, source), out, identity="x", publishing=how)
        return high() - before


def test_memory_is_bounded_by_pieces_and_not_by_the_model(ranks: Ranks, tmp_path: Path) -> None:
    size = large_folder(tmp_path / "source")
    assert size > 120 * MIB
    (grew,) = ranks.run(growth, 1, tmp_path / "source", tmp_path / "out", timeout_seconds=60)
    assert grew < 24 * MIB  # three files
    assert same({name: t.bfloat16() for name, t in tensors(tmp_path / "source").items()}, tensors(tmp_path / "out"))


def test_too_little_memory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = bfloat16_folder("mixtral", tmp_path / "source")
    with pytest.raises(RequestError, match=r"--memory=100MiB"):
        published(source, tmp_path / "out", memory_bytes=100 * MIB)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_config_that_declares_another_model_is_refused_field_by_field(tmp_path: Path) -> None:
    oracle.save("deepseek_v3", settings_of("deepseek_v3"), tmp_path / "source")
    memory = memory_of(tmp_path / "source")
    assert memory.described is not None and memory.described.published is not None
    changed = {**memory.described.published, "routed_scaling_factor": 1.25, "n_group": 1}
    broken = replace(memory, described=replace(memory.described, published=changed))
    with pytest.raises(RequestError) as raised:
        write_published(lambda: broken, tmp_path / "out", identity="x")
    assert "layers[1].mlp.router.scale: 1.25 instead of 2.5" in str(raised.value)
    assert "layers[1].mlp.router.groups: none instead of Groups(total=2" in str(raised.value)


def test_a_model_that_has_to_be_another_is_refused_field_by_field_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle.save("deepseek_v3", settings_of("deepseek_v3"), tmp_path / "source")
    wanted = load_pretrained(tmp_path / "source").config
    assert load_pretrained(tmp_path / "source", expected=wanted).config == wanted
    fields = json.loads((tmp_path / "source" / "config.json").read_text()) | {"routed_scaling_factor": 1.25}
    (tmp_path / "source" / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr("ckpt.store.safetensors.Folder.read", None)
    for load in (load_pretrained, PublishedSource):
        with pytest.raises(RequestError, match=r"layers\[1\]\.mlp\.router\.scale: 1\.25 instead of 2\.5"):
            load(tmp_path / "source", expected=wanted)


def test_tensors_that_are_not_those_of_the_model_are_all_named(tmp_path: Path) -> None:
    oracle.save("mixtral", settings_of("mixtral"), tmp_path / "source")
    memory = memory_of(tmp_path / "source")
    broken = dict(memory.tensors)
    del broken["model.final_norm.weight"]
    broken |= {"model.layers.7.more": torch.ones(1), "model.head.weight": torch.ones(3, 2)}
    broken["optimizer.exp_avg.head.weight"] = torch.ones(1)  # no part of the model, and none of our business
    with pytest.raises(CheckpointError) as raised:
        write_published(lambda: replace(memory, tensors=broken), tmp_path / "out", identity="x")
    assert [line.strip() for line in str(raised.value).splitlines()[1:]] == [
        "missing: final_norm.weight",
        "unexpected: layers.7.more",
        "of another shape: head.weight [3, 2] instead of [37, 16]",
    ]
    with pytest.raises(RequestError, match="does not say of which model"):
        write_published(lambda: replace(memory, described=None), tmp_path / "out", identity="x")


def test_values_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    oracle.save("mixtral", settings_of("mixtral"), tmp_path / "source")
    found = load_file(tmp_path / "source" / SINGLE)
    found["model.layers.1.block_sparse_moe.experts.10.w3.weight"][1, 2] = float("nan")
    save_file(found, tmp_path / "source" / SINGLE)
    with pytest.raises(CheckpointError, match=r"experts\.10\.w3\.weight: damaged weights"):
        published(tmp_path / "source", tmp_path / "out")


def test_a_copy_that_differs_is_named(tmp_path: Path) -> None:
    oracle.save("qwen3", settings_of("qwen3", tie_word_embeddings=True), tmp_path / "source")
    found = tensors(tmp_path / "source")
    wrong = found["model.embed_tokens.weight"].clone()
    wrong[36, 15] += 1
    rewrite(tmp_path / "source", found | {"lm_head.weight": wrong})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight should be a copy"):
        published(tmp_path / "source", tmp_path / "out")


def test_a_full_disk_is_said_and_what_stood_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bfloat16_folder("mixtral", tmp_path / "source")
    before = files(published(source, tmp_path / "out"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ckpt.store.tensorfile.TensorWriter.write", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            published(source, tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == before
    with pytest.raises(RequestError, match="is not empty"):
        published(source, tmp_path / "out")
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes, 10 are free"):
        published(source, tmp_path / "new")

"""The command line: instant without torch, exit codes, one message per mistake, and every format into every other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import load_file

from ckpt.cli import Size, main, workers_for
from ckpt.files.local import LocalFiles
from ckpt.manifest import read_manifest
from ckpt.memory import workers_that_fit
from ckpt.save import Saving
from ckpt.stream import Streaming
from core.config.mapping import ParallelConfig
from core.errors import RequestError
from tests.ckpt.dense_models import dense_model, write_gguf
from tests.ckpt.pieces import bits
from tests.ckpt.stored_models import save_run
from tests.core import tiny

TOKENIZER = b'{"version": "1.0"}'
ASSETS = Saving(assets={"tokenizer.json": TOKENIZER})


class Ckpt:
    """Runs the command in this process and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """What it printed to stdout, or to stderr where it should end with `code`."""
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        assert (end.value.code or 0) == code, f"{out}\n{err}"
        assert "Traceback" not in err
        return err if code == 2 or (code == 1 and not out) else out


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    return Ckpt(capsys)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint of a tiny Mixtral, saved by two ranks."""
    save_run(tmp_path / "run", tiny.mixtral(), "mixtral", parallel=ParallelConfig(tp=2, ep=2), saving=ASSETS)
    return tmp_path / "run"


def checkpoint_of(run: Path) -> Path:
    return next((run / "checkpoints").glob("step_*"))


def test_help_imports_nothing_slow() -> None:
    commands = ("inspect", "verify", "diff", "reshard", "convert", "export", "upcycle")
    code = (
        "import sys\nfrom ckpt.cli import main\n"
        f"for arguments in (['--help'], *([name, '--help'] for name in {commands}), ['nonsense'], ['diff', 'a']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as end: assert end.code == (0 if '--help' in arguments else 2), end.code\n"
        "slow = {'torch', 'numpy', 'rich', 'tensorstore'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1000", 1000),
        ("64k", 64_000),
        ("1Ki", 1024),
    ],
)
def test_sizes_are_read_in_both_kinds_of_units(text: str, count: int) -> None:
    assert Size().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "GiB", "2 bananas", "-1GiB", "1e9", "1ib"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is no number of bytes\. Works: 2GiB"):
        Size().convert(text, None, None)


def test_workers_follow_memory_where_nobody_says_how_many() -> None:
    assert workers_for(1 << 30, None) == 1
    assert workers_for(1 << 30, 3) == 3
    assert 1 <= workers_for(64 << 30, None) <= 4
    for gib in (1, 2, 3, 5):
        for uploads in (False, True):
            fit = workers_that_fit(gib << 30, uploads)
            assert Streaming(memory_bytes=gib << 30, workers=fit).run_bytes(uploads=uploads)
            with pytest.raises(RequestError):
                Streaming(memory_bytes=gib << 30, workers=fit + 1).run_bytes(uploads=uploads)


def test_inspect_shows_the_latest_checkpoint_of_a_run_folded(ckpt: Ckpt, run: Path) -> None:
    text = ckpt("inspect", run)
    lines = text.splitlines()
    assert lines[0] == f"{checkpoint_of(run)}  (the latest checkpoint of {run})"
    for part in (
        "step 30",
        "family        mixtral",
        "mapping       tp=2 ep=2",
        "assets        tokenizer.json",
        "store         zarr",
    ):
        assert part in text, part
    assert any(line.split()[:1] == ["{exp_avg,"] for line in lines)
    router = next(line for line in lines if "router.weight" in line)
    assert "[4, 16] × 2" in router and "512 B" in router
    assert len(lines) < 50 < len(ckpt("inspect", run, "--all").splitlines())


def test_inspect_tells_programs_everything(ckpt: Ckpt, run: Path) -> None:
    said = json.loads(ckpt("inspect", run, "--json"))
    assert (said["kind"], said["step"], said["family"], said["ranks"], said["run"]) == (
        "checkpoint",
        30,
        "mixtral",
        2,
        str(run),
    )
    assert said["mapping"]["tp"] == 2 and said["architecture"]["hidden"] == 16
    tensors = {tensor["name"]: tensor for tensor in said["tensors"]}
    assert said["num_tensors"] == len(tensors) == 63
    query = tensors["model.layers.0.attention.query.weight"]
    assert (query["shape"], query["dtype"], query["bytes"], query["pieces"]) == ([16, 16], "float32", 1024, 2)


def test_inspect_knows_published_folders_and_gguf_files(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    ckpt("export", run, tmp_path / "hf", "--workers", 1)
    text = ckpt("inspect", tmp_path / "hf")
    assert "Hugging Face folder" in text and "model type    mixtral" in text and "{w1, w3}.weight" in text
    write_gguf(tmp_path / "dense.gguf", dense_model("llama"), "llama", "F32")
    said = json.loads(ckpt("inspect", tmp_path / "dense.gguf", "--json"))
    assert (said["kind"], said["model_type"]) == ("gguf", "llama")
    assert {t["name"]: t["shape"] for t in said["tensors"]}["token_embd.weight"] == [61, 36]


def test_verify_names_every_damage_a_line_each(ckpt: Ckpt, run: Path) -> None:
    assert "nothing is damaged" in ckpt("verify", run)
    folder = checkpoint_of(run)
    manifest = read_manifest(LocalFiles(folder))
    entry = next(e for e in manifest.entries if e.name == "model.layers.1.mlp.experts.down")
    block = entry.pieces[1].blocks[0]
    content = bytearray((folder / block.file).read_bytes())
    content[block.offset + 5] ^= 1
    (folder / block.file).write_bytes(content)
    (folder / "assets/tokenizer.json").write_bytes(TOKENIZER[:-1] + b"!")
    lines = ckpt("verify", folder, code=1).splitlines()
    assert len(lines) == 2
    assert any(
        line.startswith(f"{entry.name} (written by rank {entry.pieces[1].rank}): {block.file} ") for line in lines
    )
    assert any(line.startswith("assets/tokenizer.json ") for line in lines)
    (folder / block.file).unlink()
    lines = ckpt("verify", folder, code=1).splitlines()
    hit = {(e.name, p.rank) for e in manifest.entries for p in e.pieces if p.blocks[0].file == block.file}
    assert (
        len(lines) == len(hit) + 1
        and f"{entry.name} (written by rank {entry.pieces[1].rank}): {block.file} is missing" in lines
    )
    (folder / "manifest.json").write_text("{")
    assert "the manifest is damaged" in ckpt("verify", folder, code=1)
    (folder / "manifest.json").unlink()
    assert "its manifest.json is missing" in ckpt("verify", folder, code=1)


def test_every_format_becomes_every_other_to_the_bit(ckpt: Ckpt, tmp_path: Path) -> None:
    truth = save_run(tmp_path / "run", tiny.qwen3(), "qwen3", parallel=ParallelConfig(tp=2), saving=ASSETS)
    before: Path = tmp_path / "run"
    for number, to in enumerate(("torch_dist", "zarr", "hf", "torch_dist", "hf", "zarr")):
        after = tmp_path / f"{number}.{to}"
        ckpt("convert", before, after, "--to", to, "--workers", 1)
        before = after
        assert json.loads(ckpt("diff", tmp_path / "run", before, "--model-only", "--workers", 1, "--json"))["equal"]
    assert (
        (tmp_path / "2.hf/tokenizer.json").read_bytes() == (tmp_path / "4.hf/tokenizer.json").read_bytes() == TOKENIZER
    )
    assert (before / "assets/tokenizer.json").read_bytes() == TOKENIZER
    mine = load_file(tmp_path / "4.hf/model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert bits(mine) == bits(truth["model.layers.0.attention.query.weight"])
    # Optimizer states go where they can.
    assert (
        ckpt("diff", tmp_path / "run", tmp_path / "1.zarr", "--workers", 1)
        == f"{len(truth)} tensors: {len(truth)} equal\n"
    )


def test_convert_changes_the_type_of_parameters_alone(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    ckpt("convert", run, tmp_path / "half", "--to", "zarr", "--codec", "zstd", "--dtype", "bfloat16", "--workers", 1)
    manifest = read_manifest(LocalFiles(tmp_path / "half"))
    assert manifest.codec == "zstd" and manifest.extra["tokens"] == 5
    assert {(e.name.partition(".")[0], e.dtype) for e in manifest.entries} == {
        ("model", "bfloat16"),
        ("optimizer", "float32"),
    }
    found = json.loads(ckpt("diff", run, tmp_path / "half", "--json", "--workers", 1, code=1))
    assert {t["verdict"] for t in found["tensors"]} == {"other type", "equal"}
    assert max(t["relative"] for t in found["tensors"]) <= 2**-8
    ckpt("diff", run, tmp_path / "half", "--tolerance", 0.02, "--workers", 1)


def test_diff_ends_with_one_where_anything_differs(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    save_run(tmp_path / "other", tiny.mixtral(), "mixtral", seed=1)
    text = ckpt("diff", run, tmp_path / "other", "--workers", 1, code=1)
    assert text.splitlines()[-1] == "63 tensors: 63 differs"
    assert text.splitlines()[1].split("\t")[:2] == ["model.embedding.weight", "differs"]
    save_run(tmp_path / "model", tiny.mixtral(), "mixtral", moments=False)
    text = ckpt("diff", run, tmp_path / "model", "--workers", 1, code=1)
    assert text.splitlines()[-1] == "63 tensors: 21 equal, 42 only in A"
    assert ckpt("diff", run, tmp_path / "model", "--model-only", "--workers", 1) == "21 tensors: 21 equal\n"


def test_reshard_writes_for_the_mapping_and_says_it(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    out = ckpt("reshard", run, tmp_path / "out", "--set", "parallel.tp=1", "--set", "parallel.ep=4", "--workers", 1)
    assert out.startswith("for ranks of ep=4\n")
    said = json.loads(ckpt("inspect", tmp_path / "out", "--json"))
    assert (said["mapping"]["tp"], said["mapping"]["ep"], said["ranks"], said["step"]) == (1, 4, 4, 30)
    assert said["assets"] == ["tokenizer.json"]
    ckpt("diff", run, tmp_path / "out", "--workers", 1)
    message = ckpt("reshard", run, tmp_path / "no", "--set", "parallel.tp=3", "--set", "parallel.eq=2", code=2)
    assert "parallel.tp=3: must divide" in message and "did you mean parallel.ep" in message
    assert not (tmp_path / "no").exists() and not (tmp_path / ".no.partial").exists()


def test_export_in_blocks_of_float8_and_back(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    ckpt("export", run, tmp_path / "wide", "--dtype", "bfloat16", "--workers", 1)
    stored = load_file(tmp_path / "wide/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "wide/config.json").read_text())
    assert (config["model_type"], config["num_local_experts"]) == ("mixtral", 4)
    ckpt("export", run, tmp_path / "narrow", "--dtype", "float8_blocks", "--workers", 1)
    stored = load_file(tmp_path / "narrow/model.safetensors")
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert "model.layers.0.self_attn.q_proj.weight_scale_inv" in stored
    ckpt("diff", run, tmp_path / "narrow", "--model-only", "--tolerance", 0.5, "--workers", 1)


def test_export_names_the_families_that_could_do_it(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    message = ckpt("export", run, tmp_path / "out", "--family", "deepseek_v3", code=2)
    assert "cannot be written as a DeepSeek-V3 folder" in message
    assert "is not a model of the zoo. Works: deepseek_v3, mixtral, qwen3" in ckpt(
        "export", run, tmp_path / "out", "--family", "x", code=2
    )
    assert "written to the file system only" in ckpt("export", run, "s3://bucket/x", code=2)


def test_prediction_modules_are_left_out_on_request(ckpt: Ckpt, tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny.deepseek(), "deepseek_v3")
    ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "zarr", "--mtp", "drop", "--workers", 1)
    manifest = read_manifest(LocalFiles(tmp_path / "out"))
    assert not [e.name for e in manifest.entries if "mtp" in e.name] and len(manifest.entries) > 20
    assert manifest.extra["model"]["config"]["predict_ahead"] is None
    text = ckpt("diff", tmp_path / "run", tmp_path / "out", "--workers", 1, code=1)
    assert {line.split("\t")[1] for line in text.splitlines()[1:-1]} == {"only in A"}


def test_upcycle_makes_experts_of_a_dense_model(ckpt: Ckpt, tmp_path: Path) -> None:
    dense_model("llama").save_pretrained(tmp_path / "dense")
    asked = [
        "--model",
        "mixtral",
        "--experts",
        8,
        "--top-k",
        2,
        "--granularity",
        2,
        "--layers",
        "0,2-3",
        "--workers",
        1,
    ]
    out = ckpt("upcycle", tmp_path / "dense", tmp_path / "moe", *asked)
    assert "3 of 4 layers get experts" in out and "the first outputs equal the dense model's" in out
    said = json.loads(ckpt("inspect", tmp_path / "moe", "--json"))
    shapes = {t["name"]: t["shape"] for t in said["tensors"]}
    assert shapes["model.layers.2.mlp.experts.gate_up"] == [8, 2, 12, 36] and shapes["model.layers.1.mlp.gate_up"] == [
        2,
        24,
        36,
    ]
    message = ckpt(
        "upcycle", tmp_path / "dense", tmp_path / "no", "--model", "mixtral", "--experts", 3, "--top-k", 5, code=2
    )
    assert "--top-k=5" in message
    assert "is no dense model" in ckpt("upcycle", tmp_path / "moe", tmp_path / "no", *asked, code=2)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("to", ["zarr", "hf"])
def test_a_dry_run_shows_files_and_bytes_and_writes_nothing(ckpt: Ckpt, run: Path, tmp_path: Path, to: str) -> None:
    lines = ckpt("convert", run, tmp_path / "out", "--to", to, "--dry-run", "--workers", 1).splitlines()
    assert (
        lines[-1].startswith(f"would write {tmp_path / 'out'}: ") and "with 1 worker in 2.00 GiB of memory" in lines[-1]
    )
    shown = {line.split("\t")[0]: int(line.split("\t")[1]) for line in lines if "\t" in line}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    ckpt("convert", run, tmp_path / "out", "--to", to, "--workers", 1)
    for path, count in shown.items():
        assert (tmp_path / "out" / path).stat().st_size >= count > 0, path
    if to == "hf":
        assert shown == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    else:
        assert sum(shown.values()) == sum(e.bytes for e in read_manifest(LocalFiles(tmp_path / "out")).entries)


def test_what_stands_at_the_target_stays_unless_it_may_go(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    for to in ("zarr", "hf"):
        for dry in ((), ("--dry-run",)):
            message = ckpt("convert", run, tmp_path / "out", "--to", to, *dry, code=2)
            assert "holds something already. Give an address that is new, or add --overwrite" in message
    assert (tmp_path / "out/mine.txt").read_text() == "mine"
    ckpt("convert", run, tmp_path / "out", "--to", "zarr", "--overwrite", "--workers", 1)
    ckpt("convert", run, tmp_path / "out", "--to", "hf", "--overwrite", "--workers", 1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def wrong_requests(folder: Path) -> dict[str, Sequence[object]]:
    run = folder / "run"
    return {
        "there is nothing. Works: a checkpoint of the zoo": ("inspect", folder / "nowhere"),
        "nowhere: there is nothing": ("diff", run, folder / "nowhere"),
        "this is no checkpoint": ("verify", folder / "empty"),
        "this file is no checkpoint. Give the folder that it lies in": ("inspect", folder / "a.safetensors"),
        "has no checksums; only a checkpoint of the zoo can be verified": ("verify", folder / "a.gguf"),
        "--codec=zstd: the store torch_dist cannot hold it. Works: raw": (
            *("convert", run, folder / "out", "--to", "torch_dist", "--codec", "zstd"),
        ),
        "--memory=100MiB: 1 worker process needs": ("diff", run, run, "--memory", "100MiB"),
        "is no number of bytes": ("convert", run, folder / "out", "--to", "zarr", "--memory", "lots"),
        "No such command 'inspct'": ("inspct",),
        "Missing option '--to'": ("convert", run, folder / "out"),
    }


@pytest.mark.parametrize("number", range(10))
def test_a_wrong_request_is_one_message_and_code_two(ckpt: Ckpt, run: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/readme.txt").write_text("no")
    (tmp_path / "a.safetensors").write_bytes(b"12345678")
    (tmp_path / "a.gguf").write_bytes(b"GGUF1234")
    message, arguments = list(wrong_requests(tmp_path).items())[number]
    assert message in ckpt(*arguments, code=2)
    assert not (tmp_path / "out").exists()


def test_what_is_left_of_a_checkpoint_is_damage_not_a_wrong_request(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    folder = checkpoint_of(run)
    half = folder.with_name(f"{folder.name}.ab12.partial")
    shutil.copytree(folder, half)
    (half / "manifest.json").unlink()
    assert "half-written" in ckpt("inspect", half, code=1)
    shutil.rmtree(folder)
    assert "no complete checkpoint" in ckpt("verify", run, code=1)


def test_a_damaged_source_leaves_no_target(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    folder = checkpoint_of(run)
    file = next(iter(read_manifest(LocalFiles(folder)).entries)).pieces[0].blocks[0].file
    content = bytearray((folder / file).read_bytes())
    content[40] ^= 8
    (folder / file).write_bytes(content)
    assert "is damaged" in ckpt("convert", run, tmp_path / "out", "--to", "zarr", "--workers", 1, code=1)
    assert not (tmp_path / "out").exists()

"""A job that asks for what cannot run yet is refused at its start, before anything is written, with all of it at once."""

from pathlib import Path

import pytest

from launch.cli import main


def test_a_job_that_asks_for_what_is_not_built_starts_nothing_and_says_every_setting(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = ("memory.offload=core_attn",)
    with pytest.raises(SystemExit) as end:
        main(
            [
                "mixtral",
                "--hw",
                "cpu",
                *(word for text in settings for word in ("--set", text)),
            ]
        )
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert err.startswith("1 setting cannot run:")
    for text in settings:
        assert (
            f"{text}: can be planned and priced, and cannot run yet (launch plan --startable finds what can). Works: "
            in err
        )
    assert list(tmp_path.iterdir()) == []


def test_on_a_laptop_one_sees_the_job_that_a_cluster_would_start_and_how_to_start_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["qwen3", "--hw", "h100", "--preset", "bf16-paper", "--set", "execution.graphs=none"])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert "qwen3 235b_a22b on h100, 256 GPUs" in out and "predicted step" in out
    assert "#SBATCH --nodes=32" in out and "srun --nodes=32" in out
    assert "--ranks=256: each rank needs a CUDA device" in err and "--backend slurm, kubernetes or print" in err
    assert list(tmp_path.iterdir()) == []

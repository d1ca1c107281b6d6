"""The command with addresses in an object store: a real server that speaks S3 runs beside the tests."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from ckpt.cli import main
from ckpt.files.address import open_files
from ckpt.offline import convert_job
from ckpt.opening import open_any
from ckpt.save import Saving
from ckpt.stream import Job, Streaming, write_checkpoint
from core.config.mapping import ParallelConfig
from core.errors import RequestError
from tests.ckpt.stored_models import save_run
from tests.core import tiny


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """What comes behind a path in the URL of the one bucket of a server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/zoo", method="PUT")).close()
        yield f"?endpoint=http://{host}:{port}&region=us-east-1"
    server.stop()


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (end.value.code or 0) == code, f"{out}\n{err}"
    return out or err


def test_urls_are_read_and_written_like_folders(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"s3://zoo/run{bucket}"
    save_run(
        run, tiny.mixtral(), "mixtral", parallel=ParallelConfig(tp=2), saving=Saving(assets={"tokenizer.json": b"{}"})
    )
    assert f"(the latest checkpoint of {run})" in ckpt(capsys, "inspect", run)
    for to in ("zarr", "torch_dist"):
        target = f"s3://zoo/{to}{bucket}"
        ckpt(capsys, "convert", run, target, "--to", to, "--workers", 1)
        assert "nothing is damaged" in ckpt(capsys, "verify", target)
        assert ckpt(capsys, "diff", run, target, "--workers", 1) == "63 tensors: 63 equal\n"
        assert not [path for path in open_files(target).sizes() if path.startswith("journal")]
        assert "holds something already" in ckpt(capsys, "convert", run, target, "--to", to, code=2)
    ckpt(capsys, "export", f"s3://zoo/zarr{bucket}", tmp_path / "hf", "--workers", 1)
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == b"{}"
    ckpt(capsys, "diff", run, tmp_path / "hf", "--model-only", "--workers", 1)
    assert "there is nothing" in ckpt(capsys, "inspect", f"s3://zoo/nowhere{bucket}", code=2)


class Stopped(BaseException):
    """What stops a writer in the midst as a kill would."""


def test_what_was_finished_before_a_kill_is_not_sent_again(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path / "run", tiny.mixtral(), "mixtral", parallel=ParallelConfig(tp=2, ep=2))

    def job() -> Job:
        return convert_job(open_any(tmp_path / "run"), f"s3://zoo/killed{bucket}", Streaming())

    def stop(done: int, total: int) -> None:
        if sum(path.startswith("journal/0") for path in open_files(job().target).sizes()) >= 1:
            raise Stopped

    with pytest.raises(Stopped):
        write_checkpoint(job(), stop)
    with pytest.raises(RequestError, match=r"there is nothing|this is no checkpoint"):
        open_any(job().target)
    told: list[int] = []
    address = write_checkpoint(job(), lambda done, total: told.append(done))
    assert told[0] > 0
    assert len(open_any(address).source.forms) == 63

"""Checkpoints in an object store: a real server that speaks S3 runs beside the tests."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import torch.distributed.checkpoint as dcp
from moto.server import ThreadedMotoServer
from torch import Tensor

import ckpt.files.remote as remote_files
import ckpt.shelf.remote as remote_shelf
import ckpt.store.torch_dist
from ckpt.files.address import open_files
from ckpt.files.remote import RemoteFiles, place_of
from ckpt.load import load
from ckpt.manifest import MANIFEST, file_faults, read_manifest
from ckpt.save import Saving, save
from ckpt.shelf.address import latest, open_shelf, steps
from ckpt.shelf.remote import RemoteShelf
from ckpt.verify import verify
from core.config.mapping import ParallelConfig
from core.errors import CheckpointError, RequestError
from core.parallel.groups import Group, groups_for, one_rank
from core.state.box import part, whole
from core.state.sharded import ShardedTensor
from tests.ckpt.pieces import Rank, assert_loads, bits, cut, make_small, piece, poisoned, random_bits, save_as_ranks
from tests.ranks import RankDiedError, Ranks

ALONE = one_rank().world
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server with an empty bucket `zoo`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/zoo", method="PUT")).close()
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def run(endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of its own; who was killed is taken for dead soon."""
    hurry(monkeypatch)
    return f"s3://zoo/runs/{abs(hash(request.node.nodeid))}?endpoint={endpoint}&region=us-east-1"


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shelf, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(remote_shelf, "WATCH_SECONDS", 0.4)


def truth(step: int = 0) -> dict[str, Tensor]:
    found = {
        "model.w": random_bits("w", (12, 5, 7), torch.bfloat16, seed=step),
        "model.scalar": random_bits("scalar", (), torch.float64, seed=step),
        "model.nothing": torch.empty((3, 0)),
    }
    return {name: tensor for name, tensor in sorted(found.items())}


def whole_state(step: int = 0) -> Rank:
    return [piece(name, t, whole(tuple(t.shape))) for name, t in truth(step).items()]


def write(run: str, step: int, keep: int = 9, seed: int | None = None) -> str:
    return save(run, step, whole_state(step if seed is None else seed), {"step": step}, ALONE, Saving(keep=keep))


def objects(run: str) -> dict[str, int | None]:
    return dict(RemoteFiles(run).sizes())


def copied(checkpoint: str, folder: Path) -> Path:
    """A checkpoint of the object store, as the files of a folder."""
    files = RemoteFiles(checkpoint)
    for path in files.sizes():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(files.read(path))
    return folder


@pytest.mark.parametrize(
    "saving", [Saving(), Saving(codec="zstd"), Saving(store="torch_dist")], ids=["zarr", "zarr-zstd", "torch_dist"]
)
def test_what_is_saved_loads_under_another_cut_and_is_as_in_a_folder(
    run: str, saving: Saving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch, block_bytes=40, own_file_bytes=100, share_bytes=1000)
    monkeypatch.setattr(ckpt.store.torch_dist, "FILE_BYTES", 500)
    w = truth()["model.w"]
    ranks = cut("model.w", w, (2, 1, 1), copies=2)
    checkpoint = save_as_ranks(run, 3, ranks, {"said": 1}, saving)
    assert verify(checkpoint) == () and latest(run) == checkpoint and steps(run) == (3,)
    assert_loads(checkpoint, cut("model.w", w, (3, 5, 1)), {"model.w": w})
    if saving.store == "torch_dist":
        state = {"model.w": poisoned((12, 5, 7), torch.bfloat16)}
        with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
            dcp.load(state, checkpoint_id=copied(checkpoint, tmp_path), no_dist=True)
        assert bits(state["model.w"]) == bits(w)
    local = save_as_ranks(tmp_path / "local", 3, ranks, {"said": 1}, saving)
    assert set(read_manifest(open_files(checkpoint)).files) == set(read_manifest(open_files(local)).files)


def test_scalars_and_tensors_without_elements_come_back(run: str) -> None:
    checkpoint = write(run, 1)
    assert_loads(checkpoint, [whole_state()], truth(1))
    assert dict(load(checkpoint, whole_state(), ALONE)) == {"step": 1}


def test_the_newest_are_kept_and_latest_names_the_last(run: str) -> None:
    written = [write(run, step, keep=2) for step in (1, 2, 3)]
    assert steps(run) == (2, 3) and latest(run) == written[-1]
    assert {path.split("/")[1] for path in objects(run)} == {
        "latest",
        *(place_of(w).prefix.rpartition("/")[2] for w in written[1:]),
    }
    name = RemoteFiles(run).read("checkpoints/latest").decode().strip()
    assert place_of(written[-1]).prefix.endswith(f"/checkpoints/{name}")


def test_the_same_step_again_replaces_the_older_save_whatever_the_names(run: str) -> None:
    first = write(run, 5, seed=1)
    write(run, 4)
    second = write(run, 5, seed=2)
    assert first != second and latest(run) == second and steps(run) == (4, 5)
    assert_loads(second, [whole_state()], truth(2))
    assert not RemoteFiles(first).sizes()


def test_killed_while_an_older_save_of_the_step_was_removed_the_newer_one_counts(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, 5, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteShelf, "_remove", lambda self, found: None)
        second = write(run, 5, seed=2)
    assert len({path.split("/")[1] for path in objects(run)} - {"latest"}) == 2
    assert latest(run) == second and steps(run) == (5,)
    write(run, 6)
    assert len({path.split("/")[1] for path in objects(run)} - {"latest"}) == 2
    assert steps(run) == (5, 6)


class _Killed(BaseException):
    """Nothing of ours expects it, as nothing expects a SIGKILL."""


def replace_until(run: str, changes: int, kill: Callable[[], None]) -> None:
    """Replace the save of step 2 and prune step 1, and be killed after so many changes of objects."""
    done = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        patch.setattr(remote_shelf, "BEAT_SECONDS", 60.0)  # its beats would be counted too
        for name in ("write", "remove"):
            patch.setattr(RemoteFiles, name, _until(getattr(RemoteFiles, name), done, changes, kill))
        save(run, 2, whole_state(12), {"step": 2}, ALONE, Saving(store="torch_dist", keep=1))


def _until(
    action: Callable[..., Any], done: Iterator[int], changes: int, kill: Callable[[], None]
) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        if next(done) >= changes:
            kill()
        return action(*arguments)

    return counted


def _raise() -> None:
    raise _Killed


def test_a_saver_killed_after_any_change_leaves_a_complete_checkpoint_and_nothing_for_ever(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_shelf, "WATCH_SECONDS", 0.1)
    seeds = set()
    for changes in itertools.count():
        mine = place_of(run).below(str(changes)).url
        write(mine, 1)
        write(mine, 2)
        try:
            replace_until(mine, changes, _raise)
            break
        except _Killed:
            seeds.add(assert_recovers(mine))
    assert changes > 8 and seeds == {2, 12}


def assert_recovers(run: str) -> int:
    """The step 2 that is found is the older or the newer one, whole; the next save tidies up. Returns which it was."""
    found = latest(run)
    assert found is not None and load(found, whole_state(), ALONE)["step"] == 2
    read = bits(target_of(found))
    (seed,) = (seed for seed in (2, 12) if bits(truth(seed)["model.w"]) == read)
    last = write(run, 4, keep=1)
    assert latest(run) == last
    assert {path.split("/")[1] for path in objects(run)} == {"latest", place_of(last).prefix.rpartition("/")[2]}
    return seed


def be_killed(rank: int, world: int, run: str) -> None:
    os.environ.update(CREDENTIALS)
    replace_until(run, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_process_that_is_killed_while_it_saves_hurts_nothing(run: str, ranks: Ranks) -> None:
    write(run, 2)
    with pytest.raises(RankDiedError, match="exit code -9"):
        ranks.run(be_killed, 1, run)
    assert any("savers" in path for path in objects(run)), "it could not say that it ends"
    assert assert_recovers(run) == 2


def target_of(checkpoint: str) -> Tensor:
    held = whole_state()
    load(checkpoint, held, ALONE)
    return next(t.data for t in held if t.name == "model.w")


def test_a_half_written_checkpoint_is_none_and_the_next_save_removes_it(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = write(run, 1)
    partial = open_shelf(run).begin(2)
    RemoteFiles(partial).write("tensors/x/c", [b"abc"])
    with caplog.at_level(logging.WARNING):
        assert latest(run) == good and steps(run) == (1,)
    assert f"{partial}: half-written" in caplog.text
    with pytest.raises(CheckpointError, match=r"is not a checkpoint \(it has no manifest\.json\)"):
        read_manifest(RemoteFiles(partial))
    write(run, 3)
    assert not RemoteFiles(partial).sizes() and steps(run) == (1, 3)


def test_a_failed_save_leaves_nothing_behind_and_a_published_one_is_not_discarded(run: str) -> None:
    shelf = open_shelf(run)
    partial = shelf.begin(2)
    RemoteFiles(partial).write("x", [b"abc"])
    shelf.discard(partial)
    assert objects(run) == {}
    published = write(run, 1)
    shelf.discard(published)
    assert latest(run) == published


def test_two_savers_at_once_are_told_and_neither_hurts_the_other(run: str) -> None:
    shelf = open_shelf(run)
    with shelf.only_saver():
        partial = shelf.begin(7)
        RemoteFiles(partial).write("x", [b"abc"])
        with pytest.raises(CheckpointError, match="another process is saving into this run; stop one of them"):
            write(run, 8)
        assert RemoteFiles(partial).read("x") == b"abc"
        shelf.discard(partial)
    assert objects(run) == {}, "neither leaves a sign"
    write(run, 8)
    assert steps(run) == (8,)


def test_a_killed_saver_s_sign_blocks_nobody(run: str) -> None:
    RemoteFiles(run).write("checkpoints/savers/00ff00ff", [b"17"])
    begun = time.monotonic()
    write(run, 8)
    assert time.monotonic() - begun < 20 and steps(run) == (8,)
    assert not any("savers" in path for path in objects(run))


def test_objects_of_others_beside_the_checkpoints_are_left_alone(run: str) -> None:
    for path in ("notes.txt", "checkpoints/step_00000009", "checkpoints/step_of_mine/x", "checkpoints/other"):
        RemoteFiles(run).write(path, [b"mine"])
    write(run, 1)
    write(run, 2, keep=1)
    assert steps(run) == (2,)
    assert {"notes.txt", "checkpoints/step_00000009", "checkpoints/step_of_mine/x", "checkpoints/other"} <= set(
        objects(run)
    )


def damage(files: RemoteFiles, path: str, how: str) -> None:
    content = bytearray(files.read(path))
    content[len(content) // 2] ^= 1
    if how == "gone":
        files.remove(path)
    else:
        files.write(path, [bytes(content[:-9] if how == "short" else content)])


@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_every_damaged_object_is_found_and_fails_the_load(
    run: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_small(monkeypatch, block_bytes=200, own_file_bytes=100, share_bytes=1000)
    write(run, 1)
    checkpoint = write(run, 2)
    files = RemoteFiles(checkpoint)
    damage(files, "tensors/model.w/c.0.0.0", how)
    damage(files, "pieces/zarr.json", how)
    found = verify(checkpoint)
    assert {(d.file, d.tensor) for d in found} == {("tensors/model.w/c.0.0.0", "model.w"), ("pieces/zarr.json", None)}
    with pytest.raises(CheckpointError, match=r"tensors/model\.w/c\.0\.0\.0.*model\.w"):
        load(checkpoint, whole_state(), ALONE)
    damage(files, MANIFEST, how)
    with pytest.raises(CheckpointError, match=r"manifest is damaged|is not a checkpoint"):
        read_manifest(files)
    with caplog.at_level(logging.WARNING):
        assert steps(run) == (1,)


def held(ep: int, poison: bool) -> tuple[Rank, Group]:
    """What this rank of the initialised world holds under expert parallelism over `ep` ranks."""
    groups = groups_for(ParallelConfig(ep=ep))
    found = []
    for name, tensor in truth().items():
        shape = tuple(tensor.shape)
        box = part(shape, 0, groups.ep.position, groups.ep.size) if name == "model.w" else whole(shape)
        copies = groups.edp if name == "model.w" else groups.replicas
        data = poisoned(box.shape, tensor.dtype) if poison else tensor[box.slices].clone()
        found.append(
            ShardedTensor(name=name, shape=shape, box=box, data=data, copy=copies.position, copies=copies.size)
        )
    return found, groups.world


def save_on_ranks(rank: int, world: int, run: str, ep: int) -> str:
    os.environ.update(CREDENTIALS)
    tensors, group = held(ep, poison=False)
    return save(run, 1, tensors, {}, group, Saving(store="torch_dist"))


def load_on_ranks(rank: int, world: int, checkpoint: str, ep: int) -> None:
    os.environ.update(CREDENTIALS)
    tensors, group = held(ep, poison=True)
    load(checkpoint, tensors, group)
    for tensor in tensors:
        assert bits(tensor.data) == bits(truth()[tensor.name][tensor.box.slices]), tensor.name


def test_two_ranks_save_and_one_or_two_load(run: str, ranks: Ranks) -> None:
    (checkpoint,) = set(ranks.run(save_on_ranks, 2, run, 2))
    assert latest(run) == checkpoint and verify(checkpoint) == ()
    ranks.run(load_on_ranks, 2, checkpoint, 1)
    ranks.run(load_on_ranks, 1, checkpoint, 1)


def test_an_object_is_read_by_ranges_into_many_buffers(run: str) -> None:
    files = RemoteFiles(run)
    assert files.write("a/b", [b"01234", np.frombuffer(b"56789", np.uint8)]) == 10
    buffers = [np.zeros(n, np.uint8) for n in (2, 0, 3)]
    files.read_into("a/b", 4, buffers)
    assert [bytes(b) for b in buffers] == [b"45", b"", b"678"]
    with pytest.raises(OSError, match="OUT_OF_RANGE"):
        files.read_into("a/b", 8, [np.zeros(3, np.uint8)])
    with pytest.raises(FileNotFoundError, match=r"is missing: .*/a/c\?"):
        files.read("a/c")
    assert files.write("empty", []) == 0 and files.read("empty") == b""
    files.read_into("empty", 0, [])


def test_buffers_may_be_used_again_for_what_follows(run: str) -> None:
    reused = np.zeros(3, np.uint8)

    def buffers() -> Iterator[np.ndarray]:
        for value in range(4):
            reused[:] = value
            yield reused

    RemoteFiles(run).write("x", buffers())
    assert RemoteFiles(run).read("x") == bytes([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])


def test_removing_a_prefix_leaves_its_neighbours(run: str) -> None:
    files = RemoteFiles(run)
    for path in ("a/b", "a/c/d", "a.b", "ab", "a0", "a"):
        files.write(path, [b"x"])
    files.remove("a")
    assert set(files.sizes()) == {"a.b", "ab", "a0"}
    files.remove("nothing")
    files.remove("")
    assert files.sizes() == {}
    root = f"s3://zoo?{run.partition('?')[2]}"
    with pytest.raises(OSError, match="is a whole bucket, which is never emptied"):
        RemoteFiles(root).remove("")


def test_sizes_that_nobody_tells_are_no_fault_and_missing_objects_are(run: str) -> None:
    checkpoint = write(run, 1)
    files = RemoteFiles(checkpoint)
    manifest = read_manifest(files)
    assert set(files.sizes().values()) == {None} and file_faults(files, manifest) == {}
    files.remove("zarr.json")
    assert file_faults(files, manifest) == {"zarr.json": "zarr.json is missing"}


@pytest.mark.parametrize(
    "url, said",
    [
        ("ftp://host/x", "ftp:// is no object store that can be opened"),
        ("memory://x", "Works: a folder, s3://BUCKET/PREFIX"),
        ("s3:///x", "names no bucket"),
        ("s3://zoo/x?endpont=http://h", "endpont sets nothing of s3://"),
        ("s3://zoo/x?region", "region sets nothing of s3://"),
        ("gs://zoo/x?endpoint=http://h", "endpoint sets nothing of gs://"),
        ("s3://a/x", "Invalid S3 bucket name"),
        ("s3://zoo/x?endpoint=nowhere", "cannot be opened"),
    ],
)
def test_a_url_that_cannot_be_opened_is_refused_at_once_with_what_works(url: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        open_files(url)
    assert said in str(caught.value) and str(caught.value).startswith(url)


@pytest.mark.parametrize("url", ["s3://zoo", "s3://zoo/a/b?region=eu-west-1", "gs://zoo/a"])
def test_a_url_is_given_back_as_it_was_written(url: str) -> None:
    assert open_files(url).address == url and open_files(url).free_bytes() is None
    assert place_of(url).below("x/y").prefix == f"{place_of(url).prefix}/x/y".lstrip("/")


def test_a_bucket_that_does_not_exist_is_said(run: str) -> None:
    nowhere = run.replace("s3://zoo/", "s3://nowhere/")
    for action in (lambda: read_manifest(RemoteFiles(nowhere)), lambda: write(nowhere, 1)):
        with pytest.raises(CheckpointError, match=r"nowhere/.*: cannot be .*: NOT_FOUND: NoSuchBucket"):
            action()


def test_a_server_that_is_not_there_is_said_within_a_minute(endpoint: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = f"s3://zoo/x?endpoint=http://127.0.0.1:{unused.getsockname()[1]}&region=us-east-1"
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Could not connect to server"):
        read_manifest(RemoteFiles(gone))
    assert time.monotonic() - begun < 30


def test_a_server_that_does_not_answer_is_said(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "TIMEOUT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"s3://zoo/x?endpoint=http://127.0.0.1:{silent.getsockname()[1]}&region=us-east-1"
        with pytest.raises(CheckpointError, match=f"{MANIFEST}: cannot be read: the object store does not answer"):
            read_manifest(RemoteFiles(url))


def test_what_this_writes_another_client_of_the_store_reads(
    run: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zarr arrays, opened by tensorstore straight from the bucket."""
    make_small(monkeypatch, block_bytes=1000, own_file_bytes=1, share_bytes=1000)
    checkpoint = save_as_ranks(run, 1, [[piece("v", torch.arange(700.0), whole((700,)))]])
    place = place_of(checkpoint)
    store = {"driver": "s3", "bucket": "zoo", "path": f"{place.prefix}/tensors/v", "endpoint": endpoint}
    spec = {"driver": "zarr3", "kvstore": store | {"aws_region": "us-east-1"}}
    assert np.array_equal(ts.open(spec, open=True).result().read().result(), np.arange(700, dtype=np.float32))


def test_no_thread_outlives_a_save(run: str) -> None:
    before = threading.active_count()
    write(run, 1)
    assert threading.active_count() <= before + 1  # the server's own threads come and go

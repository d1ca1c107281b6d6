"""From text to token files: what is kept, split, cached; and that a folder is there whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from core.data import tokens as tokens_module
from core.data.formats import Document
from core.data.storage import is_prepared, token_dtype
from core.data.tokenizer import END_OF_TEXT, end_of_text_id, load_tokenizer, train_tokenizer, vocabulary_size
from core.data.tokens import cached, open_tokens, prepare, unigram_entropy
from core.errors import ConfigError, DataError
from tests.core.data.streams import split_of

WORDS = ["alpha", "beta", "gamma", "delta", "Ünïcode", "日本", "def f(x):\n    return x\n", "🦜"]


def text_of(i: int) -> str:
    generator = np.random.default_rng(i)
    return f"text {i}: " + " ".join(WORDS[k] for k in generator.integers(0, len(WORDS), 5 + i % 7))


def write_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(name="source")
def _source(tmp_path: Path) -> str:
    return write_lines(tmp_path / "data.jsonl", [text_of(i) for i in range(120)])


def run(source, out, *, vocab=300, tokenizer=None, fraction=0.2):
    return prepare(source=source, out=out, vocab=vocab, tokenizer=tokenizer, validation_fraction=fraction)


def decoded(files, split) -> list[str]:
    tokenizer = load_tokenizer(files.tokenizer)
    pieces = [split.tokens[a:b].tolist() for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]
    assert all(piece[-1] == files.end_of_text for piece in pieces)
    return [tokenizer.decode(piece[:-1]) for piece in pieces]


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


# ------------------------------------------------------------------------------------------------------- tokenizer


def test_a_trained_tokenizer_loses_nothing_and_is_always_the_same() -> None:
    documents = [Document(name=str(i), text=text_of(i)) for i in range(50)]
    first, again = train_tokenizer(documents, 400), train_tokenizer(documents, 400)
    assert first.to_str() == again.to_str()
    assert first.token_to_id(END_OF_TEXT) == end_of_text_id(first, "x") == 0
    assert 257 < vocabulary_size(first) <= 400
    for text in (*WORDS, "\0\x7f \r\n\t  ", "never seen: ψ漢\U0010ffff", " leading"):
        assert first.decode(first.encode(text).ids) == text


def test_text_that_spells_the_end_of_text_stays_text() -> None:
    tokenizer = train_tokenizer([Document(name="a", text="abc")], 257)
    ids = tokenizer.encode(f"a{END_OF_TEXT}b", add_special_tokens=False).ids
    assert 0 not in ids and tokenizer.decode(ids) == f"a{END_OF_TEXT}b"


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(DataError, match=r"model\.vocab=256: .*Works: 257 or more"):
        train_tokenizer([Document(name="a", text="abc")], 256)


def test_a_given_tokenizer_neither_truncates_nor_pads_nor_adds_anything(tmp_path: Path, source: str) -> None:
    made = train_tokenizer([Document(name="a", text=text_of(1))], 280)
    made.enable_truncation(3)
    made.enable_padding(length=50)
    made.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    for given in (str(tmp_path / "tokenizer.json"), str(tmp_path)):
        files = run(source, tmp_path / f"out{len(given)}", tokenizer=given)
        assert sorted(decoded(files, files.train) + decoded(files, files.validation)) == sorted(
            text_of(i) for i in range(120)
        )
        assert files.tokenizer.read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_the_size_of_a_vocabulary_with_gaps_is_one_more_than_its_largest_id() -> None:
    assert vocabulary_size(Tokenizer(models.WordLevel({"a": 0, "b": 41}, unk_token="a"))) == 42


def word_level(path: Path, vocabulary: dict[str, int]) -> str:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(path))
    return str(path)


def test_the_ends_of_text_of_published_tokenizers_are_known(tmp_path: Path, source: str) -> None:
    for i, end in enumerate(("</s>", "<｜end▁of▁sentence｜>")):
        given = word_level(tmp_path / "t.json", {"alpha": 0, "beta": 1, end: 2})
        files = run(source, tmp_path / f"out{i}", tokenizer=given)
        assert files.end_of_text == 2 and files.vocab == 3
    with pytest.raises(DataError, match=r"no end-of-text token\. It needs one of: <\|endoftext\|>"):
        run(source, tmp_path / "none", tokenizer=word_level(tmp_path / "t.json", {"alpha": 0}))


def test_a_tokenizer_larger_than_the_model_is_refused_naming_both(tmp_path: Path, source: str) -> None:
    given = word_level(tmp_path / "t.json", {"</s>": 0, "alpha": 999})
    with pytest.raises(
        DataError, match=r"t\.json: its tokenizer has 1000 ids, but model\.vocab=999\. Set model\.vocab to 1000"
    ):
        run(source, tmp_path / "out", tokenizer=given, vocab=999)
    files = run(source, tmp_path / "out", tokenizer=given, vocab=1000)
    with pytest.raises(DataError, match=r"1000 ids, but model\.vocab=500"):
        open_tokens(files.folder, vocab=500)


def test_wrong_tokenizer_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.json: the tokenizer cannot be read: No such file"):
        load_tokenizer(tmp_path / "gone.json")
    for wrong in (b"{}", b"not json", b"\xff"):
        (tmp_path / "t.json").write_bytes(wrong)
        with pytest.raises(DataError, match=r"t\.json: not a tokenizer\.json"):
            load_tokenizer(tmp_path / "t.json")


# ------------------------------------------------------------------------------------------------------- prepare


def test_every_document_comes_back_once_in_order_and_in_one_split(tmp_path: Path) -> None:
    texts = [text_of(i) for i in range(120)]
    source = write_lines(tmp_path / "a.jsonl", [*texts[:60], *texts[:60], *texts[60:], *texts[100:]])
    files = run(source, tmp_path / "out")
    train, validation = decoded(files, files.train), decoded(files, files.validation)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert 10 < len(validation) < 40  # 24 expected of 120


def test_the_split_follows_from_the_content_alone(tmp_path: Path) -> None:
    texts = [text_of(i) for i in range(120)]
    first = run(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "a")
    (tmp_path / "b").mkdir()
    for i, text in enumerate(reversed(texts[:80])):
        (tmp_path / "b" / f"{i:03}.txt").write_text(text)
    second = run(str(tmp_path / "b"), tmp_path / "b.out")
    chosen = set(decoded(first, first.validation))
    assert set(decoded(second, second.validation)) == chosen & set(texts[:80])


def test_batches_do_not_change_the_result(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = content(run(source, tmp_path / "a").folder)
    monkeypatch.setattr(tokens_module, "BATCH_CHARACTERS", 100)
    assert content(run(source, tmp_path / "b").folder) == whole


@pytest.mark.parametrize("fraction", [1e-12, 1 - 1e-12])
@pytest.mark.parametrize("documents", [2, 3, 17])
def test_either_split_has_a_document_even_if_the_fraction_gives_it_none(
    tmp_path, fraction, documents, monkeypatch
) -> None:
    monkeypatch.setattr(tokens_module, "COPY_BYTES", 7)  # so that what follows the moved document moves in many blocks
    texts = [text_of(i) for i in range(documents)]
    files = run(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out", fraction=fraction)
    train, validation = decoded(files, files.train), decoded(files, files.validation)
    assert sorted(train + validation) == sorted(texts)
    assert len(train if fraction > 0.5 else validation) == 1
    more = validation if fraction > 0.5 else train
    assert more == [text for text in texts if text in more]
    back = run(write_lines(tmp_path / "b.jsonl", texts[::-1]), tmp_path / "b", fraction=fraction)
    assert set(decoded(back, back.validation)) == set(validation)


def test_one_document_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too short: it holds one document"):
        run(write_lines(tmp_path / "a.jsonl", ["same", "same"]), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_ids_are_two_bytes_wide_as_long_as_they_fit(tmp_path: Path, source: str) -> None:
    assert [token_dtype(vocab) for vocab in (257, 65536, 65537)] == ["uint16", "uint16", "uint32"]
    narrow = run(
        source, tmp_path / "a", tokenizer=word_level(tmp_path / "t.json", {"</s>": 0, "alpha": 65535}), vocab=10**6
    )
    wide = run(
        source, tmp_path / "b", tokenizer=word_level(tmp_path / "t.json", {"</s>": 0, "alpha": 65536}), vocab=10**6
    )
    assert narrow.train.tokens.dtype == np.uint16 and narrow.train.tokens.max() == 65535
    assert wide.train.tokens.dtype == np.uint32 and wide.train.tokens.max() == 65536


def test_preparing_twice_gives_equal_bytes_and_an_identity_that_follows_the_tokens(tmp_path: Path, source: str) -> None:
    first, second = run(source, tmp_path / "a"), run(source, tmp_path / "b")
    assert content(first.folder) == content(second.folder)
    assert set(content(first.folder)) == {
        "index.json",
        "tokenizer.json",
        *(f"{split}/{name}" for split in ("train", "validation") for name in ("tokens.bin", "offsets.npy")),
    }
    moved = Path(source).rename(tmp_path / "moved.jsonl")
    assert run(str(moved), tmp_path / "c").identity == first.identity == second.identity
    assert run(str(moved), tmp_path / "d", fraction=0.4).identity != first.identity


def test_what_is_there_is_not_overwritten(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    run(source, tmp_path / "empty")
    before = content(tmp_path / "empty")
    with pytest.raises(DataError, match="empty: holds prepared token files already"):
        run(source, tmp_path / "empty")
    assert content(tmp_path / "empty") == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="file: exists already"):
        run(source, tmp_path / "file")
    with pytest.raises(DataError, match=r"cannot be written: .*Not a directory"):
        run(source, tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2, float("nan")])
def test_a_fraction_that_leaves_a_split_without_documents_is_refused(tmp_path: Path, source: str, fraction) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation_fraction="):
        run(source, tmp_path / "out", fraction=fraction)


def test_a_prepared_folder_is_not_prepared_again(tmp_path: Path, source: str) -> None:
    run(source, tmp_path / "out")
    with pytest.raises(DataError, match="already tokenised"):
        run(str(tmp_path / "out"), tmp_path / "again")


def test_an_error_in_the_source_leaves_nothing_behind(tmp_path: Path, source: str) -> None:
    Path(source).write_text(Path(source).read_text() + "broken")
    with pytest.raises(DataError, match="line 121 is not JSON"):
        run(source, tmp_path / "out", tokenizer=word_level(tmp_path / "t.json", {"</s>": 0}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "t.json"]


# ------------------------------------------------------------------------------------------------------- entropy


def test_unigram_entropy_is_that_of_the_labels() -> None:
    split = split_of([[1, 2, 3, 0], [3, 3, 0], [0]], vocab=5)
    labels = Counter([2, 3, 0, 3, 0])
    expected = -sum(count / 5 * log(count / 5) for count in labels.values())
    assert unigram_entropy(split) == pytest.approx(expected, rel=1e-12)
    assert unigram_entropy(split_of([[0], [0]], vocab=5)) == 0
    assert str(unigram_entropy(split_of([[1, 2], [3, 2]], vocab=5))) == "0.0"


# ------------------------------------------------------------------------------------------------------- cache


def take(source, root, *, vocab=300, tokenizer=None, fraction=0.2):
    return cached(source=source, vocab=vocab, tokenizer=tokenizer, validation_fraction=fraction, cache_root=root)


def test_the_cache_prepares_once_and_anew_when_anything_changes(tmp_path: Path, source: str) -> None:
    root = tmp_path / "cache"
    first = take(source, root)
    stamp = first.folder.stat().st_mtime_ns, (first.folder / "index.json").stat().st_ino
    again = take(source, root)
    assert (again.folder.stat().st_mtime_ns, (again.folder / "index.json").stat().st_ino) == stamp
    folders = {first.folder, take(source, root, vocab=310).folder, take(source, root, fraction=0.3).folder}
    folders.add(take(source, root, tokenizer=str(first.tokenizer)).folder)
    os.utime(source, ns=(5, 5))
    folders.add(take(source, root).folder)
    assert len(folders) == 5


def test_a_damaged_entry_of_the_cache_is_made_anew(tmp_path: Path, source: str) -> None:
    first = take(source, tmp_path / "cache")
    before = content(first.folder)
    (first.folder / "train" / "tokens.bin").write_bytes(b"")
    assert content(take(source, tmp_path / "cache").folder) == before


def test_a_prepared_folder_is_used_as_it_is(tmp_path: Path, source: str) -> None:
    files = run(source, tmp_path / "out")
    found = take(str(tmp_path / "out"), tmp_path / "cache", tokenizer=str(files.tokenizer))
    assert found.folder == files.folder and not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match=r"out: its tokenizer has \d+ ids, but model\.vocab=200"):
        take(str(tmp_path / "out"), tmp_path / "cache", vocab=200)
    with pytest.raises(DataError, match=r"made with another tokenizer than data\.tokenizer="):
        take(str(tmp_path / "out"), tmp_path / "cache", tokenizer=word_level(tmp_path / "t.json", {"</s>": 0}))


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the cache cannot be written"):
        take(source, tmp_path / "file" / "cache")


# ------------------------------------------------------------------------------------------------------- processes

CHILD = """
import sys
from pathlib import Path
from core.data.tokens import cached, prepare
from core.errors import ZooError
kind, source, out, limit = sys.argv[1:]
if int(limit):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
print("ready", flush=True)
sys.stdin.readline()
try:
    settings = dict(source=source, vocab=300, tokenizer=None, validation_fraction=0.2)
    files = prepare(out=Path(out), **settings) if kind == "prepare" else cached(cache_root=Path(out), **settings)
    print(files.identity, files.folder)
except ZooError as error:
    print("refused:", error)
"""


def start(kind: str, source: str, out: Path, limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, kind, source, str(out), str(limit)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def both(processes: list[subprocess.Popen[str]]) -> list[str]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate(timeout=60)[0] for process in processes]


def test_two_processes_that_prepare_the_same_at_once_both_have_it(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [text_of(i) for i in range(4000)])
    for kind in ("cached", "prepare"):
        said = both([start(kind, source, tmp_path / kind) for _ in range(2)])
        assert said[0] == said[1] and "refused" not in said[0]
        assert not list(tmp_path.rglob("*.tmp"))


def test_the_loser_of_a_race_takes_the_winners_folder_only_if_it_is_the_same(tmp_path, source, monkeypatch) -> None:
    publish = tokens_module._publish

    def slow(folder: Path, out: Path) -> None:
        monkeypatch.setattr(tokens_module, "_publish", publish)
        run(source, out, fraction=others)  # the other process finishes just before this one
        publish(folder, out)

    for others in (0.2, 0.3):
        monkeypatch.setattr(tokens_module, "_publish", slow)
        out = tmp_path / f"out{others}"
        if others == 0.2:
            assert run(source, out, fraction=0.2).folder == out
        else:
            with pytest.raises(DataError, match="appeared with other content"):
                run(source, out, fraction=0.2)
        assert is_prepared(out) and not list(tmp_path.rglob("*.tmp"))


def test_a_killed_prepare_leaves_nothing_that_looks_whole_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [text_of(i) for i in range(20_000)])
    root = tmp_path / "cache"
    process = start("cached", source, root)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not list(root.glob(".*.tmp/train")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    left = list(root.glob(".*.tmp"))
    assert len(left) == 1 and not is_prepared(root / left[0].name.split(".")[1])
    assert [path.name for path in root.iterdir() if path.is_dir()] == [left[0].name]
    write_lines(tmp_path / "a.jsonl", [text_of(i) for i in range(200)])
    os.utime(source, ns=(1, 1))
    files = take(source, root)
    assert len(decoded(files, files.train)) + len(decoded(files, files.validation)) == 200


def test_what_a_killed_process_left_for_the_same_key_is_removed(tmp_path: Path, source: str) -> None:
    key = take(source, tmp_path / "other").folder.name
    left = tmp_path / "cache" / f".{key}.0123.tmp" / "train"
    left.mkdir(parents=True)
    take(source, tmp_path / "cache")
    assert not left.parent.exists()


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    # the limit on a file's size stands for the disk: writing fails half-way in the same way
    source = write_lines(tmp_path / "a.jsonl", [text_of(i) for i in range(4000)])
    (said,) = both([start("prepare", source, tmp_path / "out", limit=60_000)])
    assert said.startswith(f"refused: {tmp_path / 'out'}: cannot be written: File too large")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]

"""Tokenizers: a byte-level BPE trained on the data, or one that is given. Text never turns into a control token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from core.data.formats import Document
from core.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# How published tokenizers call the token that closes a document (GPT and Qwen, DeepSeek, Mixtral, Llama 3, Gemma).
END_OF_TEXT_NAMES = (END_OF_TEXT, "<｜end▁of▁sentence｜>", "</s>", "<|end_of_text|>", "<eos>")
SMALLEST_VOCAB = 257
SAMPLE_CHARACTERS = 8_000_000
SAMPLE_CHARACTERS_PER_DOCUMENT = 1 << 16


def train_tokenizer(documents: Iterable[Document], vocab: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab` ids (fewer if the text has no more pairs to join): id 0 is `<|endoftext|>`.

    Learnt from the first 8 million characters of `documents`, at most 65,536 of each; the same documents give the same tokenizer.
    Encoding loses nothing: decoding gives the text back. Raises DataError if vocab < 257 (the bytes and id 0).
    """
    if vocab < SMALLEST_VOCAB:
        raise DataError(
            f"model.vocab={vocab}: a byte-level tokenizer needs one id for each byte and one for the end of a text. "
            f"Works: {SMALLEST_VOCAB} or more."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents), trainer)
    return _plain(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json, or in the folder that holds one. Raises DataError if it is missing or not one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(
            f"{file}: the tokenizer cannot be read: {error.strerror}. Give the path of a tokenizer.json."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not a tokenizer.json: not UTF-8 at byte {error.start}.") from error
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{file}: not a tokenizer.json: {error}. Give one written by the tokenizers library."
        ) from error
    return _plain(tokenizer)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, which differs from the number of entries where ids have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def end_of_text_id(tokenizer: Tokenizer, name: str) -> int:
    """The id that closes a document. Raises DataError, with `name` for the tokenizer, if it has none that we know."""
    for token in END_OF_TEXT_NAMES:
        found = tokenizer.token_to_id(token)
        if found is not None:
            return found
    raise DataError(f"{name}: the tokenizer has no end-of-text token. It needs one of: {', '.join(END_OF_TEXT_NAMES)}.")


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Made to encode all of a text and nothing else: a file may ask for truncation or padding, and text may spell a control token."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _sample(documents: Iterable[Document]) -> Iterator[str]:
    left = SAMPLE_CHARACTERS
    for document in documents:
        text = document.text[: min(left, SAMPLE_CHARACTERS_PER_DOCUMENT)]
        left -= len(text)
        yield text
        if left <= 0:
            return

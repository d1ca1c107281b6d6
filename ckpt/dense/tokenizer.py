"""The tokenizer that a GGUF file carries in its metadata, as the tokenizer.json and tokenizer_config.json that others read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from core.config.family import TextSplit, all_families
from core.errors import CheckpointError

_PREFIX = "tokenizer.ggml."
# Kinds of tokens in a GGUF file.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
# How GGUF files call the ways of cutting text into words; the ways of families stand in models/.
_GPT2 = ("gpt-2", "default")
_SINGLE_DIGITS = ("smollm",)
_THREE_DIGITS = ("llama-bpe", "llama3", "llama-v3")
_THREE_DIGITS_SPLIT = TextSplit(
    pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "▁"
_log = logging.getLogger(__name__)


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json from a file's metadata; none, with a warning, for a kind that is not known here.

    where: the file, for messages. Raises CheckpointError where the metadata of a known kind does not hang together.
    """
    held = {name.removeprefix(_PREFIX): value for name, value in metadata.items() if name.startswith(_PREFIX)}
    kind, cut = held.get("model"), held.get("pre", "default")
    try:
        tokenizer = _byte_level(held, cut) if kind == "gpt2" else _sentence_pieces(held) if kind == "llama" else None
        if tokenizer is None:
            _log.warning(
                "%s: its tokenizer (%s, %s) is of no kind known here; give a tokenizer.json instead", where, kind, cut
            )
            return {}
        _add_tokens(tokenizer, held, opens=bool(held.get("add_bos_token", kind == "llama")))
        config = _config(held, metadata.get("tokenizer.chat_template"))
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise CheckpointError(f"{where}: the tokenizer in its metadata does not hang together: {error!r}") from error
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
    }


def _byte_level(held: Mapping[str, Any], cut: str) -> Tokenizer | None:
    """A byte-pair encoding over bytes, its merges given in order; None where nobody knows how it cuts text into words."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    families = {kin.model_type: kin.text for family in all_families() for kin in family.dense}
    split = _THREE_DIGITS_SPLIT if cut in _THREE_DIGITS else families.get(cut)
    if cut in _GPT2:
        words: pre_tokenizers.PreTokenizer = byte_level
    elif cut in _SINGLE_DIGITS:
        words = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif split is not None:
        pattern = pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")
        bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words = pre_tokenizers.Sequence([pattern, bytes_alone])
    else:
        return None
    vocab = {token: number for number, token in enumerate(held["tokens"])}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in held["merges"])]
    # Llama 3 takes a word that is a token as it is, whatever its merges would give.
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=cut in _THREE_DIGITS))
    if split is not None and split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(held: Mapping[str, Any]) -> Tokenizer:
    """A byte-pair encoding as SentencePiece has it: of two neighbours those are joined first whose whole has the higher score, and
    what is no token falls apart into bytes."""
    vocab = {token: number for number, token in enumerate(held["tokens"])}
    unknown = held["tokens"][held["unknown_token_id"]] if "unknown_token_id" in held else None
    tokenizer = Tokenizer(
        models.BPE(vocab, list(_merges(held, vocab)), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    strip = []
    if held.get("add_space_prefix", True):
        spaces = [normalizers.Prepend(_SPACE), *spaces]
        strip = [decoders.Strip(content=" ", left=1, right=0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(held: Mapping[str, Any], vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The pairs that become a token, best score first; of pairs that become the same one, any: its parts decide which can stand."""
    ranked = sorted(zip(held["scores"], held["tokens"], held["token_type"], strict=True), key=lambda entry: -entry[0])
    for _, token, kind in ranked:
        if kind not in (_CONTROL, _BYTE):
            splits = ((token[:i], token[i:]) for i in range(1, len(token)))
            yield from (pair for pair in splits if pair[0] in vocab and pair[1] in vocab)


def _add_tokens(tokenizer: Tokenizer, held: Mapping[str, Any], *, opens: bool) -> None:
    """Control tokens and whole words, which keep their numbers; `opens`: the first token opens every text."""
    kinds = held.get("token_type", ())
    for token, kind in zip(held["tokens"], kinds, strict=bool(kinds)):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            added = [AddedToken(token, special=special, normalized=False)]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    if opens and "bos_token_id" in held:
        number = held["bos_token_id"]
        first = held["tokens"][number]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first}:1 $B:1", special_tokens=[(first, number)]
        )


def _config(held: Mapping[str, Any], chat_template: str | None) -> dict[str, Any]:
    """The fields of tokenizer_config.json."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    numbers = {field: held.get(f"{name}_token_id") for field, name in names.items()}
    named = {field: held["tokens"][number] for field, number in numbers.items() if number is not None}
    template = {} if chat_template is None else {"chat_template": chat_template}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named, **template}

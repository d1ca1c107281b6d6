"""Reads the fields of a published config.json one by one, so that none is overlooked: what was not asked for is a fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from core.config.architecture import ModelConfig, Rope, Yarn
from core.errors import ConfigError, Fault, RequestError

# Fields that say how files, tokenizers, generation or training code behave; what the model computes does not depend on them.
# fmt: off
HARMLESS = frozenset(
    (
        "_name_or_path", "_attn_implementation", "_experts_implementation", "architectures", "auto_map",
        "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "cls_token_id",
        "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
        "encoder_no_repeat_ngram_size", "eos_token_id", "ep_size", "exponential_decay_length_penalty",
        "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "label2id",
        "length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
        "num_beams", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
        "output_router_logits", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
        "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
        "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
        "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
        "transformers_version", "typical_p", "unk_token_id", "use_bfloat16", "use_cache",
    )
)
# fmt: on
_ABSENT = object()
EMBEDDING_STD = "embedding_initializer_range"
_YARN = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)
_KINDS: dict[type, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    bool: (bool,),
    list: (list, tuple),
    dict: (dict,),
}


class Fields:
    """The fields of one config.json; faults are collected and raised together by `finish`.

    `where` is what the user gave, such as the path of the file.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self._where = where
        self._asked: set[str] = set()
        self._faults: list[Fault] = []

    def integer(self, *names: str, default: Any = _ABSENT) -> int:
        """A whole number of at least zero under the first of `names` that is there."""
        return self._read(names, int, default, 0)

    def optional_integer(self, *names: str) -> int | None:
        """A whole number, or None where there is none or it is null."""
        value: int | None = self._read(names, int, None, 0)
        return value

    def number(self, *names: str, default: Any = _ABSENT) -> float:
        """A number, as float."""
        return float(self._read(names, float, default, 0.0))

    def optional_number(self, *names: str) -> float | None:
        """A number, or None where there is none or it is null."""
        value = self._read(names, float, None, 0.0)
        return None if value is None else float(value)

    def flag(self, *names: str, default: Any = _ABSENT) -> bool:
        """True or false."""
        return self._read(names, bool, default, False)

    def integers(self, *names: str) -> tuple[int, ...]:
        """A list of whole numbers; empty where it is not there."""
        return tuple(self._read(names, list, None, None) or ())

    def section(self, *names: str) -> dict[str, Any]:
        """A nested object; empty where it is absent or null."""
        return dict(self._read(names, dict, None, None) or {})

    def only(self, name: str, *allowed: Any) -> None:
        """A field that, where present, must have one of the allowed values: anything else is mathematics we do not have."""
        self._asked.add(name)
        value = self._config.get(name, _ABSENT)
        if value is not _ABSENT and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed
        ):
            works = " or ".join(_json(a) for a in allowed)
            self.fault(name, value, "asks for mathematics that this family does not have", works)

    def window(self, name: str, longest: int) -> None:
        """A sliding window that, where present, must be as long as the longest sequence, so that it hides nothing."""
        value = self._read((name,), int, None, None)
        if value is not None and value < longest:
            self.fault(
                name, value, "hides earlier tokens, which no attention of the zoo does", f"null, or at least {longest}"
            )

    def quantization(self) -> None:
        """Weights may be float8 in scaled blocks of 128 x 128, which the reader sees from the file: no other quantisation."""
        section = self.section("quantization_config")
        read = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        for key in sorted(set(read) & set(section)):
            if section[key] != read[key]:
                self.fault(
                    f"quantization_config.{key}",
                    section[key],
                    "is no quantisation that the zoo reads",
                    _json(read[key]),
                )
        if section and "quant_method" not in section:
            self.fault("quantization_config", section, "does not say its quant_method", '"fp8"')

    def ignore(self, *names: str) -> None:
        """Fields that another field makes redundant."""
        self._asked.update(names)

    def fault(self, name: str, value: Any, rule: str, works: str) -> None:
        """Record something wrong with a field."""
        self._faults.append(Fault(setting=f"{self._where}: {name}", value=_json(value), rule=rule, works=works))

    def finish(self) -> None:
        """Raise ConfigError with every fault, among them each field that nothing asked for and that is not known as harmless."""
        self.only("is_encoder_decoder", False)
        self.only("add_cross_attention", False)
        self.only("cross_attention_hidden_size", None)
        self.only("layer_types", None, ["full_attention"] * len(self._config.get("layer_types") or ()))
        for name in sorted(set(self._config) - self._asked - HARMLESS):
            rule = "is not a field that this family knows, and it might change what the model computes"
            self.fault(name, self._config[name], rule, "no such field")
        self.stop()

    def stop(self) -> None:
        """Raise ConfigError with the faults so far, if any."""
        if self._faults:
            raise ConfigError(self._faults)

    def _read(self, names: Iterable[str], kind: type, default: Any, instead: Any) -> Any:
        """The value under the first name that is there, checked; `instead` after a fault, so that reading can go on."""
        names = tuple(names)
        self._asked.update(names)
        found = [name for name in names if name in self._config]
        if not found:
            if default is _ABSENT:
                self.fault(names[0], None, "is missing", f"a value of type {kind.__name__}")
                return instead
            return default
        value = self._config[found[0]]
        if value is None and default is None:
            return None
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind is not bool):
            self.fault(found[0], value, f"must be of type {kind.__name__}", f"a value of type {kind.__name__}")
            return instead
        if isinstance(value, int | float) and (value < 0 or not math.isfinite(value)):
            self.fault(found[0], value, "must not be negative or infinite", "a positive number")
            return instead
        return value


def read_rope(fields: Fields, *, default_theta: float, scales_softmax: bool) -> Rope | Yarn:
    """The rotary embedding under `rope_theta` and `rope_scaling` (published files) or `rope_parameters` (transformers 5).

    scales_softmax: whether mscale_all_dim also scales the softmax (latent attention does so, grouped-query does not).
    """
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    theta = fields.number("rope_theta", default=default_theta)
    scaling = new or old
    theta = scaling.pop("rope_theta", theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    name = "rope_parameters" if new else "rope_scaling"
    longest = fields.integer("max_position_embeddings")
    rest = {k: v for k, v in scaling.items() if k not in ("type", "rope_type")}
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        fields.fault("rope_theta", theta, "must be a positive number", "10000.0")
        theta = default_theta
    if kind == "default":
        _only_known(fields, name, rest, {"partial_rotary_factor": 1.0})
        return Rope(theta=float(theta))
    if kind != "yarn":
        fields.fault(name, kind, "is not a rotary embedding that the zoo has", "default or yarn")
        return Rope(theta=float(theta))
    given = {key: rest.pop(key) for key in _YARN if rest.get(key) is not None}
    _only_known(fields, name, rest, {"partial_rotary_factor": 1.0, "truncate": True, "finetuned": True})
    wrong = {
        key: value for key, value in given.items() if isinstance(value, bool) or not isinstance(value, int | float)
    }
    if wrong:
        fields.fault(name, wrong, "must hold numbers", "numbers")
        return Rope(theta=float(theta))
    return _yarn(fields, name, {k: float(v) for k, v in given.items()}, (float(theta), longest, scales_softmax))


def write_rope(rope: Rope | Yarn, *, scales_softmax: bool) -> dict[str, Any]:
    """The fields `rope_theta` and `rope_scaling` of `rope`, as published files have them."""
    if isinstance(rope, Rope):
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": rope.factor,
        "original_max_position_embeddings": rope.trained_tokens,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
    }
    if scales_softmax and rope.mscale_all_dim:
        scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        if not rope.mscale:  # readers take a zero for an absent field
            scaling["attention_factor"] = 1.0 / magnitude(rope.factor, rope.mscale_all_dim)
    elif rope.mscale != 1.0:
        scaling["attention_factor"] = magnitude(rope.factor, rope.mscale)
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def write_init(model: ModelConfig) -> dict[str, float]:
    """The standard deviations of a new model's weights; the embedding's own is a field of this zoo, absent where it has none."""
    own = {} if model.embedding_std is None else {EMBEDDING_STD: model.embedding_std}
    return {"initializer_range": model.init_std, **own}


def cannot_write(family: str, why: str) -> RequestError:
    """The error for a model that a family's config.json cannot express."""
    return RequestError(
        f"this model cannot be written as a {family} folder: {why}. Save it as a checkpoint of the zoo instead."
    )


def magnitude(factor: float, scale: float) -> float:
    """YaRN's m(scale) = 0.1 * scale * ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(fields: Fields, name: str, given: dict[str, float], rest: tuple[float, int, bool]) -> Yarn:
    """YaRN as declared, its magnitude of cosine and sine brought to our two numbers mscale and mscale_all_dim."""
    theta, longest, scales_softmax = rest
    trained = given.get("original_max_position_embeddings", float(longest)) or 1.0
    factor = given.get("factor", longest / trained)
    mscale, all_dim = given.get("mscale", 0.0), given.get("mscale_all_dim", 0.0)
    softmax_dim = all_dim if scales_softmax else 0.0
    usual = magnitude(factor, mscale) / magnitude(factor, all_dim) if mscale and all_dim else magnitude(factor, 1.0)
    wanted = given.get("attention_factor", usual) * magnitude(factor, softmax_dim)
    if factor <= 1 and wanted != 1.0:
        fields.fault(name, factor, "with an attention factor other than 1 needs a factor above 1", "a factor above 1")
        factor = 2.0
    if factor <= 1 or math.isclose(wanted, magnitude(factor, 1.0), rel_tol=1e-12):
        ours = 1.0
    elif math.isclose(wanted, magnitude(factor, mscale), rel_tol=1e-12):
        ours = mscale
    else:
        ours = (wanted - 1.0) / (0.1 * math.log(factor))
    return Yarn(
        theta=theta,
        factor=factor,
        trained_tokens=int(trained),
        beta_fast=given.get("beta_fast", 0.0) or 32.0,
        beta_slow=given.get("beta_slow", 0.0) or 1.0,
        mscale=ours,
        mscale_all_dim=softmax_dim,
    )


def _only_known(fields: Fields, name: str, rest: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """A fault for each entry of the rotary section that is neither read nor allowed."""
    for key, value in rest.items():
        if value is not None and (key not in allowed or value != allowed[key]):
            works = _json(allowed[key]) if key in allowed else "no such field"
            fields.fault(f"{name}.{key}", value, "is not something that the zoo's rotary embedding has", works)


def _json(value: Any) -> str:
    """A value as it stands in a config.json."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if not isinstance(value, str) else f'"{value}"'

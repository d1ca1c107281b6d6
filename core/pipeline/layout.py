"""The stage language: which layers lie on which pipeline rank and virtual stage, as text and as data.

`Et*3|(tt|)*29m|L` is 32 stages: embedding and three decoder layers, 29 times two layers, a multi-token prediction module, the
loss (report section 7.5). Stage s lies on pipeline rank s % pp as its chunk s // pp. Letters: E embedding, t decoder layer,
m multi-token prediction module, L loss; `|` ends a stage, which may be empty; commas are ignored; `c*n` repeats the one
character before it, also `|`; `( … )*n` repeats a group, which may hold `|` and `c*n` but no group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from core.config.architecture import ModelConfig
from core.config.mapping import ParallelConfig
from core.errors import ConfigError, Fault

LETTERS = "EtmL|"
# More characters than any model has layers and any machine has stages: a mistyped count must not fill the memory.
LONGEST = 100_000
DIGITS = 9
SETTING = "parallel.layout"
REPEAT = re.compile(r"\*([0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one stage holds: the embedding, decoder layers and prediction modules by global index, the loss."""

    embedding: bool
    layers: tuple[int, ...]
    ahead: tuple[int, ...]
    loss: bool


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All stages in the order in which a microbatch passes them: stage s is parts[s], on rank s % pp as chunk s // pp."""

    parts: tuple[Part, ...]
    pp: int

    @property
    def virtual(self) -> int:
        """Stages per pipeline rank."""
        return len(self.parts) // self.pp

    def part(self, pp_rank: int, chunk: int) -> Part:
        """What pipeline rank `pp_rank` holds as its `chunk`."""
        return self.parts[chunk * self.pp + pp_rank]

    def parts_of(self, pp_rank: int) -> tuple[Part, ...]:
        """What pipeline rank `pp_rank` holds, by chunk."""
        return self.parts[pp_rank :: self.pp]

    def embedding_stages(self, tied: bool) -> tuple[int, ...]:
        """The pipeline ranks with a copy of the embedding, ascending: for E, for every m, and for L if its matrix is tied."""
        needs = (
            s % self.pp for s, part in enumerate(self.parts) if part.embedding or part.ahead or (tied and part.loss)
        )
        return tuple(sorted(set(needs)))


def layout_of(model: ModelConfig, parallel: ParallelConfig) -> Layout:
    """The layout of a run: the one that `parallel` spells out, or the even one.

    parallel.vpp=1 beside a layout text means what the text implies. Raises ConfigError with every fault.
    """
    num_layers, num_ahead = len(model.layers), model.predict_ahead.depth if model.predict_ahead else 0
    if parallel.layout is None:
        return even_layout(num_layers=num_layers, num_ahead=num_ahead, pp=parallel.pp, vpp=parallel.vpp)
    layout = parse_layout(parallel.layout, num_layers=num_layers, num_ahead=num_ahead, pp=parallel.pp)
    if parallel.vpp not in (1, layout.virtual):
        rule = (
            f"the layout '{parallel.layout}' has {_stages(len(layout.parts))}, "
            f"{layout.virtual} on each of parallel.pp={parallel.pp} pipeline ranks"
        )
        works = str(layout.virtual) + ("" if layout.virtual == 1 else ", or 1, which takes it from the layout")
        raise ConfigError(
            [Fault(code="layout.vpp", setting="parallel.vpp", value=parallel.vpp, rule=rule, works=works)]
        )
    return layout


def even_layout(*, num_layers: int, num_ahead: int, pp: int, vpp: int) -> Layout:
    """Layers spread over pp * vpp stages, embedding on the first, prediction modules and loss on the last.

    Numbers of layers differ by at most one, and the larger ones are neither first nor last where there are others. Fewer layers
    than stages leave some empty. Raises ConfigError unless pp and vpp are positive and their product can be meant.
    """
    faults = [*_positive("parallel.pp", pp), *_positive("parallel.vpp", vpp)]
    if not faults and pp * vpp > LONGEST:
        rule = f"makes {pp * vpp:,} stages with parallel.pp={pp}, more than {LONGEST:,}"
        faults.append(
            Fault(
                code="layout.stages",
                setting="parallel.vpp",
                value=vpp,
                rule=rule,
                works=f"{max(num_layers // pp, 1)} or fewer",
            )
        )
    if faults:
        raise ConfigError(faults)
    stages = pp * vpp
    least, more = divmod(num_layers, stages)
    larger = set([*range(1, stages - 1), 0][:more])
    stages_text = ["t" * (least + (s in larger)) for s in range(stages)]
    stages_text[0] = "E" + stages_text[0]
    stages_text[-1] += "m" * num_ahead + "L"
    return Layout(parts=_parts(stages_text), pp=pp)


def parse_layout(text: str, *, num_layers: int, num_ahead: int, pp: int) -> Layout:
    """The layout that `text` describes, for a model of `num_layers` and `num_ahead` modules. Raises ConfigError with every fault."""
    faults = _positive("parallel.pp", pp)
    stages, unreadable = _read(text)
    rules = [unreadable] if unreadable else _broken_rules(stages, num_layers, num_ahead)
    if rules:
        faults.append(
            Fault(
                code="layout.text",
                setting=SETTING,
                value=text,
                rule="; ".join(rules),
                works=_example(num_layers, num_ahead, pp),
            )
        )
    if pp >= 1 and len(stages) % pp:
        verb = f"has {_stages(len(stages))}, which {pp} pipeline ranks cannot share evenly"
        works = _divisors_near(len(stages), pp)
        faults.append(
            Fault(code="layout.pp", setting="parallel.pp", value=pp, rule=f"the layout '{text}' {verb}", works=works)
        )
    if faults:
        raise ConfigError(faults)
    return Layout(parts=_parts(stages), pp=pp)


def layout_text(layout: Layout) -> str:
    """The shortest usual spelling: `c*n` for three and more of a kind, `( … )*n` for equal neighbours where it is shorter.

    `parse_layout` of it gives the layout back.
    """
    stages = [part_text(part) for part in layout.parts]
    last = stages.pop()
    pieces = []
    for stage, same in groupby(stages):
        count = len(list(same))
        plain, repeated = f"{stage}|" * count, f"({stage}|)*{count}"
        pieces.append(repeated if stage and len(repeated) < len(plain) else plain)
    ends = re.sub(r"\|{3,}", lambda run: f"|*{len(run[0])}", "".join(pieces))
    return ends + last


def part_text(part: Part) -> str:
    """One stage in the language of layouts; empty where it holds nothing."""
    counts = ((part.embedding, "E"), (len(part.layers), "t"), (len(part.ahead), "m"), (part.loss, "L"))
    return "".join(letter * count if count < 3 else f"{letter}*{count}" for count, letter in counts)


class _UnreadableError(Exception):
    """The text is not of the language: what is wrong `at` which character of the text without its commas."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(what)
        self.at = at


def _read(text: str) -> tuple[list[str], str | None]:
    """The stages as plain letters, or the rule that the text breaks, with the place as the user sees it."""
    places = [i for i, character in enumerate(text) if character != ","]
    bare = text.replace(",", "")
    try:
        return _expand(bare, 0, len(bare), grouped=False).split("|"), None
    except _UnreadableError as error:
        place = places[error.at] + 1 if error.at < len(places) else len(text)
        return [], f"{error} (character {place} of {len(text)})"


def _expand(text: str, at: int, end: int, *, grouped: bool) -> str:
    """text[at:end] with groups and counts written out. Raises _UnreadableError."""
    out: list[str] = []
    size = 0
    while at < end:
        begin, character = at, text[at]
        if character == "(" and not grouped:
            close = text.find(")", at, end)
            if close < 0:
                raise _UnreadableError(at, "the group opened here is not closed")
            written = _expand(text, at + 1, close, grouped=True)
            at, times = _count(text, close + 1, end)
            if times is None:
                raise _UnreadableError(close, "a group needs a count, as in (tt|)*3")
        elif character in LETTERS:
            written = character
            at, times = _count(text, at + 1, end)
        else:
            raise _UnreadableError(at, _stray(character, grouped))
        size += len(written) * (1 if times is None else times)
        if size > LONGEST:
            raise _UnreadableError(begin, f"spells out more than {LONGEST:,} letters from here")
        out.append(written * (1 if times is None else times))
    return "".join(out)


def _count(text: str, at: int, end: int) -> tuple[int, int | None]:
    """Where the text goes on after `*n` at `at`, and n; None where no count stands there. Raises _UnreadableError."""
    if at >= end or text[at] != "*":
        return at, None
    found = REPEAT.match(text, at, end)
    number = int(found[1][:DIGITS]) if found else 0
    if found is None or number < 1:
        raise _UnreadableError(at, "* needs a whole number of 1 or more after it")
    return found.end(), number


def _stray(character: str, grouped: bool) -> str:
    if character == "(" and grouped:
        return "a group cannot hold a group"
    if character == ")":
        return ") closes no group"
    if character == "*":
        return "* must follow one of E, t, m, L, | or a group, and only once"
    if character.isspace():
        return "spaces are not allowed"
    return f"{character!r} is not one of E (embedding), t (layer), m (multi-token prediction), L (loss), |, ( and )"


def _broken_rules(stages: list[str], num_layers: int, num_ahead: int) -> list[str]:
    """What the stages lack or have too much of for the model."""
    items = "".join(stages)
    broken = []
    for letter, name in (("E", "embedding"), ("L", "loss")):
        number = items.count(letter)
        if number != 1:
            broken.append(f"has {number or 'no'} {letter}, and the model has one {name}")
    if items.count("E") == 1 and not stages[0].startswith("E"):
        broken.append("must begin with E, since a microbatch enters at the first stage")
    if items.count("L") == 1 and not stages[-1].endswith("L"):
        broken.append("must end with L, since a microbatch ends at the last stage")
    for letter, wanted, name in (("t", num_layers, "model.num_layers"), ("m", num_ahead, "model.predict_ahead.depth")):
        number = items.count(letter)
        if number != wanted:
            broken.append(f"has {number} {letter}, and {name}={wanted}")
    if "m" in items and items.find("m") < items.rfind("t"):
        broken.append("has m before the last t, on whose output every multi-token prediction module works")
    return broken


def _parts(stages: Iterable[str]) -> tuple[Part, ...]:
    """Parts from stages as plain letters; layers and modules are numbered as they come."""
    parts = []
    layer = module = 0
    for stage in stages:
        layers, ahead = stage.count("t"), stage.count("m")
        parts.append(
            Part(
                embedding="E" in stage,
                layers=tuple(range(layer, layer + layers)),
                ahead=tuple(range(module, module + ahead)),
                loss="L" in stage,
            )
        )
        layer, module = layer + layers, module + ahead
    return tuple(parts)


def _example(num_layers: int, num_ahead: int, pp: int) -> str:
    """A text that works: the even layout."""
    even = even_layout(num_layers=num_layers, num_ahead=num_ahead, pp=min(max(pp, 1), max(num_layers, 1)), vpp=1)
    return f"{layout_text(even)} for parallel.pp={even.pp}, or none, which spreads evenly"


def _positive(setting: str, value: int) -> list[Fault]:
    return (
        []
        if value >= 1
        else [Fault(code="value.at-least", setting=setting, value=value, rule="must be positive", works="1 or more")]
    )


def _divisors_near(number: int, wanted: int) -> str:
    """The two divisors of `number` next to `wanted`, nearest first."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return ", or ".join(map(str, sorted(divisors, key=lambda d: abs(d - wanted))[:2]))


def _stages(number: int) -> str:
    return "1 stage" if number == 1 else f"{number} stages"

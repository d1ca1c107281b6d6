"""How well the throughput model (launch/plan/time.py) meets published figures: `python -m benchmarks.throughput_model`.

Prints rows that its constants were fitted to, rows that were not, a baseline of one utilisation for each kind of hardware and
precision, pairs of set-ups that differ in mapping alone, and the times of the report's Table 7. `--fit` fits the constants again and
prints what belongs into launch/profiles.py and below; `--splits` fits them to other halves of the rows too. docs/throughput.md says what all of it means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from math import exp, log
from statistics import mean, median

from benchmarks.published_rows import Row, read_rows, run_of, split
from core.config.architecture import MoE
from core.config.flops import flops_per_token
from core.config.mapping import DispatcherName, ParallelConfig
from core.config.run import RunConfig
from launch.plan.communication import Links, dispatched
from launch.plan.time import plan_time
from launch.plan.work import Share
from launch.profiles import Profile, find_profile


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What is fitted. The first eight stand in the profiles: shares of peaks, how much faster GB300 and B300 compute than other Blackwells
    by the same figures (ultra: they may draw more power), passes over memory, overlap, and what a host takes.

    fused: how many times as fast products in a recipe's format and passes over memory are where experts' products, activation and
    quantisation are one kernel, and attention where it is FP8. release_*: speed of a release, as a share of 26.04's; 26_06 is 26.08 too.
    """

    products: float
    low_products_hopper: float
    low_products_blackwell: float
    ultra: float
    streamed: float
    overlapped: float
    launch_seconds: float
    combined_launches: float
    fused: float
    release_25_11: float
    release_26_02: float
    release_report: float
    release_26_06: float


# Where a fit begins, and what it is drawn to with the weight of a thirtieth of the rows; standard deviations of the logarithm.
START = Constants(
    products=0.6,
    low_products_hopper=0.5,
    low_products_blackwell=0.5,
    ultra=1.05,
    streamed=1.5,
    overlapped=0.7,
    launch_seconds=1e-2,
    combined_launches=1.2,
    fused=1.2,
    release_25_11=0.97,
    release_26_02=0.98,
    release_report=1.0,
    release_26_06=1.05,
)
SPREAD = Constants(
    products=0.3,
    low_products_hopper=0.4,
    low_products_blackwell=0.4,
    ultra=0.1,
    streamed=0.5,
    overlapped=0.3,
    launch_seconds=0.7,
    combined_launches=0.3,
    fused=0.3,
    release_25_11=0.05,
    release_26_02=0.05,
    release_report=0.05,
    release_26_06=0.05,
)
# Blackwell Ultra.
ULTRA = ("gb300", "b300")
# Of the published software alone: no profile has them.
FUSED = 1.183
RELEASES = {"25.11": 0.960, "26.02": 0.982, "report": 0.999, "26.06": 1.057}


def shipped() -> Constants:
    """The constants of the profiles, and those of the published software."""
    hopper, blackwell, ultra = (find_profile(name).speeds for name in ("h100", "gb200", "gb300"))
    assert hopper is not None and blackwell is not None and ultra is not None, "all have been fitted"
    return Constants(
        products=blackwell.products,
        low_products_hopper=hopper.low_products,
        low_products_blackwell=blackwell.low_products,
        ultra=ultra.products / blackwell.products,
        streamed=blackwell.streamed,
        overlapped=blackwell.overlapped,
        launch_seconds=blackwell.launch_seconds,
        combined_launches=blackwell.combined_launches,
        fused=FUSED,
        release_25_11=RELEASES["25.11"],
        release_26_02=RELEASES["26.02"],
        release_report=RELEASES["report"],
        release_26_06=RELEASES["26.06"],
    )


def profile_of(row: Row, constants: Constants) -> Profile:
    """The row's hardware with these constants, and with the kernels that it ran."""
    profile = find_profile(row.hardware)
    speeds = profile.speeds
    assert speeds is not None, "every published row is on hardware with speeds"
    fused = constants.fused if row.fused else 1.0
    attention = constants.fused if row.fp8_attention else 1.0
    low = constants.low_products_hopper if row.hardware == "h100" else constants.low_products_blackwell
    ultra = constants.ultra if row.hardware in ULTRA else 1.0
    near, far = _attention("h100" if row.hardware == "h100" else "gb200")
    changed = replace(
        speeds,
        products=constants.products * ultra,
        low_products=low * fused * ultra,
        streamed=constants.streamed / fused / ultra,
        overlapped=min(constants.overlapped, 1.0),
        launch_seconds=constants.launch_seconds,
        combined_launches=constants.combined_launches,
        attention=(near[0] * attention * ultra, near[1] * attention * ultra),
        long_attention=(far[0] * attention * ultra, far[1] * attention * ultra),
    )
    return replace(profile, speeds=changed)


def _attention(hardware: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """The rates of Table 9, which the profile has as they are printed."""
    speeds = find_profile(hardware).speeds
    assert speeds is not None, "both have speeds"
    return speeds.attention, speeds.long_attention


def release_speed(row: Row, constants: Constants) -> float:
    """Of the row's software."""
    speeds = {
        "25.11": constants.release_25_11,
        "26.02": constants.release_26_02,
        "report": constants.release_report,
        "26.06": constants.release_26_06,
        "26.08": constants.release_26_06,
    }
    return speeds.get(row.release if row.release == "report" else row.release[:5], 1.0)


def predicted(row: Row, constants: Constants, *, exact: bool = True) -> float:
    """Tokens a second of one GPU."""
    planned = plan_time(run_of(row), profile_of(row, constants), exact=exact)
    return planned.step.tokens_per_second * release_speed(row, constants)


def errors(rows: tuple[Row, ...], constants: Constants, *, exact: bool = True) -> list[float]:
    """predicted / published - 1."""
    return [predicted(row, constants, exact=exact) / row.tokens_per_second - 1 for row in rows]


def utilisation(row: Row) -> float:
    """Model FLOP a second over the peak of the row's precision."""
    chip = find_profile(row.hardware).chip
    assert chip is not None, "every published row is on known hardware"
    peak = chip.bfloat16 if row.precision == "bf16" else chip.fp8
    assert peak is not None, "every row's precision has a peak"
    return row.tokens_per_second * flops_per_token(run_of(row).model, row.sequence) / peak


def baseline(fitted: tuple[Row, ...], rows: tuple[Row, ...]) -> list[float]:
    """Errors of one utilisation for each kind of hardware and precision: the geometric mean of the fitted rows. Where none is of both,
    that of the generation and the width, and else of the width alone."""

    def alike(row: Row) -> list[Row]:
        narrow = [each for each in fitted if (each.hardware, each.precision) == (row.hardware, row.precision)]
        width = [each for each in fitted if (each.precision == "bf16") == (row.precision == "bf16")]
        wide = [each for each in width if (each.hardware == "h100") == (row.hardware == "h100")]
        return narrow or wide or width

    return [exp(mean(log(utilisation(each)) for each in alike(row))) / utilisation(row) - 1 for row in rows]


def pairs(rows: tuple[Row, ...]) -> Iterator[tuple[Row, Row]]:
    """Rows of one model, hardware, precision, number of GPUs, sequence and software that differ in mapping, microbatch or dispatcher,
    with published figures at least 2 % apart. Software: with fused kernels or without; its releases differ by less."""
    for i, one in enumerate(rows):
        for other in rows[i + 1 :]:
            alike = (one.kind, one.mtp, one.fused) == (other.kind, other.mtp, other.fused)
            mapped = (one.mapping, one.dispatcher) != (other.mapping, other.dispatcher)
            if alike and mapped and abs(log(one.tokens_per_second / other.tokens_per_second)) > 0.02:
                yield one, other


def fit(rows: tuple[Row, ...], start: Constants, report: Callable[[str], None]) -> Constants:
    """Constants that bring log(predicted / published) of `rows` near 0: Gauss-Newton on logarithms, where an error of more than a tenth
    counts by its size and not by its square, so that a few odd rows do not decide."""
    import numpy as np

    names = [field.name for field in fields(Constants)]
    begin, spread = (np.array([asdict(each)[name] for name in names]) for each in (START, SPREAD))
    weight = 0.03 * len(rows) ** 0.5 / spread

    def residuals(values: np.ndarray) -> np.ndarray:
        constants = Constants(**dict(zip(names, map(float, values), strict=True)))
        return np.log1p(np.array(errors(rows, constants, exact=False)))

    def loss(found: np.ndarray, drawn: np.ndarray) -> float:
        return float(0.02 * (np.sqrt(1 + (found / 0.1) ** 2) - 1).sum() + (drawn**2).sum())

    values = np.array([asdict(start)[name] for name in names])
    found, drawn, damping = residuals(values), weight * np.log(values / begin), 1e-3
    for step in range(15):
        slopes = np.stack(
            [(residuals(values * np.where(np.arange(len(names)) == i, 1.02, 1.0)) - found) for i in range(len(names))],
            axis=1,
        ) / log(1.02)
        scale = 1 / np.sqrt(1 + (found / 0.1) ** 2)
        curve = slopes.T @ (scale[:, None] * slopes) + np.diag(weight**2)
        down = slopes.T @ (scale * found) + weight * drawn
        better = False
        while not better and damping < 1e4:
            move = np.clip(-np.linalg.solve(curve + damping * np.diag(np.diag(curve)), down), -0.4, 0.4)
            tried = values * np.exp(move)
            at, pulled = residuals(tried), weight * np.log(tried / begin)
            better = loss(at, pulled) < loss(found, drawn)
            damping = damping / 5 if better else damping * 4
        if not better:
            break
        gained = loss(found, drawn) - loss(at, pulled)
        values, found, drawn = tried, at, pulled
        report(f"step {step + 1}: mean error {100 * np.abs(np.expm1(found)).mean():.2f} %")
        if gained < 1e-6:
            break
    return Constants(**dict(zip(names, map(float, values), strict=True)))


# Report Table 7, microseconds: by ep, HybridEP and all-to-all on GB200, and on H100.
TABLE_7 = {
    "dispatch": {
        8: (391, 735, 661, 1265),
        16: (578, 743, 1485, 5774),
        32: (612, 769, 3064, 8059),
        64: (675, 930, 4626, 9164),
    },
    "combine": {
        8: (353, 741, 624, 1277),
        16: (527, 765, 1688, 5628),
        32: (646, 758, 3088, 7815),
        64: (744, 827, 4398, 8727),
    },
}
COLUMNS: tuple[tuple[str, DispatcherName], ...] = (
    ("gb200", "hybridep"),
    ("gb200", "alltoall"),
    ("h100", "hybridep"),
    ("h100", "alltoall"),
)


def exchanged(hardware: str, dispatcher: DispatcherName, ep: int) -> float:
    """Microseconds of one dispatch of 4,096 tokens of DeepSeek-V3, one way."""
    deepseek = next(row for row in read_rows() if row.model == "deepseek_v3")
    run: RunConfig = replace(run_of(deepseek), ranks=ep, parallel=ParallelConfig(ep=ep, dispatcher=dispatcher))
    fabric = find_profile(hardware).fabric
    assert fabric is not None, "both have a fabric"
    moe = next(layer.mlp for layer in run.model.layers if isinstance(layer.mlp, MoE))
    return 1e6 * dispatched(moe, run, Share.of(run), Links.of(run, fabric))[1]


def show_rows(title: str, rows: tuple[Row, ...], constants: Constants) -> None:
    """A table of rows, and the mean and the worst error."""
    print(f"\n{title}\n{'':76}published      ours   error")
    found = errors(rows, constants)
    for row, error in zip(rows, found, strict=True):
        print(
            f"{row.label}{row.tokens_per_second:9.0f} {row.tokens_per_second * (1 + error):9.0f} {100 * error:+6.1f} %"
        )
    print(f"{len(rows)} rows: {summary(found)}")


def summary(found: list[float]) -> str:
    """Mean, median and worst, without sign."""
    sizes = [abs(error) for error in found]
    return f"mean error {100 * mean(sizes):.1f} %, median {100 * median(sizes):.1f} %, worst {100 * max(sizes):.1f} %"


def show_pairs(rows: tuple[Row, ...], judged: tuple[Row, ...], constants: Constants) -> None:
    """How often the model says which of two mappings is faster."""
    speeds = {row: predicted(row, constants) for row in rows}
    compared = list(pairs(rows))
    right = [(speeds[a] > speeds[b]) == (a.tokens_per_second > b.tokens_per_second) for a, b in compared]
    wrong = [pair for pair, good in zip(compared, right, strict=True) if not good]
    print(f"\nPairs that differ in mapping: {sum(right)} of {len(right)} ranked as published")
    for one, other in wrong:
        print(f"  not {one.label.strip()} against {other.label.strip()}")
    of_judged = [good for (a, b), good in zip(compared, right, strict=True) if a in judged and b in judged]
    print(f"  of pairs of judged rows alone: {sum(of_judged)} of {len(of_judged)}")


def show_exchanges() -> None:
    """Table 7, and the two figures of section 4.2.1."""
    print("\nTable 7, microseconds, printed and ours; group-limited routing (4 of 8 groups)")
    print(f"{'':14}" + "".join(f"{hardware + ' ' + dispatcher:>22}" for hardware, dispatcher in COLUMNS))
    found = []
    for name, lines in TABLE_7.items():
        for ep, printed in lines.items():
            ours = [exchanged(hardware, dispatcher, ep) for hardware, dispatcher in COLUMNS]
            found += [mine / theirs - 1 for mine, theirs in zip(ours, printed, strict=True)]
            cells = "".join(f"{theirs:13,} {mine:8,.0f}" for mine, theirs in zip(ours, printed, strict=True))
            print(f"{name:9} ep{ep:<3}{cells}")
    print(f"{len(found)} times: {summary(found)}; the rates are means over these same times")
    deepseek = next(row for row in read_rows() if row.model == "deepseek_v3")
    routed = sum(isinstance(layer.mlp, MoE) for layer in run_of(deepseek).model.layers)
    network = find_profile("h100").fabric
    assert network is not None, "it has a fabric"
    print(f"Exchanges of a forward of DeepSeek-V3: {2 * routed}, printed 116")
    print(f"200 MB over InfiniBand: {200e6 / network.network * 1e3:.1f} ms, printed 'several'")


def show_splits(rows: tuple[Row, ...]) -> None:
    """Errors on rows not fitted, with constants fitted to other rows than those that are shipped."""
    fitted, judged = split(rows)
    for title, first, second in (
        ("the other half of the set-ups", judged, fitted),
        ("every second row, so that most set-ups are on both sides", rows[::2], rows[1::2]),
    ):
        found = errors(second, fit(first, START, lambda line: None))
        print(f"\nFitted to {title}: on the {len(second)} other rows {summary(found)}")
        print(f"  one utilisation for each kind of hardware and precision: {summary(baseline(first, second))}")


def main(arguments: list[str]) -> None:
    """Prints everything; with `--fit`, constants that were fitted now."""
    rows = read_rows()
    fitted, judged = split(rows)
    constants = shipped()
    if "--fit" in arguments:
        constants = fit(fitted, START, print)
        for name, value in asdict(constants).items():
            print(f"  {name} = {value:.4g}")
    show_rows("Rows that the constants are fitted to", fitted, constants)
    show_rows("Rows that they are not fitted to", judged, constants)
    found = baseline(fitted, judged)
    print(f"\nOne utilisation for each kind of hardware and precision, the same {len(judged)} rows: {summary(found)}")
    show_pairs(rows, judged, constants)
    show_exchanges()
    if "--splits" in arguments:
        show_splits(rows)


if __name__ == "__main__":
    main(sys.argv[1:])

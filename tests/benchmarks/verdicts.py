"""How right are the stability verdicts? Precision and recall per kind, beside other tools' rules.

    python tests/benchmarks/verdicts.py [--half held|tune|all] [--first-seed 0] [--folder FOLDER]
    python tests/benchmarks/verdicts.py --false-alarms [--half …] [--first-seed 0] [--folder FOLDER]

Real curves with labels by eye come from tests/data (see its README), and more where a folder holds the
whole of those sweeps (first_steps.parquet, whole_run.parquet); generated ones have known
events. The peers' rules are re-stated here from their published sources with their defaults;
they raise an alarm or none, so they are compared on that alone. The second form prints how often curves
are called unstable in which a reader sees nothing, for each population that has none.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from workup.judge import stability

DATA = Path(__file__).parent.parent / "data"
STEPS = 500


# -- curves ---------------------------------------------------------------------------------


def labelled(half: str, folder: Path | None = None) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name, label, loss) of the real curves of one half, or of all; of those at hand, without a folder."""
    labels = pd.read_csv(DATA / "stability_labels.csv")
    curves: dict[tuple[str, str], np.ndarray] = {}
    for kind, file, column in (("first", "first_steps", "loss"), ("whole", "whole_run", "loss_median")):
        if folder:
            table = pd.read_parquet(folder / f"{file}.parquet")
            curves |= {(kind, run): part.to_numpy(float) for run, part in table.groupby("run")[column]}
        table = pd.read_parquet(DATA / f"curves_{kind}.parquet")
        curves |= {(kind, run): part.to_numpy(float) for run, part in table.groupby("run").loss}
    for row in labels[(labels.half == half) | (half == "all")].itertuples():
        if (row.curve, row.run) in curves:
            loss = curves[row.curve, row.run]
            yield f"{row.curve} {row.run}", row.label, loss if np.isnan(row.upto) else loss[: int(row.upto)]


def descent(rng: np.random.Generator, n: int = STEPS) -> np.ndarray:
    """A trend without noise, of random shape and floor."""
    t, floor = np.arange(n), rng.uniform(0.1, 0.5)
    fall = (
        np.exp(-t / rng.uniform(0.1, 0.25) / n) if rng.random() < 0.5 else (1 + t / (0.02 * n)) ** -rng.uniform(0.5, 1)
    )
    return floor + (2.3 - floor) * fall


def noisy(rng: np.random.Generator, trend: np.ndarray, spread: float = 0.12) -> np.ndarray:
    return trend * np.exp(spread * rng.standard_normal(len(trend)))


def generated(kind: str, seed: int) -> np.ndarray:
    """One curve of ``kind`` (a key of GENERATED)."""
    rng = np.random.default_rng([seed, sum(map(ord, kind))])
    n, t, x = STEPS, np.arange(STEPS), descent(rng)
    at = int(rng.integers(150, 350))
    match kind:
        case "clean":
            return noisy(rng, x)
        case "heavy-tailed noise":
            return x * (1 + 0.06 * np.abs(rng.standard_t(2, n)))
        case "drifting noise":
            wander = pd.Series(rng.standard_normal(n)).ewm(alpha=0.3).mean().to_numpy()
            return noisy(rng, x * np.exp(0.1 * wander), 0.05)
        case "plateau":
            return noisy(rng, np.where(t < at, x[0], x[np.maximum(t - at, 0)]), 0.02)
        case "epoch-boundary spikes":
            return noisy(rng, x * np.where(t % 50 >= 48, 1.8, 1.0), 0.05)
        case "single outliers":
            return noisy(rng, x * np.where(rng.random(n) < 0.01, 4.0, 1.0))
        case "decay kink":
            return noisy(rng, x * np.where(t < at, 1.0, 0.4))
        case "noisy late":
            return x * np.exp((0.02 + 0.2 * t / n) * rng.standard_normal(n))
        case "near zero":
            return noisy(rng, x * np.exp(-t / 40) + 1e-6 * x[0], 0.5)
        case "alternation":
            return noisy(rng, x * (1 + 0.3 * (-1.0) ** t))
        case "logged every 10":
            return noisy(rng, descent(rng, 10 * n), 0.12)[::10]
        case "early divergence":
            x[30:] *= np.exp(np.minimum(0.05 * (t[30:] - 30), 7))
        case "blow-up":
            x[300:] *= np.exp(np.minimum(0.03 * (t[300:] - 300), 9))
        case "nan":
            x[250:] = np.nan
        case "slow drift":
            x[at:] *= 1 + 1.5 * (t[at:] - at) / (n - at)
        case "jump":
            x[at:] += 0.3 * (x[0] - x[at])
        case "early jump":
            x = x * np.where(t < 25, (1 + t) ** -0.4, 0.6 * x[0] / x)
        case "early hump":
            x = x * (1 + rng.uniform(2, 6) * np.exp(-(((t - 15) / rng.uniform(3, 8)) ** 2)))
        case "hump":
            long = int(rng.integers(30, 100))
            x[at : at + long] *= 1 + rng.uniform(1, 2) * np.sin(np.linspace(0, np.pi, long))
        case "rise at 150 back by 200":
            x[150:200] *= 1 + 1.5 * np.sin(np.linspace(0, np.pi, 50))
        case "x 2.2 for 6 steps":
            x[at : at + 6] *= 2.2
        case "one spike x 4":
            x[at] *= 4
    return noisy(rng, x)


GENERATED = {
    **dict.fromkeys(
        ["clean", "heavy-tailed noise", "drifting noise", "plateau", "epoch-boundary spikes", "single outliers"],
        "stable",
    ),
    **dict.fromkeys(
        ["decay kink", "noisy late", "near zero", "alternation", "logged every 10", "one spike x 4"], "stable"
    ),
    **dict.fromkeys(["early divergence", "blow-up", "nan"], "diverged"),
    **dict.fromkeys(["slow drift", "jump"], "mid"),
    "early jump": "early",
    "early hump": "early_recovered",
    **dict.fromkeys(["hump", "rise at 150 back by 200", "x 2.2 for 6 steps"], "mid_recovered"),
}


def low_start(seed: int) -> np.ndarray:
    """A clean descent, deep or shallow, whose first loss is drawn 2.5 to 4.5 deviations below its trend."""
    rng = np.random.default_rng([seed, 1])
    trend = descent(rng, int(np.exp(rng.uniform(np.log(60), np.log(2000)))))
    trend = trend[0] + rng.choice([0.02, 0.1, 0.5, 1.0]) * (trend - trend[0])
    spread = float(np.exp(rng.uniform(np.log(0.01), np.log(0.3))))
    noise = rng.standard_normal(len(trend))
    noise[0] = -rng.uniform(2.5, 4.5)
    return trend * np.exp(spread * noise)


def student(seed: int, freedom: int, steps: int, multiplies: bool) -> np.ndarray:
    """A clean descent with noise that is Student-t with ``freedom`` degrees, from hardly seen to wide."""
    rng = np.random.default_rng([seed, freedom, steps, multiplies])
    trend, noise = descent(rng, steps), np.exp(rng.uniform(-4, -1)) * rng.standard_t(freedom, steps)
    return trend * np.exp(noise) if multiplies else trend + noise


def cuts(loss: np.ndarray) -> Iterator[np.ndarray]:
    """A curve without a rise has none in its first steps either, nor where fewer of its steps were logged."""
    yield from (loss[:upto] for upto in (100, 300, 1000, len(loss)) if upto <= len(loss))
    yield from (loss[::3], loss[::10])


def quiet(half: str, first_seed: int, folder: Path | None) -> Iterator[tuple[str, np.ndarray]]:
    """(population, loss) of curves in which there is nothing to see."""
    halves = (half,) if half == "all" or half.startswith("added") else (half, f"added {half}")
    for name, label, loss in itertools.chain.from_iterable(labelled(part, folder) for part in halves):
        if label == "stable":
            yield f"real, {name.split()[0]}", loss
            yield from ((f"real, {name.split()[0]}, cut", part) for part in cuts(loss))
    for seed in range(first_seed, first_seed + 400):
        yield "first loss low", low_start(seed)
        for freedom, steps, multiplies in itertools.product((2, 3, 5), (500, 2000), (False, True)):
            kind = "x" if multiplies else "+"
            yield f"Student-t {freedom}, {steps} values, {kind}", student(seed, freedom, steps, multiplies)


def false_alarms(half: str, first_seed: int, folder: Path | None) -> pd.DataFrame:
    """Per population of :func:`quiet`: curves, alarms (and those of high confidence), their rate, and each verdict."""
    found = [(name, stability.judge(loss)) for name, loss in quiet(half, first_seed, folder)]
    table = pd.DataFrame([(n, f.value, f.value != "stable" and f.confidence == "high") for n, f in found])
    by = table.groupby(0, sort=False)
    alarms = by[1].agg(lambda values: (values != "stable").sum())
    counts = pd.DataFrame({"curves": by.size(), "alarms": alarms, "high": by[2].sum(), "rate": alarms / by.size()})
    kinds = pd.crosstab(table[0], table[1]).drop(columns="stable", errors="ignore")
    return counts.round(4).join(kinds).rename_axis("population")


# -- the peers' rules: the first step of an alarm, or None ------------------------------------


def losslint(x: np.ndarray) -> int | None:
    """losslint 0.4.1: NaN; ten times the centred median of 25; last tenth 1.25 times the first."""
    if not np.isfinite(x).all():
        return int(np.argmin(np.isfinite(x)))
    for i in range(len(x)):
        around = np.concatenate([x[max(0, i - 12) : i], x[i + 1 : i + 13]])
        if len(around) >= 5 and np.median(around) > 0 and x[i] > 10 * np.median(around):
            return i
    tenth = max(1, len(x) // 10)
    ends = len(x) >= 20 and 0 < np.median(x[:tenth]) < np.median(x[-tenth:]) / 1.25
    return len(x) - 1 if ends else None


def trainpulse(x: np.ndarray) -> int | None:
    """trainpulse 0.4.0: NaN; five times the mean of the last 50."""
    for i, value in enumerate(x):
        if not np.isfinite(value) or (i >= 50 and value > 5 * x[i - 50 : i].mean() > 0):
            return i
    return None


def trainscope(x: np.ndarray) -> int | None:
    """trainscope 1.8.1: upward CUSUM, slack 1, threshold 6, against the last 200's median and MAD."""
    total = 0.0
    for i in range(30, len(x)):
        past = x[max(0, i - 200) : i]
        centre = np.median(past)
        total = max(0.0, total + (x[i] - centre) / max(1.4826 * np.median(np.abs(past - centre)), 1e-12) - 1)
        if total >= 6:
            return i
    return None


def kill_loss_spike(x: np.ndarray) -> int | None:
    """llm-foundry's KillLossSpike: twice the mean of the last 100 five times running; half of them above 10."""
    count = 0
    for i in range(100, len(x)):
        past = x[i - 100 : i]
        count = count + 1 if x[i] >= 2 * past.mean() else 0
        if count > 4 or (i >= 200 and np.sum(past > 10) >= 50):
            return i
    return None


def lightning(x: np.ndarray) -> int | None:
    """Lightning's SpikeDetection: not finite, or worse than the last and 3 times the mean of ten."""
    for i in range(1, len(x)):
        mean = x[max(0, i - 10) : i].mean()
        if not np.isfinite(x[i]) or (x[i] > x[i - 1] and abs(x[i] - mean) >= abs(2 * mean)):
            return i
    return None


PEERS: dict[str, Callable[[np.ndarray], int | None]] = {
    "losslint": losslint,
    "trainpulse": trainpulse,
    "trainscope": trainscope,
    "KillLossSpike": kill_loss_spike,
    "Lightning": lightning,
}


# -- figures --------------------------------------------------------------------------------


def verdicts(curves: list[tuple[str, str, np.ndarray]]) -> pd.DataFrame:
    """name, label, workup (its verdict) and an alarm (True or False) for each peer."""
    rows = []
    for name, label, loss in curves:
        with np.errstate(all="ignore"):
            alarms = {peer: rule(loss) is not None for peer, rule in PEERS.items()}
        rows.append({"name": name, "label": label, "workup": stability.judge(loss).value, **alarms})
    return pd.DataFrame(rows)


def scores(found: pd.DataFrame) -> pd.DataFrame:
    """Precision and recall per kind, and each tool's share of curves of that kind with an alarm."""
    kinds = [
        k for k in ("stable", "early_recovered", "early", "mid_recovered", "mid", "diverged") if k in set(found.label)
    ]
    rows = []
    for kind in kinds:
        is_, said = found.label == kind, found.workup == kind
        right = (is_ & said).sum()
        alarms = {"workup": (found.workup != "stable")[is_].mean(), **{p: found.loc[is_, p].mean() for p in PEERS}}
        rows.append(
            {"kind": kind, "curves": is_.sum(), "precision": right / max(said.sum(), 1), "recall": right / is_.sum()}
            | alarms
        )
    return pd.DataFrame(rows).set_index("kind").round(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", default="all", choices=["tune", "held", "added tune", "added held", "all"])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="more real curves: first_steps.parquet and whole_run.parquet")
    parser.add_argument("--false-alarms", action="store_true")
    args = parser.parse_args()
    pd.set_option("display.width", 200, "display.max_columns", 20)
    if args.false_alarms:
        print(false_alarms(args.half, args.first_seed, args.folder))
        return
    real = verdicts(list(labelled(args.half, args.folder)))
    print(f"Real curves, {args.half}: {(real.label == real.workup).mean():.3f} right of {len(real)}\n{scores(real)}\n")
    print(f"Wrong:\n{real[real.label != real.workup][['name', 'label', 'workup']].to_string(index=False)}\n")
    seeds = range(args.first_seed, args.first_seed + 20)
    made = verdicts([(k, v, generated(k, s)) for k, v in GENERATED.items() for s in seeds])
    made["right"] = made.label == made.workup
    made["alarm"] = made.workup != "stable"
    counts = made.groupby("name", sort=False)[["right", "alarm", *PEERS]].sum()
    print(f"Generated, 20 of each, kinds right and alarms:\n{counts}\n")
    print(scores(made))
    clean = [stability.judge(generated("clean", s)).value for s in range(args.first_seed + 100, args.first_seed + 300)]
    print(f"\nFalse alarms on 200 clean curves: {sum(v != 'stable' for v in clean)}")


if __name__ == "__main__":
    main()

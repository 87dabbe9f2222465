"""The phenomena the playbook describes, shown on built-in workloads, each with its figure.

    make phenomena [or: python -m tests.benchmarks.phenomena NAME ...]

Each line says what was claimed, what the verdicts said and whether they agree; the figures
are written to runs/phenomena. Nothing is tuned to agree: a disagreement is printed as one.
"""

import sys
import time
from pathlib import Path

import numpy as np

from workup import Trial, load
from workup.experiments.instability import verdict
from workup.experiments.learning_rate import final_loss, table
from workup.judge import clipping, learning_rate, stability
from workup.measure.train import train
from workup.show import plots

FOLDER = Path("runs/phenomena")
SEEDS = (0, 1, 2)


def run(name, lr, steps=300, **settings):
    workload = load(name)
    return train(workload, Trial(lr=lr, steps=steps, batch_size=workload.batch_size, **settings))


def trained(trace):
    """Final loss, or the verdict where the trial did not end finite."""
    loss = final_loss(trace)
    return f"{loss:.3g}" if np.isfinite(loss) else trace.status


def edge():
    """lr* at the edge of the infeasible region (7a; C6): residual blocks without normalisation."""
    traces = [run("residual-unnormalised", 10**k) for k in (-3.3, -2.95, -2.6, -2.25, -1.9, -1.55, -1.2)]
    best, at_edge = learning_rate.judge(table(traces)), learning_rate.edge(table(traces))
    return f"{best.summary}", at_edge.value is True, lambda: plots.axis_plot(table(traces), best=best)


def sudden_rise():
    """A sudden rise after a steady decline at 5 to 10 x lr* (7b; C7): the digits network."""
    settings = {"steps": 500, "eval_every": 1, "eval_examples": 128}
    traces = {f"{k} x lr*": run("digits-mlp", 0.1 * k, **settings) for k in (1, 5, 7, 10)}
    said = {name: verdict(trace).value for name, trace in traces.items()}
    shown = [name for name, value in said.items() if str(value).startswith("mid")]
    return f"{said}", bool(shown) and said["1 x lr*"] == "stable", lambda: plots.loss_curves(traces)


def early_and_recovered():
    """An early rise that recovers at 2 x lr*, which an evaluation every 50 steps does not show (5; C5): RMSProp."""
    settings = {"steps": 500, "optimizer": "rmsprop"}
    sweep = [run("diabetes-regression", 10**k, **settings) for k in (-2.5, -2.25, -2, -1.75, -1.5)]
    best = learning_rate.judge(table(sweep)).value
    settings |= {"eval_every": 1, "eval_examples": 128}
    calm = [verdict(run("diabetes-regression", best, seed=seed, **settings)).value for seed in SEEDS]
    hot = [run("diabetes-regression", 2 * best, seed=seed, **settings) for seed in SEEDS]
    every = [verdict(trace) for trace in hot]
    seen = [any(found.evidence["eval_shows"]) for found in every]
    rarely = [any(shown_every_50(trace)) for trace in hot]
    text = f"lr* {best:.3g}: {calm}; at 2 x lr*: {[found.value for found in every]}; "
    text += f"shown by an evaluation every step {seen}, every 50 steps {rarely}"
    recovered = all(found.value == "early_recovered" for found in every)
    ok = set(calm) == {"stable"} and recovered and all(seen) and not any(rarely)
    return text, ok, lambda: plots.stability(hot[0], every[0])


def shown_every_50(trace):
    """Whether each event of the training loss shows in the evaluations that a run evaluated every 50 steps has."""
    steps = trace.steps
    rare = steps.eval_loss.where((steps.step + 1) % 50 == 0)
    return stability.judge(steps.loss, eval_loss=rare).evidence["eval_shows"]


def stride():
    """One block's stride from 2x2 to 1x1 hurts only at high rates, and warmup cures it (4)."""
    plain, strided, high = "digits-resnet", "digits-resnet-stride", 1.2

    def ends(name, lr, **settings):
        return [run(name, lr, steps=200, seed=seed, **settings) for seed in SEEDS]

    low = {name: ends(name, 0.1) for name in (plain, strided)}
    curves = {plain: ends(plain, high), strided: ends(strided, high)}
    curves[f"{strided},\n100 steps of warmup"] = ends(strided, high, warmup_steps=100)
    same = abs(np.subtract(*[[final_loss(t) for t in traces] for traces in low.values()]))
    good, hurt, cured = ([final_loss(t) for t in traces] for traces in curves.values())
    text = f"at 0.1 {[[trained(t) for t in traces] for traces in low.values()]}, "
    text += f"at {high} {[[trained(t) for t in traces] for traces in curves.values()]} (the last with warmup)"
    gap = np.subtract(hurt, good)
    ok = gap.mean() > 0.2 > same.max() and (gap > 0).all() and np.subtract(cured, good).mean() < 0.5 * gap.mean()
    return text, bool(ok), lambda: plots.compare(curves)


def long_warmup():
    """The post-norm transformer needs a warmup; its pre-norm twin does not (6, 8; D4)."""
    name, lr = "text-transformer-postnorm", 3.2e-3
    curves = {f"warmup {w}": run(name, lr, steps=300, warmup_steps=w) for w in (0, 10, 100)}
    curves["pre-norm, warmup 0"] = run("text-transformer", lr, steps=300)
    ends = {label: final_loss(trace) for label, trace in curves.items()}
    text = ", ".join(f"{label}: {trained(trace)}" for label, trace in curves.items())
    ok = ends["warmup 100"] < ends["warmup 0"] - 0.2 and ends["pre-norm, warmup 0"] < ends["warmup 0"] - 0.2
    return text, ok, lambda: plots.loss_curves(curves)


def clipped_explosion():
    """Clipping at the 90th percentile of lr*'s norms cures an early explosion (9; E3, E6)."""
    calm, bare = run("residual-unnormalised", 10**-1.9), run("residual-unnormalised", 10**-1.55)
    threshold = clipping.judge(calm.steps.grad_norm).value
    held = run("residual-unnormalised", 10**-1.55, clip_norm=float(f"{threshold:.3g}"))
    text = f"unclipped {verdict(bare).value}, clipped at {threshold:.3g} {verdict(held).value} to {trained(held)}"
    ok = bare.status == "diverged" and held.status == "finished" and final_loss(held) < 1
    return text, ok, lambda: plots.loss_curves({"unclipped": bare, f"clipped at {threshold:.2g}": held})


def healthy():
    """A healthy workload is told that it needs nothing: diabetes regression, to ten times its rate."""
    traces = [run("diabetes-regression", 1e-3 * k, steps=500, eval_every=1, eval_examples=128) for k in (1, 2, 5, 10)]
    said = [verdict(trace).value for trace in traces]
    return f"{said}", set(said) == {"stable"}, lambda: plots.loss_curves(traces)


ALL = (edge, sudden_rise, early_and_recovered, stride, long_warmup, clipped_explosion, healthy)


def main(names):
    FOLDER.mkdir(parents=True, exist_ok=True)
    agreed = []
    for show in [f for f in ALL if not names or f.__name__ in names]:
        begin = time.monotonic()
        text, ok, draw = show()
        draw().figure.savefig(FOLDER / f"{show.__name__}.png", dpi=150, bbox_inches="tight")
        agreed.append(ok)
        print(f"{'shown' if ok else 'NOT shown'} in {time.monotonic() - begin:.0f} s: {show.__doc__}", flush=True)
        print(f"    {text}", flush=True)
    print(f"{sum(agreed)} of {len(agreed)} shown; figures in {FOLDER}")


if __name__ == "__main__":
    main(sys.argv[1:])

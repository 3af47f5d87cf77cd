"""What the demo shows: a table of the digests of global steps, and the loss over steps as one figure."""

from __future__ import annotations

from pathlib import Path

from zephon_daemon.demo.launches import Step

Curves = dict[str, list[Step]]
"""The steps of each way to train, by its name, such as "4 ranks" and "4 → 2"; the first one is uninterrupted."""

LOSS_TOLERANCE = 0.02
"""Sums of other numbers of ranks round differently, and training makes more of it; other batches differ by tenths."""

_SHOWN = 10
_STYLES = (
    {"color": "#9ecae1", "linewidth": 5.0, "solid_capstyle": "round"},
    {"color": "#d6604d", "linewidth": 1.8, "linestyle": "-"},
    {"color": "#1a1a1a", "linewidth": 1.4, "linestyle": (0, (2, 2))},
)


def differing(curves: Curves) -> list[int]:
    """The steps whose digest is not the same in all, or that one of them lacks."""
    by_step = [{step.step: step.digest for step in steps} for steps in curves.values()]
    everywhere = sorted(set().union(*by_step))
    return [step for step in everywhere if len({digests.get(step) for digests in by_step}) > 1]


def largest_loss_difference(curves: Curves) -> float:
    """Between the first curve and any other, at any step."""
    first, *others = curves.values()
    return max(abs(a.loss - b.loss) for other in others for a, b in zip(first, other))


def table(zephon: Curves, usual: Curves, stop: int) -> str:
    """Digests of some global steps, 8 hex digits of each; `≠` marks what differs from the uninterrupted run."""
    groups = (("Zephon", zephon), ("usual loader", usual))
    titles, names = ["step"], [""]
    for title, curves in groups:
        titles += [title, *[""] * (len(curves) - 1)]
        names += list(curves)
    steps = [step.step for step in next(iter(zephon.values()))]
    rows = [titles, names]
    for step in _chosen(steps, stop):
        row = [str(step)]
        for _, curves in groups:
            digests = [next((s.digest[:8] for s in each if s.step == step), "-") for each in curves.values()]
            row += [digests[0], *(d if d == digests[0] else f"{d} ≠" for d in digests[1:])]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    first_usual = 1 + len(zephon)
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if i == 0 else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        cells.insert(first_usual, "")
        lines.append("  ".join(cells).rstrip())
        if row[0] == str(stop):
            lines.append("  ".join(["", "-" * (len(lines[-1]) - 2)]) + "  stopped and resumed")
    return "\n".join(lines)


def draw(target: Path, zephon: Curves, usual: Curves, stop: int) -> None:
    """Loss over steps for both loaders, and below it how far each run is from the uninterrupted one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, 2, figsize=(11, 6), sharex=True, sharey="row", height_ratios=(3, 1.2), layout="constrained"
    )
    panels = (("Zephon: every global step the same", zephon), ("Usual rank-partitioned loader", usual))
    for (title, curves), (upper, lower) in zip(panels, axes.T):
        upper.set_title(title, fontsize=12, loc="left")
        reference = next(iter(curves.values()))
        for (name, steps), style in zip(curves.items(), _STYLES):
            numbers = [step.step for step in steps]
            label = f"{name}, never stopped" if steps is reference else f"{name}, resumed"
            upper.plot(numbers, [step.loss for step in steps], label=label, **style)
            lower.plot(numbers, [a.loss - b.loss for a, b in zip(steps, reference)], **style)
        for axis in (upper, lower):
            axis.axvline(stop + 0.5, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(axis="y", color="#eeeeee", linewidth=0.8)
            axis.set_axisbelow(True)
        where = upper.get_xaxis_transform()
        upper.text(stop + 1, 0.97, "stopped and resumed", transform=where, color="#666666", fontsize=9, va="top")
        upper.legend(frameon=False, loc="lower left")
        lower.set_xlabel("global step")
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("difference from\nuninterrupted")
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def _chosen(steps: list[int], stop: int) -> list[int]:
    """The first, the last, those around the stop, and some between."""
    every = max(1, len(steps) // _SHOWN)
    around = {steps[0], steps[-1], stop, stop + 1, stop + 2}
    return [step for step in steps if step in around or (step % every == 0 and abs(step - stop) > every // 2)]

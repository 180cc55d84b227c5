"""Write docs/predictions.md (published runs beside predicted times) from bench/published.json.

Run ``python docs/generate_predictions.py``; a test fails if the committed page differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
# Make ``bench`` importable, from whatever folder the script is started.
sys.path.insert(0, str(DOCS.parent))

from bench.published import Published, left_out, published, residuals, spread  # noqa: E402

INTRODUCTION = """\
zerotune has not run on a GPU yet. Until it has, this page shows how close its predictions come to
step times that users of other trainers published. For each published run, zerotune predicts the
time and the memory of a plan with the same model, card, image size and placement of the weights,
with recomputed blocks, from the [published figures of the
card](memory.md#how-long-a-step-takes). All cards are taken to reach the same shares of these
figures."""

ALIKE = """\
In {count} runs, the other trainer did the same work: resident weights, or DeepSpeed's ZeRO-2 with
CPU offload. A positive residual means that the published run took longer than predicted. The
residuals lie between {low} and {high} %. If each run is compared with predictions that were
refitted to the other runs (all times are multiplied by the median ratio of published to predicted
time), they lie between {left_low} and {left_high} %; `zerotune plan advise` prints this range
beside its predictions."""

OTHERS = """\
The following runs used a method that zerotune does not have, such as another block swap, an
optimizer without master weights or another attention kernel, or their publication leaves out the
image size or the accumulation. They are listed for comparison: the prediction is for zerotune's
[streamed weights](streaming.md) on the same card. Where the published run used Adafactor in the
backward pass and weights in bf16, so does the prediction: without clipping, with the [update on the
device](streaming.md#update-on-the-device) and weights that are rounded at random
(`device:stochastic`). Host memory is zerotune's only."""

ADDING = """\
To add a run, add a row to `bench/published.json`, and run `python docs/generate_predictions.py`. If
the range changes, a test names the new value for `PUBLISHED_SPREAD`."""


def page() -> str:
    """Return docs/predictions.md."""
    runs = published()
    found = residuals(runs)
    low, high = _percent(spread(found))
    left_low, left_high = _percent(spread(left_out(found)))
    alike = ALIKE.format(
        count=len(found), low=low, high=high, left_low=left_low, left_high=left_high
    )
    parts = [
        "<!-- Written by docs/generate_predictions.py; edit that. -->",
        "# Predictions beside published runs",
        INTRODUCTION,
        "## Runs that did the same work",
        alike,
        _table(one for one in runs if one.alike),
        "## Other methods",
        OTHERS,
        _table((one for one in runs if not one.alike), host=True),
        "## Adding a run",
        ADDING,
    ]
    return "\n\n".join(parts) + "\n"


def _percent(pair: tuple[float, float]) -> tuple[str, str]:
    low, high = (f"{100 * one:+.0f}".replace("-", "\N{MINUS SIGN}") for one in pair)
    return low, high


def _table(runs: Iterable[Published], *, host: bool = False) -> str:
    rows = [
        "| run | card | published, s | predicted, s | residual | published, GiB | predicted, GiB |"
        + (" host, GiB |" if host else ""),
        "|---|---|--:|--:|--:|--:|--:|" + ("--:|" if host else ""),
    ]
    for one in runs:
        residual = "" if one.residual is None else f"{100 * one.residual:+.0f} %"
        cells = [
            f"{one.setting} ({one.source})",
            one.card,
            "" if one.seconds is None else f"{one.seconds:.3g}",
            f"{one.predicted:.3g}",
            residual.replace("-", "\N{MINUS SIGN}"),
            "" if one.memory is None else f"{one.memory:.1f}",
            f"{one.device:.1f}",
        ]
        rows.append(f"| {' | '.join(cells + [f'{one.host:.0f}'] * host)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    (DOCS / "predictions.md").write_text(page(), encoding="utf-8")

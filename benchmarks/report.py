# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Tables of one run and of several side by side."""

from timeline import PHASES


def _highest(result, *path):
    """The highest of any rank's figure at ``path``, or None where a rank has none."""
    figures = []
    for figure in result["ranks"]:
        for name in path:
            figure = figure.get(name) if figure else None
        figures.append(figure)
    return None if any(figure is None for figure in figures) else max(figures)


def _timed(result):
    return result["steps_s"][result["run"]["warm"] :]


def _counted(moment, *names):
    """Reads the highest of any rank's sum of counters at a moment."""

    def read(result):
        counters = [rank["counters"].get(moment) for rank in result["ranks"]]
        return max(sum(of_rank[name] for name in names) for of_rank in counters) if all(counters) else None

    return read


SECONDS, BYTES, LOSS = "s", "bytes", "loss"
# Name, what to read from a result, and what that is. Memory is the highest of any rank.
ROWS = [
    ("step, median", lambda r: r["step_s"], SECONDS),
    ("step, fastest", lambda r: min(_timed(r)), SECONDS),
    ("step, slowest", lambda r: max(_timed(r)), SECONDS),
    ("first step", lambda r: r["first_step_s"], SECONDS),
    ("after the forward", lambda r: _highest(r, "phases", "forward", "after"), BYTES),
    ("peak of the forward", lambda r: _highest(r, "phases", "forward", "peak"), BYTES),
    ("peak of the backward", lambda r: _highest(r, "phases", "backward", "peak"), BYTES),
    ("after the backward", lambda r: _highest(r, "phases", "backward", "after"), BYTES),
    ("peak of the step", lambda r: _highest(r, "phases", "step", "peak"), BYTES),
    ("at rest", lambda r: _highest(r, "phases", "step", "after"), BYTES),
    ("reserved", lambda r: _highest(r, "reserved"), BYTES),
    ("most gradients", lambda r: _highest(r, "most_gradients"), BYTES),
    ("counted: most pending", _counted("backward", "peak_pending"), BYTES),
    ("counted: most in buckets", _counted("backward", "peak_bucket"), BYTES),
    ("counted: bound after the backward", _counted("backward", "bound"), BYTES),
    ("counted: held after the step", _counted("step", "bound", "pending", "bucket", "unreduced"), BYTES),
    ("loss of the first step", lambda r: r["losses"][0], LOSS),
    ("loss of the last step", lambda r: r["losses"][-1], LOSS),
]


def is_measured(result):
    """Whether it is a run's result, rather than what says why there is none."""
    return "why" not in result


def unit_of(results):
    """Returns how many bytes a unit has that suits the memory of all results, and its name."""
    highest = max(_highest(result, "phases", phase, "peak") for result in results for phase in PHASES)
    return (2**30, "GiB") if highest >= 2**30 else (2**20, "MiB")


def _write(figure, kind, unit):
    if figure is None:
        return "-"
    if kind == LOSS:
        return f"{figure:.5f}"
    if kind == BYTES:
        return f"{figure / unit[0]:.3f}" if figure else "0"
    return f"{figure:.4f}" if figure < 10 else f"{figure:.1f}"


def _name(row, unit):
    name, _, kind = row
    return name if kind == LOSS else f"{name}, {unit[1] if kind == BYTES else 's'}"


def describe(result):
    """One line: what was trained, on what."""
    run, where = result["run"], result["environment"]
    layers = f", {run['layers']} layers" if run["layers"] else ""
    nccl = f", NCCL {where['nccl']}" if where["nccl"] else ""
    return (
        f"{run['shape']}{layers}, {result['parameters'] / 1e6:,.1f} million parameters in {run['dtype']}; "
        f"{where['world']} x {where['device']}; sequence {run['seq']}, micro-batch {run['micro_batch']}, accumulation "
        f"{run['accumulation']}, {'every layer checkpointed' if run['checkpoint'] else 'no checkpointing'}, "
        f"ZeRO-{run['stage']}, bucket {run['bucket']:,}, AdamW {run['adam']}; steps {run['warm']} to "
        f"{run['steps'] - 1} timed; torch {where['torch']}{nccl}, transformers {where['transformers']}; "
        f"{where['host']}, {where['date']}"
    )


def _meaning_of_memory(result):
    what = "allocated"
    if result["environment"]["device"] == "CPU":
        what = "allocated since the step began and not seen to be freed (what a thread of gloo frees is not seen)"
    return (
        f"Memory: {what}, the highest of any rank. Gradients: from when they are handed over until they are freed, "
        "with the buckets, partitions and fp32 copies made for them."
    )


def print_run(result):
    """Prints one run's figures, the highest of any rank and each rank's."""
    unit = unit_of([result])
    print(f"\n{describe(result)}\n{result['run']['system']}, deepspeed {result['environment']['deepspeed']}")
    ranks = [f"rank {index}" for index in range(len(result["ranks"]))]
    print(f"  {'':38}{'highest':>11}" + "".join(f"{rank:>11}" for rank in ranks))
    for row in ROWS:
        figure = row[1](result)
        if figure is None:
            continue
        # A step's fastest and slowest are those of all ranks together, and so are the losses.
        alone = [] if row[2] == LOSS or row[0] in ("step, fastest", "step, slowest") else result["ranks"]
        figures = [figure, *(row[1]({**result, **rank, "ranks": [rank]}) for rank in alone)]
        print(f"  {_name(row, unit):38}" + "".join(f"{_write(figure, row[2], unit):>11}" for figure in figures))
    print(_meaning_of_memory(result), flush=True)


def markdown(results, beside):
    """Returns a table of results side by side, as Markdown.

    Args:
        results: name -> result of a run, or what says why there is none; at least one is a result.
        beside: names with which the first is to be compared by a ratio.
    """
    measured = {name: result for name, result in results.items() if is_measured(result)}
    unit = unit_of(measured.values())
    first, *_ = results
    ratios = [name for name in beside if name in measured and name != first and first in measured]
    lines = [
        describe(next(iter(measured.values()))),
        "",
        "| | " + " | ".join([*measured, *(f"{first} / {name}" for name in ratios)]) + " |",
        "| --- |" + " --- |" * (len(measured) + len(ratios)),
        "| deepspeed | "
        + " | ".join(
            "" if result["run"]["system"] == "fsdp2" else result["environment"]["deepspeed"]
            for result in measured.values()
        )
        + " |" * (1 + len(ratios)),
    ]
    for row in ROWS:
        _, read, kind = row
        figures = {column: read(result) for column, result in measured.items()}
        if all(figure is None for figure in figures.values()):
            continue
        cells = [_write(figure, kind, unit) for figure in figures.values()]
        for other in ratios:
            known = kind != LOSS and figures[first] is not None and figures[other]
            cells.append(f"{figures[first] / figures[other]:.3f}" if known else "")
        lines.append(f"| {_name(row, unit)} | " + " | ".join(cells) + " |")
    lines += ["", _meaning_of_memory(next(iter(measured.values())))]
    lines += [f"\nNot measured: {name}, {of['why']}" for name, of in results.items() if not is_measured(of)]
    return "\n".join(lines) + "\n"

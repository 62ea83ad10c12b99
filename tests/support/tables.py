# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The tables in Markdown that ``make models`` and ``make optimizers`` print of what tests have recorded."""

from typing import Any, Dict, Sequence, Tuple

from support.architectures import ARCHITECTURES
from support.known_optimizers import KNOWN

# The names under which tests hand over what they have found out of a model, or of an optimizer.
MODEL, OPTIMIZER = "trained model", "trained with an optimizer"


def print_models(terminal) -> None:
    """Prints what came of each architecture of transformers, by the tests of ``test_models.py``."""
    found = _recorded(terminal, MODEL)
    _print_head(terminal, "models of transformers", "architecture | kind | ZeRO-1 | ZeRO-2 | from graphs | graphs")
    for name, architecture in ARCHITECTURES.items():
        both = [found.get((name, stage)) for stage in (1, 2)]
        if any(both):
            of_all = " ".join(_of(both, lambda result: f"{result['from_graphs']} of {result['gradients']}"))
            graphs = " ".join(_of(both, lambda result: str(result["graphs"])))
            _print_row(terminal, [name, architecture.kind, *map(_error, both), of_all, graphs])
    terminal.write_line(f"{len({name for name, _ in found})} architectures")


def print_optimizers(terminal) -> None:
    """Prints what came of each optimizer, by the tests of ``test_optimizers.py``."""
    found = _recorded(terminal, OPTIMIZER)
    head = "optimizer | package | ZeRO-1 | ZeRO-2 | plain loop | stepped | peak | time"
    _print_head(terminal, "optimizers", head)
    for name, known in KNOWN.items():
        both = [found.get((name, stage)) for stage in (1, 2)]
        if known.version is None:
            _print_row(terminal, [name, f"{known.package}, not installed", *[""] * 6])
        elif any(both):
            first: Any = next(filter(None, both))
            beside_plain = f"{first['error_plain']:.0e}" if "error_plain" in first else ""
            costs = [f"{first[cost]:.2f}" if cost in first else "" for cost in ("peak", "time")]
            cells = [name, f"{known.package} {known.version}", *map(_error, both), beside_plain]
            _print_row(terminal, [*cells, first.get("stepped", ""), *costs])


def _recorded(terminal, kind: str) -> Dict[Tuple[str, int], Dict[str, Any]]:
    """Returns (name, stage) -> what a test has recorded, and its outcome."""
    found = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminal.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == kind:
                    found[value["name"], value["stage"]] = {**value, "outcome": outcome}
    return found


def _print_head(terminal, title: str, columns: str) -> None:
    terminal.section(title)
    terminal.write_line(f"| {columns} |")
    _print_row(terminal, ["---"] * len(columns.split(" | ")))


def _print_row(terminal, cells: Sequence[str]) -> None:
    terminal.write_line(f"| {' | '.join(cells)} |")


def _error(result):
    """Says how far a training is from one without DeepCompile, or what else came of it."""
    if result is None or result["outcome"] != "passed":
        return "not run" if result is None else result["outcome"]
    return result["fails"] if "fails" in result else f"{result['error']:.0e}"


def _of(both, describe):
    """What is the same in both stages is said once."""
    return dict.fromkeys(describe(result) for result in both if result is not None and "graphs" in result)

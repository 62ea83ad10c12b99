# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The table that ``make models`` prints: what came of each architecture of transformers."""

from support.architectures import ARCHITECTURES

# The name under which a test hands over what it has found out.
PROPERTY = "trained model"


def print_table(terminal) -> None:
    """Prints a table in Markdown of what the tests of ``test_models.py`` have recorded."""
    found = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminal.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == PROPERTY:
                    found[value["name"], value["stage"]] = {**value, "outcome": outcome}
    terminal.section("models of transformers")
    terminal.write_line("| architecture | kind | ZeRO-1 | ZeRO-2 | from graphs | graphs |")
    terminal.write_line("| --- | --- | --- | --- | --- | --- |")
    for name, architecture in ARCHITECTURES.items():
        both = [found.get((name, stage)) for stage in (1, 2)]
        if any(both):
            of_all = " ".join(_of(both, lambda result: f"{result['from_graphs']} of {result['gradients']}"))
            graphs = " ".join(_of(both, lambda result: str(result["graphs"])))
            errors = " | ".join("not run" if result is None else _error(result) for result in both)
            terminal.write_line(f"| {name} | {architecture.kind} | {errors} | {of_all} | {graphs} |")
    terminal.write_line(f"{len({name for name, _ in found})} architectures")


def _error(result):
    return f"{result['error']:.0e}" if result["outcome"] == "passed" else result["outcome"]


def _of(both, describe):
    """What is the same in both stages is said once."""
    return dict.fromkeys(describe(result) for result in both if result is not None and "graphs" in result)

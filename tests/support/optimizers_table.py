# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The table that ``make optimizers`` prints: what came of each optimizer."""

from support.known_optimizers import KNOWN

# The name under which a test hands over what it has found out.
PROPERTY = "trained with an optimizer"


def print_table(terminal) -> None:
    """Prints a table in Markdown of what the tests of ``test_optimizers.py`` have recorded."""
    found = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminal.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == PROPERTY:
                    found[value["name"], value["stage"]] = {**value, "outcome": outcome}
    terminal.section("optimizers")
    terminal.write_line("| optimizer | package | ZeRO-1 | ZeRO-2 | plain loop | stepped | peak | time |")
    terminal.write_line("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, known in KNOWN.items():
        both = [found.get((name, stage)) for stage in (1, 2)]
        if known.version is None:
            terminal.write_line(f"| {name} | {known.package}, not installed |  |  |  |  |  |  |")
        elif any(both):
            first = next(filter(None, both))
            cells = [
                f"{known.package} {known.version}",
                *(_beside_off(result) for result in both),
                _beside_plain(first),
            ]
            cells += [
                first.get("stepped", ""),
                *(f"{first[cost]:.2f}" if cost in first else "" for cost in ("peak", "time")),
            ]
            terminal.write_line(f"| {name} | {' | '.join(cells)} |")


def _beside_off(found):
    """The error beside DeepCompile off, in a stage."""
    if found is None or found["outcome"] != "passed":
        return found["outcome"] if found else "not run"
    return found["fails"] if "fails" in found else f"{found['error']:.0e}"


def _beside_plain(found):
    if "error_plain" not in found:
        return ""
    return f"{found['error_plain']:.0e}"

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Counters and peaks in DeepSpeed's monitors, read back from what was written."""

import csv
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.tools.reports import feature
from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.models import Model
from support.options import MONITORS, SMALL, train_and_collect_warnings
from support.training import Case, batch, device, make_engine

TENSORBOARD_MISSING = "DeepSpeed's monitor writes with TensorBoard: pip install -r requirements/front_doors.txt"
# Two sequences of each of two ranks in each of two micro-batches.
SAMPLES = 8


def trained(case):
    """Trains; returns the counters after each backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    engine, seen = make_engine(Model(width=8, depth=1).to(device()), case), []
    for step in range(case.steps):
        for micro_step in range(case.accumulation):
            engine.backward(engine(batch(step, micro_step, dist.get_rank(), 4)))
            seen.append(gradient_counters(engine))
            engine.step()
    engine.destroy()
    return seen


def monitored(folder, steps, **compile_section):
    sections = {
        "tensorboard": {"enabled": True, "output_path": str(folder / "tensorboard"), "job_name": "job"},
        "csv_monitor": {"enabled": True, "output_path": str(folder / "csv"), "job_name": "job"},
        "compile": compile_section,
        "steps_per_print": 2,
    }
    return Case(stage=2, accumulation=2, steps=steps, config=sections)


def read_csv(folder):
    """Returns name -> [(step, value)] of each file, without its header."""
    found = {}
    for path in (folder / "csv" / "job").glob("*.csv"):
        _, *rows = csv.reader(path.open())
        found[path.stem] = [(int(step), float(value)) for step, value in rows]
    return found


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / "job"))
    events.Reload()
    # A monitor of CSV files replaces the slashes.
    return {
        name.replace("/", "_"): [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def of_ours(found):
    return {name: values for name, values in found.items() if re.search("gradients|memory", name)}


@pytest.mark.options("compile.monitor_memory")
@pytest.mark.follows("has no effect without steps_per_print; set steps_per_print")
def test_monitors_get_counters_and_peaks(ranks, tmp_path):
    """A counter that is written in another step than it was counted in would be another step's."""
    pytest.importorskip("tensorboard", reason=TENSORBOARD_MISSING)
    case = monitored(tmp_path, steps=5, monitor_memory=True)
    first, other = ranks(2).run(trained, case)
    found = read_csv(tmp_path)
    for name, values in read_tensorboard(tmp_path).items():
        assert [step for step, _ in values] == [step for step, _ in found[name]], name
        # TensorBoard keeps fp32.
        assert [value for _, value in values] == pytest.approx([value for _, value in found[name]]), name
    assert "Train_Samples_lr" in found and len(found["Train_Samples_lr"]) == case.steps
    prefix = "Train_Samples_gradients_"
    peaks = {"peak_bound", "peak_on_host", "peak_pending", "peak_bucket", "peak_unreduced"}
    numbers = {"from_graphs", "from_autograd", "out_of_turn", "buckets_sent", "messages_sent"}
    assert {name.removeprefix(prefix) for name in of_ours(found) if prefix in name} == peaks | numbers
    for name, values in of_ours(found).items():
        assert [samples for samples, _ in values] == [2 * SAMPLES, 4 * SAMPLES], name
    # A report restarts the counters: each covers two steps of two micro-batches. The fifth step is not reported.
    for name in ("peak_bound", "from_graphs", "buckets_sent"):
        expected = [first[last][name] for last in (3, 7)]
        assert [value for _, value in found[prefix + name]] == expected and all(expected), name
    assert first[-1]["from_graphs"] * 2 == first[3]["from_graphs"]
    assert other[-1]["from_graphs"] == first[-1]["from_graphs"]
    on_gpu = {"Train_Samples_memory_peak_allocated", "Train_Samples_memory_peak_reserved"}
    assert {name for name in of_ours(found) if "memory" in name} == (on_gpu if device().type == "cuda" else set())


def test_peaks_count_what_the_allocator_does_not(monkeypatch):
    """A peak on GPUs would lack the parameters, where these lie in memory that ranks map."""
    accelerator = mock.Mock(**{"max_memory_allocated.return_value": 100, "max_memory_reserved.return_value": 150})
    state = SimpleNamespace(reducer=mock.Mock(**{"counters.return_value": {}}))
    monkeypatch.setattr(feature, "mapped_memory", SimpleNamespace(nbytes=7))
    monkeypatch.setattr(feature, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(feature, "state_of", lambda engine: state)
    engine = mock.Mock(global_steps=2, global_samples=8, **{"steps_per_print.return_value": 1})
    feature.write_counters(engine)
    (events,) = engine.monitor.write_events.call_args.args
    prefix = "Train/Samples/memory/"
    assert events == [(f"{prefix}peak_allocated", 107, 8), (f"{prefix}peak_reserved", 157, 8)]


def test_monitors_get_nothing_of_it_by_default(ranks, tmp_path):
    """Reading counters restarts them, so a monitor that nobody asked for would take them from the user."""
    pytest.importorskip("tensorboard", reason=TENSORBOARD_MISSING)
    first, _ = ranks(2).run(trained, monitored(tmp_path, steps=3))
    found = read_csv(tmp_path)
    assert "Train_Samples_lr" in found and not of_ours(found)
    # Counters went on.
    assert first[-1]["from_graphs"] == 3 * first[1]["from_graphs"]


@pytest.mark.options("compile.monitor_memory")
@pytest.mark.follows("has no effect without a monitor; enable tensorboard")
def test_warned_without_a_monitor(ranks, tmp_path):
    """Memory would not be written, and nobody would say why."""
    config = {"compile": {"monitor_memory": True}}
    (trained,) = ranks(1).run(train_and_collect_warnings, Case(model=SMALL, steps=1, config=config))
    assert trained.warnings == [("1", MONITORS["without a monitor"])]
    config |= {"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}, "steps_per_print": None}
    (trained,) = ranks(1).run(train_and_collect_warnings, Case(model=SMALL, steps=1, config=config))
    assert trained.warnings == [("1", MONITORS["without steps"])]

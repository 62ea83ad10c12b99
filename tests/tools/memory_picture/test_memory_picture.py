# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``compile.memory_picture`` records what a step holds, draws it, and leaves the other steps alone."""

import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.util
import itertools
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.tools.memory_picture import classify, data
from deepspeed.compile.tools.memory_picture.__main__ import main
from deepspeed.compile.tools.memory_picture.of_engine import tensors_of
from deepspeed.compile.tools.memory_picture.record import flattened, storages
from deepspeed.compile.zero_1_and_2 import gradient_counters, reset_gradient_counters

from support.beside import logged
from support.engines import batch, build
from support.on_ranks import on_ranks
from support.options import outcome
from support.subclasses import Scaled
from support.training import Case, device, engine_by_configuration, make_engine

LIBRARY_MISSING = "matplotlib draws the pictures: requirements/dev.txt"
CASE = Case(model="RepeatedLayers", accumulation=2, dtype="bf16")
# Tensors of a few elements come and go beside those that a test counts.
SLACK = 4096


def about_pictures(lines):
    """What is said of pictures, apart from a library that this machine lacks."""
    return [line for line in lines if "compile.memory_picture" in line and "cannot be imported" not in line]


class Recorded(NamedTuple):
    """What a rank knows without the recording."""

    files: List[str]
    parameters: int  # bytes
    states: int  # bytes of master weights and of what the optimizer keeps for each
    counters: Dict[str, int]  # of the recorded step
    owned: List[List[str]]  # what the engine and the optimizer have of their own: before, while and after recording
    lines: List[str]


def with_picture(case, folder, step=3):
    config = {**(case.config or {})}
    config["compile"] = {**config.get("compile", {}), "memory_picture": {"folder": str(folder), "step": step}}
    return dataclasses.replace(case, config=config)


def own(engine):
    """The names that the recorder might put on the objects of an engine."""
    of_engine = {"backward", "_backward_prologue", "_backward_epilogue"} & {*vars(engine)}
    return sorted(of_engine | ({"step"} & {*vars(engine.optimizer)}))


def train(engine, case, step, within=lambda: None):
    for micro_step in range(case.accumulation):
        loss = engine(batch(step, micro_step, dist.get_rank(), 4))
        within()
        engine.backward(loss)
        engine.step()


def record(case, folder):
    torch._dynamo.reset()
    with logged(logging.INFO) as lines:
        engine = make_engine(build(case), with_picture(case, folder))
        owned = []
        for step in range(5):
            if step == 2:
                reset_gradient_counters(engine)
            train(engine, case, step, within=lambda: owned.append(own(engine)))
            if step == 2:
                counters = gradient_counters(engine)
        optimizer = engine.optimizer
        tensors = [*optimizer.single_partition_of_fp32_groups]
        tensors += [value for state in optimizer.optimizer.state.values() for value in state.values()]
        parameters = {tensor.untyped_storage().data_ptr(): tensor for tensor in optimizer.bit16_groups_flat}
        parts = [
            [parameter.rows, parameter.scales] if isinstance(parameter, Scaled) else [parameter]
            for parameter in engine.module.parameters()
        ]
        parameters |= {tensor.untyped_storage().data_ptr(): tensor for tensor in itertools.chain(*parts)}
        recorder = engine._memory_recorder
        engine.destroy()
    assert recorder is None and not torch.autograd._profiler_enabled()
    return Recorded(
        sorted(path.name for path in Path(folder).glob(f"*rank{dist.get_rank()}*")),
        sum(tensor.untyped_storage().nbytes() for tensor in parameters.values()),
        sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor)),
        counters,
        owned,
        about_pictures(lines),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def recorded(ranks, folder):
    pytest.importorskip("matplotlib", reason=LIBRARY_MISSING)
    return ranks(2).run(record, CASE, folder)


def is_rounded(recorded, counted):
    """Whether bytes that were recorded are the bytes of gradients that a reducer counted, of which there are some."""
    # Torch's allocator on GPUs rounds each piece of memory up to 512 bytes.
    return 0 < counted <= recorded <= counted + (20 * 512 if torch.cuda.is_available() else 0)


@pytest.mark.options("compile.memory_picture")
def test_the_data_is_what_the_engine_knows(recorded, folder):
    """A tensor that is classified by where it was allocated, and not by who holds it, counts for the wrong band."""
    for rank, truth in enumerate(recorded):
        assert truth.files == [f"step3-rank{rank}.{suffix}" for suffix in ("json", "png")]
        step = data.read(folder / f"step3-rank{rank}.json")
        held, counters = step.held, truth.counters
        assert set(held[data.PARAMETERS]) == {truth.parameters}
        assert set(held[data.OPTIMIZER_STATES]) == {truth.states}
        # The reducer counts gradients, and memory of buckets; both are on their way.
        assert is_rounded(max(held[data.TARGETS]), counters["peak_bound"])
        assert is_rounded(max(held[data.WAITING]), counters["peak_unreduced"])
        assert counters["peak_bucket"] <= max(held[data.ON_THEIR_WAY]) <= counters["peak_bucket"] + SLACK
        assert max(held[data.ACTIVATIONS]) > 0
        for name in (data.TARGETS, data.WAITING, data.COPIES):
            assert held[name][0] == held[name][-1] == 0
        assert {name: len(spans) for name, spans in step.phases.items()} == {
            "forward": 2,
            "backward": 2,
            "step": 1,
            "gather": 1,
        }
        sums = step.sums()
        assert [sum(held[name][index] for name in data.CATEGORIES) for index in range(len(sums))] == sums
        peak = step.peak()
        assert peak.bytes == max(sums) == sum(peak.held.values()) == max(peak.bytes for peak in step.peaks().values())
        assert step.about["rank"] == rank and step.about["deepcompile"] and step.about["step"] == 3


def test_only_the_recorded_step_is_touched(recorded):
    """Methods that stay wrapped would slow each later step."""
    wrapped = ["_backward_epilogue", "_backward_prologue", "backward", "step"]
    for truth in recorded:
        # Two micro-batches a step.
        assert truth.owned == [[]] * 4 + [wrapped] * 2 + [[]] * 4
        (line,) = truth.lines
        assert "peak" in line and "step3-rank" in line


OTHERS = [
    Case(model="RepeatedLayers", stage=2, offloaded=True),
    Case(model="RepeatedLayers", config={"compile": {"regional_compilation": True, "overlap_param_gather": True}}),
    Case(model="FrozenSubclass"),
]


@pytest.mark.parametrize("case", OTHERS, ids=["offloaded", "overlapped", "subclass"])
def test_other_ways_to_train(ranks, tmp_path, case):
    """Memory on the host, on its way, or of a weight made of two tensors, would be left out of the picture."""
    for rank, truth in enumerate(ranks(2).run(record, case, tmp_path)):
        step = data.read(tmp_path / f"step3-rank{rank}.json")
        assert set(step.held[data.PARAMETERS]) == {truth.parameters}
        assert set(step.phases) == {"forward", "backward", "step", "gather"}
        targets = step.held[data.TARGETS]
        if not case.offloaded:
            assert is_rounded(max(targets), truth.counters["peak_bound"]) and targets[-1] == 0
        elif torch.cuda.is_available():
            # The picture is of the device.
            assert set(targets) == {0} and truth.counters["peak_on_host"] > 0
        else:
            # The memory in which targets lie on the host stays.
            assert set(targets) == {targets[0]} and targets[0] >= truth.counters["peak_on_host"] > 0


@pytest.mark.options("compile.memory_picture")
@on_ranks(2)
def test_without_the_key_and_without_deepcompile(tmp_path):
    """An engine without the key would carry a recorder, or one without DeepCompile would record nothing."""
    engine = make_engine(build(CASE), CASE)
    train(engine, CASE, 0)
    assert "_memory_recorder" not in vars(engine) and own(engine) == []
    engine.destroy()
    engine = make_engine(build(CASE), with_picture(dataclasses.replace(CASE, deepcompile=False), tmp_path, step=2))
    for number in range(2):
        train(engine, CASE, number)
    # Of the partition's gradients, in the format of gradients.
    (partition,) = engine.optimizer.partition_size
    size = int(partition) * engine.optimizer.gradient_accumulation_dtype.itemsize
    engine.destroy()
    step = data.read(tmp_path / f"step2-rank{dist.get_rank()}.json")
    assert not step.about["deepcompile"]
    assert max(step.held[data.TARGETS]) >= size
    assert set(step.phases) == {"forward", "backward", "step", "gather"}


class Boom(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@on_ranks(2)
def test_a_step_that_raises_is_drawn_and_the_error_passes(tmp_path, where):
    """The step that runs out of memory is the one to look at, and a recorder could hide its error or its picture."""
    case = dataclasses.replace(CASE, accumulation=1)
    with logged(logging.INFO) as lines:
        engine = make_engine(build(case), with_picture(case, tmp_path, step=2))
        train(engine, case, 0)

        def explode(*_args, **_kwargs):
            raise Boom("on purpose")

        if where == "forward":
            engine.module.register_forward_pre_hook(explode)
        with pytest.raises(Boom):
            loss = engine(batch(1, 0, dist.get_rank(), 4))
            if where == "backward":
                loss.register_hook(explode)
            engine.backward(loss)
            engine.optimizer.optimizer.step = explode
            engine.step()
        assert not torch.autograd._profiler_enabled() and own(engine) == []
        engine.destroy()
    (file,) = tmp_path.glob(f"*rank{dist.get_rank()}*.json")
    assert file.name == f"step2-rank{dist.get_rank()}.json" and len(about_pictures(lines)) == 1
    step = data.read(file)
    assert step.raised == "Boom: on purpose"
    assert where in step.phases and max(step.sums()) > 0


@on_ranks(2)
def test_training_that_ends_before_the_step(tmp_path):
    """Nobody would know why there is no picture."""
    with logged(logging.INFO) as lines:
        engine = make_engine(build(CASE), with_picture(CASE, tmp_path))
        train(engine, CASE, 0)
        engine.destroy()
        engine.destroy()
    (line,) = about_pictures(lines)
    assert "training ended after 1 of the 3 steps" in line and "memory_picture.step" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.follows("set {}.step to an earlier one")
@on_ranks(1)
def test_several_engines_record_one_after_the_other(tmp_path):
    """Two profilers at once raise, and the second engine would write over the first one's files."""
    case = dataclasses.replace(CASE, accumulation=1, model="FillsPartition")
    # The second engine waits until the first one's step has ended. A later run loses no file of an earlier one.
    for count, written in ((2, ["step1-rank0.json", "step2-rank0.json"]), (1, ["step1-rank0-2.json"])):
        before = {*tmp_path.glob("*.json")}
        engines = [make_engine(build(case), with_picture(case, tmp_path, step=1)) for _ in range(count)]
        for step in range(2):
            losses = [engine(batch(step, 0, 0, 4)) for engine in engines]
            for engine, loss in zip(engines, losses):
                engine.backward(loss)
            for engine in engines:
                engine.step()
        for engine in engines:
            engine.destroy()
        files = {*tmp_path.glob("*.json")}
        assert before < files and sorted(path.name for path in files - before) == written


@on_ranks(2)
def test_another_profiler_is_left_alone(tmp_path):
    """Recording would stop the profiler of the user's."""
    # The profiler warms up in the step that is to be recorded, and records the next.
    case = dataclasses.replace(CASE, accumulation=1)
    with logged(logging.INFO) as lines:
        engine = make_engine(build(case), with_picture(case, tmp_path, step=1))
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profiler:
            for step in range(2):
                train(engine, case, step)
                profiler.step()
        engine.destroy()
    assert any(event.name == "deepcompile::step" for event in profiler.events())
    (line,) = about_pictures(lines)
    assert "profiler" in line


@pytest.mark.options("compile.memory_picture")
@pytest.mark.follows("and this engine has stage {}; leave {} out", "{}.folder: {}; name another folder")
@on_ranks(2)
def test_what_cannot_be_recorded_is_refused_at_once(tmp_path):
    """A training would find out at its step that it cannot write, hours later.

    Or the log, which does not know what ranks gather objects with, would end the process without an error.
    """
    from deepspeed import comm

    (tmp_path / "file").touch()
    # Where one rank alone raised, the others would wait for it.
    of_rank = str(tmp_path / "file" / "below" if dist.get_rank() == 1 else tmp_path)
    raised = []
    for more in (
        {"zero_optimization": {"stage": 0}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        {"zero_optimization": {"stage": 3}},
        {"compile": {"memory_picture": {"folder": of_rank}}},
        {"compile": {"memory_picture": {"folder": str(tmp_path), "step": 0}}},
        # As is advised, beside DeepSpeed's log of communication.
        {
            "compile": {"memory_picture": {"folder": f"{tmp_path}/other", "step": 1}},
            "comms_logger": {"enabled": True},
        },
    ):
        picture = {"memory_picture": {"folder": str(tmp_path)}}
        sections = {"compile": picture, **more}
        make = functools.partial(engine_by_configuration, build(CASE), False, **sections)
        raised.append(outcome(lambda make=make: make().destroy()))
    # DeepSpeed has one log for all engines.
    comm.comm.comms_logger.enabled = False
    # An engine that is refused changes nothing in the process, as ZeRO-3 would.
    assert torch.nn.functional.linear.__name__ == "linear"
    *of_stages, unwritable, no_step, advised = raised
    for stage, said in zip((0, 3), of_stages, strict=True):
        assert said == (
            "ValueError: compile.memory_picture records engines of ZeRO stage 1 and 2 only, and this engine has stage "
            f"{stage}; leave compile.memory_picture out, or set zero_optimization.stage to 1 or 2"
        )
    assert "compile.memory_picture.folder" in unwritable and "name another folder" in unwritable
    assert "cannot be written on rank 1" in unwritable
    assert unwritable.startswith("ValueError: ") and no_step.startswith("ValueError: ")
    assert "memory_picture.step" in no_step
    assert advised is None


class Broken(importlib.abc.Loader):
    """Finds a library whose import ends as one does that does not fit the installed NumPy."""

    def __init__(self, library):
        self._library = library

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] == self._library else None

    def exec_module(self, module):
        raise ValueError("numpy.dtype size changed")


@contextlib.contextmanager
def without_matplotlib(how):
    """Within it this process cannot import matplotlib, which is "missing" or "broken"."""
    library, drawer = "matplotlib", f"{data.__package__}.draw_png"
    imported = {name for name in sys.modules if name.partition(".")[0] == library or name == drawer}
    before = {name: sys.modules.pop(name) for name in imported}
    finders = [*([Broken(library)] if how == "broken" else []), *sys.meta_path]
    if how == "missing":
        sys.modules[library] = None
    try:
        with mock.patch.object(sys, "meta_path", finders):
            with pytest.raises(ImportError if how == "missing" else ValueError):
                importlib.import_module(library)
            yield
    finally:
        # Of all others, torch among them, what was imported meanwhile stays.
        sys.modules.pop(library, None)
        sys.modules.update(before)


def record_without(case, folder, how):
    """Records the first step without matplotlib; returns all that was logged of pictures."""
    with without_matplotlib(how), logged(logging.INFO) as lines:
        engine = make_engine(build(case), with_picture(case, folder, step=1))
        train(engine, case, 0)
        engine.destroy()
    return [line for line in lines if "compile.memory_picture" in line]


@pytest.mark.follows(
    "matplotlib cannot be imported; pip install matplotlib",
    "now or before `python -m {} FILE.json` draws what is only written meanwhile",
)
@pytest.mark.parametrize("how", ["missing", "broken"])
def test_without_matplotlib_the_data_is_written(ranks, tmp_path, capsys, how):
    """A library that cannot be imported would end the training."""
    first, last = ranks(2).run(record_without, dataclasses.replace(CASE, accumulation=1), tmp_path, how)
    warning, told = first
    assert "matplotlib cannot be imported; pip install matplotlib, now or before" in warning
    assert len(last) == 1, "only the first rank warns"
    for rank, line in enumerate([told, *last]):
        assert f"{tmp_path}/step1-rank{rank}.json" in line
        assert [path.name for path in tmp_path.glob(f"*rank{rank}*")] == [f"step1-rank{rank}.json"]
    assert f"`python -m {data.__package__} FILE.json` draws" in warning
    file, picture = f"{tmp_path}/step1-rank0.json", tmp_path / "step1-rank0.png"
    with without_matplotlib(how), pytest.raises(SystemExit):
        main([file])
    assert "matplotlib cannot be imported; pip install matplotlib" in capsys.readouterr().err and not picture.exists()
    if importlib.util.find_spec("matplotlib"):
        assert main([file]) == 0 and picture.stat().st_size


# The command ------------------------------------------------------------------------------------------------------


def made_up(**more) -> data.StepMemory:
    held = {name: [0, 100 * 2**20, 0] for name in data.CATEGORIES}
    phases = {"forward": [(0.0, 0.4)], "backward": [(0.5, 1.5)], "step": [(1.6, 2.0)]}
    fields: Dict[str, Any] = {"seconds": [0.0, 1.0, 2.0], "held": held, "phases": phases, **more}
    return data.StepMemory(**fields)


@pytest.mark.follows("holds no step's memory; give a file", "give one or two files, not {}", "is no JSON; give a file")
def test_the_command_lays_two_steps_over_each_other(recorded, folder, tmp_path, capsys):
    """One run would hide the other."""
    files = [str(folder / f"step3-rank{rank}.json") for rank in range(2)]
    assert main([*files, "--out", str(tmp_path / "both")]) == 0
    assert "rank 0 of 2: peak" in capsys.readouterr().out
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit):
        main([*files, files[0]])
    assert "give one or two files, not 3" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "cannot be read"),
        ("no JSON", "is no JSON"),
        ("[]", "holds no step's memory"),
    ],
)
def test_the_command_refuses_other_files_in_a_sentence(tmp_path, capsys, content, sentence):
    """A traceback would stand for a sentence."""
    file = tmp_path / "other.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit):
        main([str(file)])
    said = capsys.readouterr().err
    assert sentence in said and str(file) in said and "Traceback" not in said


@pytest.mark.follows("draw it with the DeepSpeed that wrote it", "record the step again")
@pytest.mark.quick
def test_what_is_advised_of_files_that_cannot_be_read(monkeypatch, tmp_path):
    """Who recorded the step anew, or drew it with the DeepSpeed that wrote it, would be refused in turn."""
    step, file = made_up(), tmp_path / "step.json"
    with monkeypatch.context() as of_another_version:
        of_another_version.setattr(data, "VERSION", 99)
        step.write(file)
        assert data.read(file).held == step.held
    with pytest.raises(ValueError, match="reads version 1; draw it with the DeepSpeed that wrote it"):
        data.read(file)
    made_up(seconds=[0.0]).write(file)
    with pytest.raises(ValueError, match="is damaged: .*; record the step again"):
        data.read(file)
    step.write(file)
    assert data.read(file).held == step.held


@pytest.mark.follows("cannot be written: {}; name another place with --out")
def test_the_command_says_where_it_cannot_write(folder, tmp_path, recorded, capsys):
    """A traceback would stand for the name of the option that helps."""
    (tmp_path / "file").touch()
    file = str(folder / "step3-rank0.json")
    with pytest.raises(SystemExit):
        main([file, "--out", str(tmp_path / "file" / "picture")])
    assert "cannot be written" in (said := capsys.readouterr().err) and "name another place with --out" in said
    assert main([file, "--out", str(tmp_path / "picture")]) == 0


@pytest.mark.quick
def test_peaks_and_thinning():
    """A course that is thinned to its every tenth value would lose the peak."""
    step = made_up()
    peak = step.peak()
    assert (peak.second, peak.bytes, peak.phase) == (1.0, 800 * 2**20, "backward")
    # What was held when a phase began counts for it.
    assert step.peaks()["forward"].bytes == 0 and step.peaks()["step"].bytes == 800 * 2**20
    many = made_up(
        seconds=[index / 100 for index in range(1000)],
        held={name: [index % 37 for index in range(1000)] for name in data.CATEGORIES},
    )
    few = many.thinned(100)
    assert len(few.seconds) < 200 and few.peak() == many.peak() and few.seconds[-1] == many.seconds[-1]


@pytest.mark.quick
def test_memory_that_is_freed_unseen():
    """An address that is given out again, where the release was not seen, would count twice."""
    from deepspeed.compile.tools.memory_picture.classify import _Allocations

    blocks = _Allocations({512: (40, data.TARGETS)})
    blocks.change(0, 64, 100, data.REST)
    blocks.put(1, 64, data.WAITING)
    blocks.put(1, 512, data.WAITING)  # stands
    blocks.put(1, 128, data.WAITING)  # unknown
    blocks.change(2, 64, 30, data.REST)
    assert [block.ended for block in blocks.all] == [None, 2, None]
    assert blocks.all[1].courses == [(0, data.REST), (1, data.WAITING)]
    assert blocks.category(512) == data.TARGETS and blocks.category(64) == data.REST
    blocks.change(3, 64, -30, data.REST)
    blocks.change(3, 256, -7, data.REST)
    blocks.change(4, 512, -40, data.REST)
    assert blocks.at == {}


def test_a_partition_that_autograd_allocates():
    """The partition of another system, which gradients are copied into, would be a part of the rest.

    0.19.8 with DeepCompile allocates it in a hook of autograd, in which all kinds of memory are allocated.
    """
    from deepspeed.compile.tools.memory_picture import record

    cpu, layer = torch.device("cpu"), torch.nn.Linear(64, 256, bias=False)
    held = {}

    def allocate(_):
        held["partition"] = torch.zeros(layer.weight.numel())
        held["other"] = torch.zeros(300)  # what no gradient is copied into
        held["other"].copy_(torch.ones(300))

    def bind(weight):
        held["partition"].copy_(weight.grad.view(-1))
        weight.grad = None

    layer.weight.register_post_accumulate_grad_hook(bind)
    recording = record.Recording(cpu, {data.PARAMETERS: [layer.weight]})
    with record.phase("forward", cpu):
        y = layer(torch.randn(2, 64))
        y.register_hook(allocate)
    with record.phase("backward", cpu):
        y.sum().backward()
    with record.phase("step", cpu):
        copy = held["partition"].to(torch.float64)
        del copy, held["partition"]
    step = recording.stop({})
    assert max(step.held[data.TARGETS]) == layer.weight.nbytes
    assert max(step.held[data.COPIES]) == 2 * layer.weight.nbytes
    # Since the hook, when no gradient was there.
    begins = step.held[data.TARGETS].index(layer.weight.nbytes)
    assert step.held[data.ON_THEIR_WAY][begins] < 100 and step.held[data.TARGETS][-1] == 0


def test_the_memory_of_tensors_that_are_made_of_others():
    """A tensor that is made of others has no memory of its own, and asking it for some raises."""
    made = Scaled(torch.zeros(512, 2, dtype=torch.int8), torch.zeros(512, 1))
    kept = flattened([[made, None], torch.zeros(3)])
    assert [size for _, size, _ in storages({data.OPTIMIZER_STATES: kept}, "cpu")] == [1024, 2048, 12]


@on_ranks(2)
def test_sharded_parameters_are_parameters():
    """This rank's partition would be in the rest: neither the module nor the flat tensors hold it."""
    case = Case(model="RepeatedLayers", dtype="bf16", config={"compile": {"shard_parameters": "all"}})
    engine = make_engine(build(case), case)
    engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
    engine.step()
    held = sum(size for _, size, name in storages(tensors_of(engine), device().type) if name == data.PARAMETERS)
    partitions = sum(2 * int(numel) for numel in engine.optimizer.partition_size)
    engine.destroy()
    assert held >= partitions > 0


def event_of(nanoseconds, name, **fields):
    kind = torch._C._profiler._EventType.Allocation if fields else None
    fields = SimpleNamespace(device=SimpleNamespace(type="cuda"), **fields)
    return SimpleNamespace(
        start_time_ns=nanoseconds, name=name, tag=kind, extra_fields=fields, start_tid=0, children=[]
    )


def test_memory_that_the_allocator_does_not_count():
    """Parameters in mapped memory would hide the rest: a GPU's total would be less than what tensors hold."""
    standing = {64: (1000, data.PARAMETERS), 128: (200, data.OPTIMIZER_STATES)}
    # The allocator has the states, and other memory. It does not count parameters, and 50 bytes of no known tensor.
    begins = event_of(0, f"{classify.MARK}forward{classify.BEGIN}")
    allocated = event_of(1, "[memory]", ptr=256, alloc_size=30, total_allocated=237)
    step = classify.read_events([begins, allocated], "cuda", standing, {}, uncounted=1050)
    assert step.held[data.PARAMETERS][-1] == 1000 and step.held[data.OPTIMIZER_STATES][-1] == 200
    assert (step.held[data.REST][0], step.sums()[-1]) == (57, 1287)

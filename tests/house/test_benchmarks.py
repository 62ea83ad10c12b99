# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark measures what it says: gradients apart from all else, all systems on the same training."""

import dataclasses
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from support.benchmarks import BENCHMARKS, benchmarks
from support.pool import free_port
from support.programs import ON_CPU, launch, run_program

PROGRAM = pytest.mark.program("benchmarks", "requirements/benchmarks.txt")

ROOT = Path(__file__).resolve().parents[2]

# Stands for DeepSpeed's launcher: instead of starting ranks, it writes what a rank would find as the result.
LAUNCHER = """
import importlib.util, json, sys
import deepspeed

arguments = sys.argv[1:]
module = arguments[arguments.index("--module") + 1]
found = {"deepspeed": deepspeed.__file__, "module": module, "file": importlib.util.find_spec(module).origin}
with open(arguments[arguments.index("--json") + 1], "w") as file:
    json.dump(found, file)
"""


def compare(*arguments):
    """Runs benchmarks.compare on the CPU, as a shell in the repository's root would; returns the finished process."""
    return run_program([sys.executable, "-m", "benchmarks.compare", *arguments], ROOT, **ON_CPU)


def beside_benchmarks(folder):
    """Links the package in a folder, where the checkout's deepspeed/, a part of the package, is not. Returns it."""
    (folder / "benchmarks").symlink_to(BENCHMARKS)
    return folder


SEQ = 16


def computed_again(shape):
    """Returns the operations of one forward of all blocks but for their last products, which no gradient needs."""
    heads = shape.num_attention_heads * shape.head_dim
    both = heads + shape.num_key_value_heads * shape.head_dim
    matrices = 2 * shape.hidden_size * both + 2 * shape.hidden_size * shape.intermediate_size
    return shape.num_hidden_layers * SEQ * (2 * matrices + 4 * heads * SEQ)


def gradients_of_the_first_input(shape):
    """Returns the operations that the input of the first block would take if it had a gradient, with adapters of 4."""
    out = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    return -2 * SEQ * shape.hidden_size * (out + 3 * 4)


def products(counter):
    """Returns the operations counted but for those of rotations, which some releases of transformers multiply out."""
    of_rotations = [counts for name, counts in counter.get_flop_counts().items() if name.endswith(".rotary_emb")]
    return counter.get_total_flops() - sum(sum(counts.values()) for counts in of_rotations)


@pytest.mark.parametrize(
    "changed, checkpoint, lora, apart",
    [
        ({}, False, None, lambda shape: 0),
        ({"tie_word_embeddings": True}, False, None, lambda shape: 0),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, False, None, lambda shape: 0),
        # What is computed again is no use of the device, so it does not count.
        ({}, True, None, computed_again),
        # Nothing is trained before the first block.
        ({}, False, 4, gradients_of_the_first_input),
    ],
    ids=["plain", "tied", "experts", "checkpointed", "lora"],
)
def test_operations_of_a_token(package, changed, checkpoint, lora, apart):
    """The formula would count other products than a forward and a backward compute.

    Torch's counter counts causal attention as a whole too, of products alone, so attention runs as such. It does not
    know attention's kernel for CPUs.
    """
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    workload = package("workload")
    shape = dataclasses.replace(workload.SHAPES["tiny"], **changed)
    model = workload.build_model(shape, torch.float32, "cpu", checkpoint)
    model.set_attn_implementation("eager")
    if shape.num_experts:
        model.set_experts_implementation("eager")
    if lora:
        workload.add_adapters(model, lora)
    ids = torch.zeros(1, SEQ, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert products(counter) - SEQ * package("flops").per_token(model, SEQ) == apart(shape)


def test_weights_that_are_drawn_elsewhere(package):
    """A model that starts on the host would have other weights, so its losses could not be compared."""
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    workload = package("workload")
    here, elsewhere = (
        workload.build_model(workload.SHAPES["tiny"], torch.bfloat16, "cpu", False, drawn_on)
        for drawn_on in (None, "cpu:0")
    )
    assert all(map(torch.equal, here.parameters(), elsewhere.parameters()))


def result_of(device="NVIDIA H200", **run):
    """Returns what a table reads of a result, for a step of 0.5 s."""
    settings = {"system": "fsdp2-kept", "shape": "tiny", "layers": None, "dtype": "bf16", "seq": 4096, "lora": None}
    settings |= {"micro_batch": 2, "accumulation": 3, "warm": 1, "steps": 3, "checkpoint": False, "stage": 1}
    settings |= {"adam": "fused", "bucket": 1, "optimizer": "adamw", "learning_rate": 0.1}
    where = {"device": device, "world": 2, "gpus": 2, "deepspeed": "0", "nccl": None, "torch": "2"}
    where |= {"transformers": "5", "host": "vm", "date": "2026-11-26"}
    phases = {name: {"after": 1, "peak": 2} for name in ("forward", "backward", "step")}
    rank = {
        "phases": phases,
        "counters": {},
        "most_gradients": 1,
        "host": 1,
        "reserved": 1,
        "outside": 1,
        "step_s": 0.5,
    }
    rank |= {"phases_s": {}, "first_step_s": 1.0}
    found = {"run": settings | run, "environment": where, "ranks": [rank], "parameters": 1, "flops_per_token": 10**10}
    return found | {"step_s": 0.5, "first_step_s": 1.0, "steps_s": [1.0, 0.5, 0.5], "losses": [2.0, 1.0]}


def test_tokens_a_second_and_mfu(package):
    """A table would leave out a micro-batch, or divide by the peak of another device or dtype."""
    tables = package("tables")
    # 2 * 3 * 4096 tokens in 0.5 s, each of 1e10 operations.
    assert tables.speed(result_of()) == "0.5000 s/step, 49,152 tokens/s of each rank, MFU 49.7%"
    table = tables.markdown({"FSDP2, kept": result_of()}, [])
    assert "| MFU | 49.7% |" in table and "| tokens/s of each rank | 49,152 |" in table
    assert "6 N + 12 L H Q T = 10.00 GFLOP" in table and "989.4 TFLOP/s" in table
    assert "| system | fsdp2-kept |" in table
    for unknown in (result_of("CPU"), result_of("NVIDIA H100 PCIe"), result_of(dtype="fp32")):
        assert tables.speed(unknown) == "0.5000 s/step, 49,152 tokens/s of each rank"
        table = tables.markdown({"FSDP2, kept": unknown}, [])
        assert "| MFU" not in table and "No MFU: the peak of" in table


@pytest.mark.parametrize("tiny", [True, False])
def test_rows_of_long_sequences(package, monkeypatch, tiny):
    """A row would fail on the GPU for an argument that is refused, or be cut into other tiles than the table says."""
    lengths, settings = package("lengths"), package("settings")
    monkeypatch.setenv("RANK", "0")
    for row in lengths.ROWS:
        monkeypatch.setattr(sys, "argv", ["measure", *row.all_arguments(tiny)])
        given = settings.parse_command_line("").settings
        tiles = row.seq // lengths.TILE
        assert (given.mlp_tiles, given.loss_tiles) == (tiles if row.mlp else None, tiles if row.loss else None)
        assert given.brief and given.checkpoint and given.inputs_on_host and given.layers == row.layers


def test_a_table_of_long_sequences(package):
    """A row that failed would take the others with it, or systems would be compared that trained other lengths."""
    lengths = package("lengths")
    others, fork, *_ = lengths.ROWS
    longer = next(row for row in lengths.ROWS if row.seq > fork.seq)
    slower = result_of() | {"step_s": 1.0}
    no = package("results").no_result("not run, 3 s were left")
    lines = lengths.table({others: slower, fork: result_of(), longer: no}).splitlines()
    assert "| 131072 | 6 | fork, tiles | not run, 3 s were left |" in lines[4]
    assert lines[-1] == "| 32768 | 8 | fork / FSDP2 | 0.500 | 1.000 |"


def test_a_line_for_each_run(package):
    """Losses would be compared of runs that train something else."""
    other, apart = result_of(seq=64), result_of(remainders=True)
    apart["losses"] = [2.5, 0.5]
    lines = package("tables").short({"a": result_of(), "b": other, "c": apart}).splitlines()[2:]
    assert [line.split(" | ")[-3:] for line in lines] == [["", "", " |"]] * 2 + [["a", "+0.00e+00", "5.00e-01 |"]]


def traced_step(tmp_path):
    """Writes a trace of products and a collective, in microseconds. Returns its file."""
    # On stream 7: product 0 to 100; idle; product 300 to 500 beside a collective; idle; an addition 700 to 800; idle;
    # product 850 to 950.
    ran = [
        ("gemm<1>(int)", 7, 0, 100, -10),
        ("ncclDevKernel_Reduce", 9, 150, 298, -5),
        ("gemm<1>(int)", 7, 300, 500, -5),
        ("ncclDevKernel_Reduce", 9, 299, 510, -5),
        ("add", 7, 700, 800, 650),
        ("Memcpy", 11, 820, 848, 0),
        ("gemm<1>(int)", 7, 850, 950, 0),
        # Of another size, so that it says nothing of how long the second one takes alone.
        ("gemm<1>(int)", 7, 950, 1950, 0),
    ]
    events = []
    for number, (name, stream, begin, end, launched) in enumerate(ran):
        args = {"correlation": number, "External id": number, "stream": stream, "grid": [1, 1, 1]}
        events.append({"cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": args})
        events.append({"cat": "cuda_runtime", "name": "launch", "ts": launched, "dur": 5, "args": args})
        of_op = {"External id": number, "Input Dims": [[end - begin == 1000]]}
        events.append({"cat": "cpu_op", "name": "aten::mm", "ts": launched, "dur": 5, "args": of_op})
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    return file


def test_where_a_traced_step_is_idle(package, tmp_path):
    """An idle time would have another cause, or a product beside a collective would pass for one by itself."""
    idle = package("idle")
    kernels = idle.read(traced_step(tmp_path))
    assert idle.compute_stream(kernels) == 7
    assert [(pause.begin, pause.length, pause.cause) for pause in idle.idle_times(kernels)] == [
        (100, 200, "ncclDevKernel_Reduce"),
        (500, 200, "host: not launched yet"),
        (800, 50, "other stream: Memcpy"),
    ]
    (row,) = idle.slowed(kernels)
    assert (row.name, row.alone, row.count_alone, row.beside, row.count_beside, row.lost) == (
        "gemm",
        100,
        2,
        200,
        1,
        100,
    )
    report = "\n".join(idle.lines(kernels))
    assert "idle 0.4 ms" not in report and "idle 0.5 ms, in 3 times" in report
    assert "take 2.00 of their time alone: 0.1 ms lost" in report


def test_copies_between_gpus_are_communication(package):
    """A step whose gradients go by copies would seem to wait for nothing, and its products to be beside nothing."""
    idle = package("idle")

    def ran(name, stream, begin, end):
        return idle.Kernel(begin, end, name, stream, float("-inf"), "")

    copy, product = "Memcpy PtoP (Device -> Device)", "gemm"
    # The second product waits for a copy, and another copy runs during a fifth of it.
    kernels = [
        *(ran(product, 7, 0, 100), ran(copy, 9, 100, 200), ran(product, 7, 201, 351), ran(copy, 9, 210, 240)),
        # Copies within a GPU are none.
        *(ran("Memcpy DtoD (Device -> Device)", 11, 360, 380), ran(product, 7, 360, 460)),
    ]
    assert [pause.cause for pause in idle.idle_times(kernels)] == ["Memcpy PtoP", "the stream's own order"]
    (row,) = idle.slowed(kernels)
    assert (row.alone, row.count_alone, row.beside, row.count_beside) == (100, 2, 150, 1)
    assert "2 of communication 0.1, both at once 0.0" in "\n".join(idle.lines(kernels))


def test_a_run_that_fails_loses_no_other(package, monkeypatch, tmp_path):
    """A table would be lost with all its runs where one fails, or where the command is ended."""
    compare = package("compare")
    outcomes = iter([result_of("CPU"), {"why": "ended with exit status 1", "failed": True}])
    # Nothing is left behind the second run, as when a signal comes.
    monkeypatch.setattr(compare.processes, "run", lambda *_: next(outcomes))
    monkeypatch.setattr(compare, "visible_gpus", list)
    monkeypatch.setattr(sys, "argv", ["compare", "--systems", "FSDP2, kept", "FSDP2, resharded", "DDP"])
    with pytest.raises(StopIteration):
        compare.measure_all(*compare.parse_arguments(), tmp_path)
    table = (tmp_path / "results.md").read_text()
    assert "| step, median, s | 0.5000 |" in table
    assert "Not measured: FSDP2, resharded, ended with exit status 1" in table
    assert json.loads((tmp_path / "results.json").read_text())["plain"]["FSDP2, kept"] == result_of("CPU")


def test_what_the_readme_compares(package, monkeypatch):
    """The command of README.md's table would leave out a mode of FSDP2, or run a system that nobody asked for."""
    compare = package("compare")
    fork, fsdp2 = "fork", ["FSDP2, kept", "FSDP2, resharded", "FSDP2, resharded, fp32 reduce"]
    expected = [fork, f"{fork}, remainders", "fork, sharded", "fork, sharded, remainders", *fsdp2, "base"]
    assert compare.default_systems("plain", ["0", "1"], []) == expected
    monkeypatch.setattr(sys, "argv", ["compare", "--cases", "plain", "checkpoint", "--", "--adam", "fused"])
    options, rest = compare.parse_arguments()
    reasons = [compare.reason_against(name, "checkpoint", ["0", "1"], rest, options) for name in expected]
    assert reasons == [None] * 7 + ["--base was not given"]
    reasons = [compare.reason_against(name, "plain", ["0"], rest, options) for name in expected]
    assert reasons[:5] == [None, None, "one rank has nothing to shard", "one rank has nothing to shard", None]


class Decoder(torch.nn.Module):
    """Has the parts of a Qwen3 that FSDP2 shards one by one."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(tie_word_embeddings=False, vocab_size=8)
        self.model = torch.nn.Module()
        self.model.embed_tokens, self.model.norm = torch.nn.Embedding(8, 4), torch.nn.LayerNorm(4)
        self.model.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.lm_head = torch.nn.Linear(4, 8)
        self.bfloat16()

    def forward(self, input_ids):
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return types.SimpleNamespace(logits=self.lm_head(self.model.norm(x)))

    def loss_function(self, logits, labels, vocab_size):
        return logits.float().square().mean()


class Reductions(TorchDispatchMode):
    """Notes the dtypes of what is reduced."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if "c10d" in str(function) and "reduce" in str(function):
            tensors = torch.utils._pytree.tree_leaves(args)
            self.dtypes |= {str(tensor.dtype) for tensor in tensors if isinstance(tensor, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def seen_of_fsdp2(system):
    """Returns the units that are whole between forward and backward, and the dtypes of what is reduced."""
    with benchmarks() as package, torch.compiler.set_stance("force_eager"):
        settings = package("settings").Settings(system=system, backend="eager")
        model = Decoder()
        trained = package("systems").make_system(settings, model)
        loss = trained.forward(torch.zeros(1, 2, dtype=torch.long))
        units = {"embedding": model.model.embed_tokens, "block": model.model.layers[0], "head": model.lm_head}
        whole = [name for name, unit in units.items() if not isinstance(unit.weight, DTensor)]
        with Reductions() as reductions:
            trained.backward(loss, True)
        trained.step(True)
        dist.barrier()
    return whole, reductions.dtypes


@pytest.mark.table
@pytest.mark.parametrize(
    "system, whole, dtype",
    [
        ("fsdp2-kept", ["embedding", "block", "head"], "torch.bfloat16"),
        ("fsdp2-resharded", ["head"], "torch.bfloat16"),
        ("fsdp2-fp32-reduce", ["head"], "torch.float32"),
    ],
)
def test_modes_of_fsdp2(ranks, system, whole, dtype):
    """A column would have the figures of another mode of FSDP2 than its name says."""
    assert ranks(2).run(seen_of_fsdp2, system) == [(whole, {dtype})] * 2


def test_figures_of_a_step_on_the_host(package, monkeypatch):
    """A part would be timed that does not step the partition, or its time be divided by another number."""
    host, numel, timed = package("host"), 1000, []

    def seconds(part, repetitions):
        timed.append(part)
        part()
        return 1e-6 * len(timed)

    steps = []
    monkeypatch.setattr(host, "seconds", seconds)
    monkeypatch.setattr(host, "step_partition", lambda adam, updates, *_: steps.append(updates is not None))
    monkeypatch.setattr(host.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", torch.optim.SGD)
    figures = dict(host.measure(numel, 3))
    assert steps == [False, True]
    assert [round(figure, 6) for figure in figures.values()] == [1, 2, 3, 4, 2 * 28 / 4]


@PROGRAM
def test_parts_of_a_step_on_the_host(tmp_path):
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, *"-m benchmarks.host --numel 5000 --repetitions 1".split()]
    ended = run_program(command, beside_benchmarks(tmp_path), **ON_CPU, **alone, MASTER_PORT=str(free_port()))
    printed = ended.stdout
    assert ended.returncode == 0, printed
    figures = dict(re.findall(r"^(norm|ranges|Adam|host memory)[^\n]* ([\d.]+)$", printed, re.MULTILINE))
    assert list(figures) == ["norm", "ranges", "Adam", "host memory"], printed
    # Seven numbers of four bytes for each element, to the last digit printed.
    assert float(figures["host memory"]) == pytest.approx(28 / float(figures["Adam"]), rel=0.01, abs=6e-4)


@PROGRAM
@pytest.mark.parametrize(
    "arguments",
    ["experts", "experts --deepcompile", pytest.param("sequences --deepcompile --shard", marks=pytest.mark.slow)],
)
def test_steps_in_which_ranks_exchange_tokens(tmp_path, arguments):
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    command = f"--num_accelerators 2 --module benchmarks.exchanges {arguments} --tiny".split()
    printed = launch(command, beside_benchmarks(tmp_path), **ON_CPU).stdout
    mode = {1: "off", 2: "DeepCompile", 3: "DeepCompile, sharded"}[len(arguments.split())]
    assert re.search(rf"^{arguments.split()[0]}, {mode}: [\d.]+ ms a step, .* losses [\d.]+ to [\d.]+$", printed, re.M)


@PROGRAM
def test_parts_of_a_step_on_one_device(tmp_path):
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    options = "--shape tiny --layers 1 --seq 32 --repetitions 1 --json out".split()
    command = [sys.executable, "-m", "benchmarks.parts", *options]
    # Blocks and losses run as they are: a C++ compiler takes long.
    printed = run_program(command, beside_benchmarks(tmp_path), **ON_CPU, TORCHDYNAMO_DISABLE="1").stdout
    kinds = re.findall(r"^(AdamW|remainders|norm|loss|model)[^\n]*? [\d.]+ ms", printed, re.MULTILINE)
    assert kinds == ["AdamW"] * 5 + ["remainders"] * 2 + ["norm"] + ["loss"] * 5 + ["model"], printed
    told = json.loads((tmp_path / "out").read_text())
    for name, figures in told.items():
        assert re.search(rf"^{re.escape(name)} +{figures['ms']:.2f} ms", printed, re.MULTILINE), printed
    # A floor is the time of the bytes that an update reads and writes. The norm reads two for each element.
    floors = [row["floor_ms"] for row in told.values() if row["floor_ms"]]
    assert [floor / floors[-1] for floor in floors] == pytest.approx([14] * 4 + [8, 13, 7, 1])
    assert "cannot compile" not in printed


def test_recorder_sets_gradients_apart(package):
    """Memory of gradients would count as another's, or another's as theirs.

    It is that of a plain loop, in which no reducer marks what memory is for.
    """
    recorder, results = package("recorder"), package("results")
    data, record, cpu = recorder.data, recorder.record, torch.device("cpu")
    layer = torch.nn.Linear(256, 1024, bias=False)
    x = torch.randn(8, 256)
    weight_bytes, output_bytes = layer.weight.nbytes, 8 * 1024 * 4

    def step():
        with record.phase("forward", cpu):
            y = layer(x)
        with record.phase("backward", cpu):
            y.backward(torch.ones_like(y))
            target = torch.empty(weight_bytes, dtype=torch.uint8)  # as for a flat partition
        with record.phase("step", cpu):
            scratch = torch.empty(weight_bytes, dtype=torch.uint8)
            copy = layer.weight.grad.to(torch.float64)  # as an optimizer's
            del scratch, target, copy
            layer.weight.grad = None

    recording = record.Recording(cpu, {data.PARAMETERS: [layer.weight]})
    step()
    line = recording.stop({})
    # Tensors of a few elements come and go beside these.
    slack = 4096
    forward, backward, optimizer = (results.allocated_in(line, name) for name in results.PHASES)
    assert 0 <= forward["after"] - weight_bytes - output_bytes < slack
    assert 2 * weight_bytes <= backward["after"] - forward["after"] < 2 * weight_bytes + 2 * output_bytes + slack
    assert 3 * weight_bytes - slack <= optimizer["peak"] - backward["after"] < 3 * weight_bytes + slack
    assert set(line.held[data.PARAMETERS]) == {weight_bytes}
    assert 0 <= max(line.held[data.ACTIVATIONS]) - output_bytes < slack
    assert 0 <= max(line.held[data.COPIES]) - 2 * weight_bytes < slack
    assert 2 * weight_bytes <= max(line.held[data.TARGETS]) < 2 * weight_bytes + 2 * output_bytes + slack
    gradients = line.sums(data.OF_GRADIENTS)
    assert 4 * weight_bytes <= max(gradients) < 4 * weight_bytes + 2 * output_bytes + slack
    in_forward = [held for held, second in zip(gradients, line.seconds) if second < line.phases["backward"][0][0]]
    assert max(in_forward) == 0 and gradients[-1] < 2 * output_bytes + slack


@pytest.mark.parametrize("safe_path", ["", "1"], ids=["plain_path", "safe_path"])
@pytest.mark.parametrize("named_by", ["site", "environment"])
def test_ranks_find_the_package_and_the_deepspeed_that_is_named(package, monkeypatch, tmp_path, named_by, safe_path):
    """The benchmark would measure another DeepSpeed than the one it names."""
    for folder, launcher in (("named", LAUNCHER), ("current", "raise SystemExit(3)")):
        (tmp_path / folder / "deepspeed" / "launcher").mkdir(parents=True)
        (tmp_path / folder / "deepspeed" / "__init__.py").touch()
        (tmp_path / folder / "deepspeed" / "launcher" / "runner.py").write_text(launcher)
    # The current folder has a folder deepspeed/, as the checkout has, and the checkout may be on PYTHONPATH.
    monkeypatch.chdir(tmp_path / "current")
    searched = [str(ROOT)] if named_by == "site" else [str(ROOT), "../named"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(searched))
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    site = "../named" if named_by == "site" else None
    log = tmp_path / "log"
    found = package("processes").run([], [], 2, site, tmp_path / "caches", tmp_path / "extensions", 60, log)
    assert "deepspeed" in found, log.read_text()
    assert Path(found["deepspeed"]) == tmp_path / "named" / "deepspeed" / "__init__.py"
    assert found["module"] == "benchmarks.measure"
    assert Path(found["file"]).name == "measure.py"
    assert not (tmp_path / "current" / "benchmarks").exists()


# Stands for the launcher of ranks that compile native code until they are ended.
COMPILES = """
import os, pathlib, time

folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"], "compiled")
folder.mkdir()
descriptor = os.open(folder / "lock", os.O_CREAT | os.O_EXCL)
print("compiles", flush=True)
time.sleep(600)
"""


def test_locks_of_a_run_that_was_ended(package, tmp_path):
    """The next run would wait for ever for native code that an ended one was compiling."""
    launchers, extensions, log = tmp_path / "deepspeed" / "launcher", tmp_path / "extensions", tmp_path / "log"
    launchers.mkdir(parents=True)
    (launchers.parent / "__init__.py").touch()
    (launchers / "runner.py").write_text(COMPILES)
    of_others = extensions / "others" / "lock"
    of_others.parent.mkdir(parents=True)
    of_others.touch()
    found = package("processes").run([], [], 1, str(tmp_path), tmp_path / "caches", extensions, 3, log)
    assert "not done after 3 s" in found["why"] and log.read_text() == "compiles\n"
    # DeepSpeed's next build would wait for the first one forever. The second one's owner may still compile.
    assert sorted(extensions.glob("*/lock")) == [of_others]


def test_pictures_show_every_system(package, monkeypatch):
    """A picture would leave out a system for which no colour is left."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: requirements/benchmarks.txt")
    pictures, figures = package("pictures"), []
    monkeypatch.setattr(pictures, "_write", lambda figure, *_: figures.append(figure))
    names = [str(number) for number in range(1 + len(pictures.COLOURS))]
    pictures.draw_losses({name: {"losses": [2.0, 1.0]} for name in names}, "", Path())
    assert [len(figure.axes[0].lines) for figure in figures] == [len(names)]


def test_panels_have_one_axis_of_time(package, monkeypatch):
    """The slower of two steps would look faster, as under the profiler, or its text be too small on a page."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: requirements/benchmarks.txt")
    pictures, figures = package("pictures"), []
    monkeypatch.setattr(pictures, "_write", lambda figure, *_: figures.append(figure))
    categories, results = package("recorder").data.CATEGORIES, {}
    for system, recorded, seconds in (("FSDP2, kept", 0.9, 0.8), ("fork", 1.0, 0.4)):
        line = {"seconds": [0.0, recorded], "held": {name: [2, 1] for name in categories}}
        line["phases"] = {"forward": [(0.0, recorded / 2)], "backward": [(recorded / 2, recorded)]}
        results[system] = result_of() | {"step_s": seconds, "timelines": {"0": line, "1": line}}
    pictures.draw_memory(results, -1, "", Path())
    panels = figures[0].axes
    assert [panel.get_xlim() for panel in panels] == [(0, pytest.approx(0.8))] * 2
    # The first line is the sum of what is held, the second one the beginning of the forward.
    assert [panel.lines[0].get_xdata()[-1] for panel in panels] == pytest.approx([0.8, 0.4])
    assert [panel.lines[2].get_xdata()[0] for panel in panels] == pytest.approx([0.4, 0.2])
    titles = [panel.get_title(loc="left") for panel in panels]
    assert titles == ["FSDP2, kept: 0.800 s a step", "fork: 0.400 s a step"]
    texts = figures[0].findobj(lambda artist: hasattr(artist, "get_fontsize") and artist.get_text())
    # In pixels, where the picture is 400 pixels wide.
    assert min(text.get_fontsize() for text in texts) * 400 / (72 * figures[0].get_figwidth()) >= 8


@PROGRAM
def test_systems_train_alike(package, tmp_path):
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    pytest.importorskip("matplotlib", reason="its pictures need matplotlib: requirements/benchmarks.txt")
    systems = ["fork", "fork as one graph", "base", "FSDP2, kept", "FSDP2, resharded"]
    options = ["--systems", *systems, "--cases", "accumulation", "--limit", "300", "--out", str(tmp_path)]
    finished = compare(*options, "--", "--backend", "eager", "--layers", "2", "--steps", "3", "--warm", "1")
    assert finished.returncode == 0, finished.stdout
    results = json.loads((tmp_path / "results.json").read_text())["accumulation"]
    assert results["base"] == {"why": "--base was not given", "failed": False}
    fork = results["fork"]
    assert len(fork["losses"]) == 3
    (tmp_path / "fork.json").write_text(json.dumps(fork))
    for kind in ("losses", "frontier"):
        picture = tmp_path / f"{kind}.png"
        draw = [sys.executable, "-m", "benchmarks.pictures", kind, picture, tmp_path / "fork.json"]
        assert run_program(draw, ROOT).returncode == 0 and picture.stat().st_size > 5000
    for other in systems[1:2] + systems[3:]:
        assert fork["losses"] == pytest.approx(results[other]["losses"], rel=1e-5)
    bucket, whole = 4 * fork["run"]["bucket"], 4 * fork["parameters"]
    for rank in fork["ranks"]:
        assert rank["counters"]["step"]["bound"] == 0
        assert rank["counters"]["backward"]["bound"] >= whole / 2
        # Between the micro-batches of ZeRO-1 a rank keeps every gradient.
        assert whole <= rank["most_gradients"] < 2.5 * whole + 2 * bucket
        assert rank["phases"]["forward"]["after"] < rank["phases"]["backward"]["peak"]
    assert set(fork["timelines"]) == {"0", "1"}
    for rank, line in fork["timelines"].items():
        end_of_backward = line["phases"]["backward"][-1][1]
        last = max(index for index, second in enumerate(line["seconds"]) if second <= end_of_backward)
        # What the profiler sees is what the reducer counts. What is on its way is not compared: gloo copies what it is
        # given, and the profiler does not see gloo's threads free the copies.
        bound = fork["ranks"][int(rank)]["counters"]["backward"]["bound"]
        assert line["held"]["gradient targets"][last] == bound
    table = (tmp_path / "results.md").read_text()
    for rank in fork["ranks"]:
        assert 0 < rank["step_s"] and 0 < rank["first_step_s"]
        assert 0 < min(rank["phases_s"].values()) and 0.5 < sum(rank["phases_s"].values()) / rank["step_s"] < 1.5
    for row in ("step, median, s", "peak of the backward, MiB", "counted: most pending, MiB", "Not measured: base"):
        assert row in table and row in finished.stdout
    # Where ranks share GPUs, times mean nothing.
    for gpus in (1, 2):
        shared = {**fork, "environment": {**fork["environment"], "gpus": gpus}}
        assert ("step, median" in package("tables").markdown({"fork": shared}, [])) == (gpus == 2)
    for picture in ("memory-accumulation-first-rank", "memory-accumulation-last-rank", "losses-accumulation"):
        assert (tmp_path / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"


@PROGRAM
def test_systems_train_alike_in_float8(tmp_path):
    pytest.importorskip("torchao", reason="float8 needs torchao: requirements/benchmarks.txt")
    options = ["--systems", "fork", "FSDP2, kept, float8 gathered", "--cases", "checkpoint", "--out", str(tmp_path)]
    settings = "--backend eager --layers 1 --steps 3 --warm 1 --float8 tensorwise"
    finished = compare(*options, "--limit", "700", "--", *settings.split())
    assert finished.returncode == 0, finished.stdout
    assert "every layer checkpointed, float8 tensorwise by torchao" in finished.stdout
    fork, gathered = json.loads((tmp_path / "results.json").read_text())["checkpoint"].values()
    # A rounding of the last bit may round a float8 number the other way.
    assert fork["losses"] == pytest.approx(gathered["losses"], rel=1e-3)


def test_float8_is_for_the_layers_of_blocks(package):
    """The head would be multiplied in float8 too, which nobody trains, or parameters would be replaced."""
    pytest.importorskip("torchao", reason="float8 needs torchao: requirements/benchmarks.txt")
    workload = package("workload")
    model = workload.build_model(workload.SHAPES["tiny"], torch.float32, "cpu", checkpoint=False)
    parameters = list(model.parameters())
    workload.multiply_in_float8(model, "rowwise", gathered=False)
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert layers - converted == {"lm_head"}
    assert type(model.lm_head) is torch.nn.Linear


def test_what_is_gathered_in_float8_is_kept_in_fp32(package):
    """Master weights of the compared system would be rounded, which makes its steps cheaper than ours."""
    pytest.importorskip("torchao", reason="float8 needs torchao: requirements/benchmarks.txt")
    workload = package("workload")
    model = workload.build_model(workload.SHAPES["tiny"], torch.bfloat16, "cpu", checkpoint=False)
    workload.multiply_in_float8(model, "tensorwise", gathered=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    # The wrapper says what it was told. AdamW steps the tensor in it.
    assert weight.dtype == weight._tensor.dtype == torch.float32


@PROGRAM
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--base", "/nowhere"], "--base /nowhere has no deepspeed in it"),
        # What a rank refuses ends the command. The other sentences of ranks are tested below, without processes.
        (["--systems", "fork", "--processes", "1", "--", "--seq", "0"], "--seq must be at least 1"),
        (["--", "--activation-budget", "0.5"], "--activation-budget is chosen for each system here"),
        (["--", "--system", "fsdp2-kept"], "--system is chosen for each system here"),
        (["--", "--float8-gather"], "--float8-gather is chosen for each system here"),
        (["--systems", "base"], "base: --base was not given"),
    ],
)
def test_the_benchmark_refuses_in_a_sentence(tmp_path, arguments, sentence):
    finished = compare("--out", str(tmp_path), *arguments)
    assert finished.returncode != 0
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert sentence in finished.stdout + logs
    assert "Traceback" not in finished.stdout + logs


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--system", "deepcompile", "--steps", "1"], "--warm must be at least 1 and less than --steps"),
        (
            ["--system", "fsdp2-kept", "--float8-gather", "--float8", "rowwise"],
            "--float8-gather goes with FSDP2 and --float8 tensorwise",
        ),
        (["--system", "fsdp2-kept", "--activation-budget", "0"], "--activation-budget goes with --system deepcompile"),
        (["--system", "deepcompile", "--activation-budget", "1.5"], "--activation-budget must be from 0 to 1"),
        (["--system", "zero", "--inputs-on-host", "torch"], "--inputs-on-host goes with --checkpoint"),
        (["--system", "fsdp2-kept", "--mlp-tiles", "2"], "--mlp-tiles goes with DeepSpeed"),
        (["--system", "zero", "--loss-tiles", "0"], "--loss-tiles must be at least 1"),
    ],
)
def test_a_run_refuses_in_a_sentence(package, monkeypatch, capsys, arguments, sentence):
    """A run would measure something else than what its arguments ask for."""
    monkeypatch.setattr(sys, "argv", ["measure", *arguments])
    with pytest.raises(SystemExit):
        package("settings").parse_command_line("")
    assert sentence in capsys.readouterr().err


def loss_and_gradients(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("by_deepspeed", [True, False])
def test_pieces_of_long_sequences_train_the_same(package, monkeypatch, by_deepspeed):
    """Rows of benchmarks.lengths would train something else: a loss of other tokens, or a part of a gradient."""
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    workload, tiles = package("workload"), package("tiles")
    # Compiling is not what is tested here.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    ids = torch.randint(1024, (2, 32), generator=torch.Generator().manual_seed(0))
    whole, cut = (workload.build_model(workload.SHAPES["tiny"], torch.float32, "cpu", True) for _ in range(2))
    tiles.save_inputs_on_host(cut)
    tiles.tile_mlps(cut, 4)
    tiles.tile_loss(cut, 4, by_deepspeed)
    for left, right in zip(loss_and_gradients(cut, ids), loss_and_gradients(whole, ids), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_a_run_within_a_budget_for_activations(package, monkeypatch):
    """A budget of 0 would be taken for none, and the run would keep all activations."""
    monkeypatch.setattr(sys, "argv", ["measure", "--activation-budget", "0"])
    monkeypatch.setenv("RANK", "0")
    given = {}
    monkeypatch.setattr("deepspeed.initialize", lambda **arguments: given.update(arguments) or [None])
    settings = dataclasses.replace(package("settings").parse_command_line("").settings, system="zero")
    package("systems").DeepSpeed(settings, torch.nn.Linear(1, 1))
    assert given["config"]["compile"] == {"deepcompile": False, "activation_memory_budget": 0}

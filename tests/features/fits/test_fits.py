# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``features/fits``: what is reckoned beside what engines and autograd hold, and the command."""

import json
import sys

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from deepspeed.compile.features.eight_bit.blockwise import SIGNED, names_of
from deepspeed.compile.features.fits import __main__ as command
from deepspeed.compile.features.fits import fits, gradients, liveness, reckon
from deepspeed.compile.features.fits.activations import Run
from deepspeed.compile.features.fits.modes import Mode
from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.ids import vary
from support.training import Case, batch, build, device, make_engine

WIDTH, TOKENS, LAYERS, VOCABULARY = 64, 48, 3, 80
PLAIN = Mode("plain", "", 1.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Small(nn.Module):
    """As models of transformers are built, of operators of which a compiler keeps what autograd keeps."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        return self.head(self.body(ids)).square().mean()


class ReadsValues(Small):
    def forward(self, ids):
        return super().forward(ids) * (2 if ids.sum() > 3 else 1)


def subject_of(make_model, dtype=torch.bfloat16):
    return reckon.Subject(make_model, dtype, None, lambda sentence: None)


def held_by_engine(case):
    """Returns what a rank holds after a step, and of gradients before it, in bytes."""
    engine = make_engine(build(case), case)
    optimizer = engine.optimizer
    engine.backward(engine(batch(0, 0, engine.global_rank, 4)))
    bound = gradient_counters(engine)["bound"]
    engine.step()
    (master,) = optimizer.single_partition_of_fp32_groups
    state = optimizer.optimizer.state[master]
    remainders = [share for part in optimizer._deepcompile.features for share in part.shares]
    names = [name for each in SIGNED for name in (each, *names_of(each)) if name in state]
    held = {
        "parameters": sum(flat.nbytes for flat in optimizer.bit16_groups_flat),
        "masters": sum(each.nbytes for each in remainders) or master.nbytes,
        "moments": sum(state[name].nbytes for name in names),
        "gradients": bound,
    }
    engine.destroy()
    return held


@vary("remainders", [False, True])
@vary("eight_bit", [False, True])
@vary("model", ["AlignedBlocksWithin", "TiedEmbedding"])
def test_a_rank_holds_what_is_reckoned(ranks, model, eight_bit, remainders):
    """Another geometry than the engine's would be reckoned with: padding, halves of parameters, blocks of 8 bits."""
    options = {"optimizer_states": "8bit" if eight_bit else None, "store_param_remainders": remainders}
    config = {"compile": options}
    case = Case(model=model, dtype="bf16", adam=True, bucket=500, config=config)
    flat = subject_of(type(build(case))).flat
    for rank, held in enumerate(ranks(2).run(held_by_engine, case)):
        whole = 2 * 2 * gradients.layout_of(flat, 2).partition_size[0]
        bound = gradients.send(flat, [*reversed(range(len(flat)))], 2, rank, bucket=500).bound
        states = reckon.states(flat, 2, rank, Mode("", "", 1.0, eight_bit=eight_bit, remainders=remainders))
        assert held == {"parameters": whole, **states, "gradients": bound}


def kept_by_autograd(model, ids):
    """Returns the bytes that autograd keeps for a backward, without parameters and tokens."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids)
    others = {each.untyped_storage().data_ptr() for each in (*model.parameters(), ids)}
    return sum(size for place, size in kept.items() if place not in others), loss


def test_activations_are_those_that_autograd_keeps():
    """Activations would be counted twice, or as of other layers."""
    kept, loss = kept_by_autograd(Small().to(device()), torch.zeros(2, TOKENS, dtype=torch.long, device=device()))
    found = activations_of(Small)
    # The last block's output goes to the head, and the loss is one number.
    assert found.forward[-1].after == kept + loss.nbytes
    assert found.backward[-1].after == 0
    names = {name for name, _ in Small().named_parameters()}
    assert {moment.gradient for moment in found.backward} == names | {None}


def activations_of(make_model, **varied):
    subject = subject_of(make_model, torch.float32)
    assert len(subject.run.blocks) == LAYERS
    with subject.fake:
        return subject.run.run({"ids": torch.zeros(2, TOKENS, dtype=torch.long)}, lambda loss: loss, **varied)


def test_a_checkpointed_block_keeps_its_input():
    """Checkpointing would change nothing, or blocks would not be computed again."""
    plain, checkpointed = activations_of(Small), activations_of(Small, checkpoint=True)
    of_block = 4 * 2 * TOKENS * 4 * WIDTH
    assert plain.forward[-1].after - checkpointed.forward[-1].after == LAYERS * of_block
    in_blocks = [moment.most for moment in checkpointed.backward if moment.in_block]
    assert max(in_blocks) > of_block


def test_results_of_kernels_have_memory():
    """Values that live in registers would be counted, or a kernel's result that it writes over its input."""

    def function(x, weight):
        return [(x @ weight).exp().sin().cos() @ weight]

    x, weight = torch.empty(8, 8, device="meta"), torch.empty(8, 8, device="meta")
    moment = liveness.life_of_forward(make_fx(function, tracing_mode="fake")(x, weight), 1, [])[-1]
    # exp, sin and cos are one kernel, which writes over the first product; then the second product stands beside it.
    assert moment == liveness.Moment(2 * x.nbytes, x.nbytes, None)


def test_the_last_rank_has_its_gradients_first():
    """The rank whose partition is complete first would not be the one with the highest peak."""
    flat = [nn.Parameter(torch.empty(1000, device="meta")) for _ in range(8)]
    arrivals = [*reversed(range(8))]
    halves = [gradients.send(flat, arrivals, 2, rank, bucket=1).arrived[3] for rank in (0, 1)]
    assert halves[1] >= 3 * flat[0].nbytes > halves[0]


@vary("stage", [1, 2])
def test_gradients_of_earlier_micro_batches(stage):
    """With accumulation, ZeRO-1 keeps whole gradients and ZeRO-2 a partition; the table would miss them."""
    flat = [nn.Parameter(torch.empty(1000, dtype=torch.bfloat16, device="meta")) for _ in range(4)]
    sent = gradients.send(flat, [3, 2, 1, 0], 2, 0, stage, accumulation=3)
    assert sent.before == 8000 // stage
    assert sent.bound == 4000


def on_its_device():
    return Small().to("cpu")


def small():
    return Small()


def reads_values():
    return ReadsValues()


@pytest.fixture
def this_module(monkeypatch):
    """Returns the name by which the command imports this file."""
    monkeypatch.setitem(sys.modules, "fitted", sys.modules[__name__])
    return "fitted"


def run(capsys, *arguments):
    """Returns what the command prints to standard output."""
    assert command.main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_command_prints_modes(capsys, this_module):
    """The table would lack modes, their order, or the lines to write."""
    printed = run(capsys, "--model", f"{this_module}:small", "--gpus", 2, "--sequence", TOKENS, "--memory", 8)
    lines = printed.splitlines()
    assert lines[0].startswith(f"{this_module}:small (Small): 0.000 billion parameters")
    rows = [line.split("  ")[0] for line in lines[4 : lines.index("", 4)]]
    for name in ("ZeRO-1 or 2", "checkpointed", "8-bit states", "optimizer on the host", "FSDP2, resharded"):
        assert name in rows
    assert '"activation_memory_budget": 0.5' in printed and "yes, 5.4 left" in printed
    assert lines[-1].startswith("Left out: the CUDA context, NCCL, and fragmentation.")


def test_json_has_bytes(capsys, this_module, tmp_path):
    """A program that reads the figures would get rounded ones, or not those of its own configuration."""
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}))
    arguments = ("--model", f"{this_module}:small", "--gpus", 2, "--sequence", TOKENS)
    answer = json.loads(run(capsys, *arguments, "--config", config, "--json", "-"))
    assert answer["accumulation"] == 2 and answer["trained"] == sum(each.numel() for each in Small().parameters())
    first = answer["rows"][0]
    assert first["mode"] == "your configuration"
    assert first["peak"] == max(first["forward"], first["backward"], first["step"]) == sum(first["parts"].values())


def test_a_model_that_cannot_be_traced(capsys, this_module):
    """The command would end with the traceback of a model whose code reads values, though its states are known."""
    printed = run(capsys, "--model", f"{this_module}:reads_values", "--gpus", 2)
    assert "ReadsValues could not be traced (" in printed and "at least" in printed


@vary(
    "model, sentence",
    [
        ("fitted:nothing", "fitted has no function nothing; name one that returns a model"),
        ("fitted:on_its_device", "leave its weights and its device to the program that trains it"),
        ("no_such_module:model", "no_such_module cannot be imported"),
        ("none/config.json", "there is no file none/config.json; name a config.json, a folder with one, or a model"),
    ],
)
def test_a_model_that_is_not_there(capsys, this_module, model, sentence):
    """The command would end with a traceback, and not with a sentence that says what to name."""
    pytest.importorskip("transformers", reason="a config.json needs transformers: requirements/benchmarks.txt")
    with pytest.raises(SystemExit):
        command.main(["--model", model])
    assert sentence in capsys.readouterr().err


def test_without_transformers(capsys, monkeypatch):
    """Who lacks the package would see an ImportError, and not what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit):
        command.main(["--model", "some/model"])
    assert "`pip install transformers`, or name a function that makes a model" in capsys.readouterr().err


TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}


@pytest.mark.slow
@vary("lora", [None, 4])
def test_a_model_of_transformers(capsys, tmp_path, lora):
    """A config.json would make another model, or one whose attention has a mask, which no training of it has."""
    pytest.importorskip("transformers", reason="a config.json needs transformers: requirements/benchmarks.txt")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    adapters = ("--lora", lora) if lora else ()
    printed = run(capsys, "--model", tmp_path / "config.json", "--gpus", 2, "--sequence", 128, *adapters)
    assert "(Qwen3ForCausalLM)" in printed and "could not be traced" not in printed
    assert ('"shard_parameters": "frozen"' in printed) == bool(lora)
    from deepspeed.compile.features.fits import sources

    make_model, _ = sources.named(str(tmp_path))
    masks = []
    subject = subject_of(make_model)
    subject.model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    assert reckon.row_of(subject, PLAIN, 2, 128).forward is not None
    assert masks == [None]


@pytest.mark.slow
@vary("word", ["0.6b, 4096, 8", "0.6b 14 layers", "8b, 4096, 2 GPUs"])
def test_what_was_measured(package, word):
    """What is reckoned would be far from what GPUs hold: more than 3 % above, or more than 1 % below."""
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    benchmark = package("fits")
    runs = [each for each in benchmark.MEASURED if word in each.line]
    far = [found for found in benchmark.compare(runs) if benchmark.is_far(*found[-2:])]
    assert runs and not far


def test_a_function_gets_an_answer():
    """A caller would need the command to ask."""
    answer = fits(Small, gpus=2, memory=8, sequence=TOKENS, modes=[PLAIN])
    (row,) = answer.rows
    assert answer.spare(row) == pytest.approx(8 - reckon.MARGIN - row.peak / reckon.GIB)
    assert isinstance(Run(Small(), print).why_whole, str)

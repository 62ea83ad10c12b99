# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``tools/fits``: what is estimated beside what engines and autograd hold, and the command."""

import gc
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from deepspeed.compile.features.copy_engines.carrier import device_bytes
from deepspeed.compile.features.shard_parameters import keep
from deepspeed.compile.features.update.blockwise import SIGNED, names_of
from deepspeed.compile.fits import fits
from deepspeed.compile.tools.fits import __main__ as command
from deepspeed.compile.tools.fits import configuration, estimate, fsdp2, gradients, liveness, modes, sources
from deepspeed.compile.tools.fits.activations import Activations
from deepspeed.compile.tools.fits.liveness import Moment
from deepspeed.compile.tools.fits.modes import Mode, Question
from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.ids import vary
from support.models import Stack
from support.on_ranks import on_ranks
from support.training import Case, batch, build, device, make_engine, small_shards

WIDTH, TOKENS, LAYERS, VOCABULARY, MANY = 64, 48, 3, 80, 1024
PLAIN = Mode("plain")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Small(nn.Module):
    """As models of transformers are built, of operators of which a compiler keeps what autograd keeps."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Stack(Block, LAYERS, WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        return self.head(self.body(ids)).square().mean()


class ReadsValues(Small):
    def forward(self, ids):
        return super().forward(ids) * (2 if ids.sum() > 3 else 1)


def subject_of(make_model, dtype=torch.bfloat16, **asked):
    return estimate.Subject(make_model, Question(dtype=dtype, **asked), lambda sentence: None)


@vary("remainders", [False, True])
@vary("eight_bit", [False, True])
@vary("model", ["AlignedBlocksWithin", "TiedEmbedding"])
@on_ranks(2)
def test_a_rank_holds_what_is_estimated(model, eight_bit, remainders):
    """Another geometry than the engine's would be estimated with: padding, halves of parameters, blocks of 8 bits."""
    config = {"compile": {"optimizer_states": "8bit" if eight_bit else None, "store_param_remainders": remainders}}
    case = Case(model=model, dtype="bf16", adam=True, bucket=500, config=config)
    engine = make_engine(build(case), case)
    optimizer = engine.optimizer
    engine.backward(engine(batch(0, 0, engine.global_rank, 4)))
    bound = gradient_counters(engine)["bound"]
    engine.step()
    (master,) = optimizer.single_partition_of_fp32_groups
    state = optimizer.optimizer.state[master]
    shares = [share for part in optimizer._deepcompile.features for share in getattr(part, "shares", ())]
    names = [name for state_name in SIGNED for name in (state_name, *names_of(state_name)) if name in state]
    held = {
        "parameters": sum(flat.nbytes for flat in optimizer.bit16_groups_flat),
        "masters": sum(share.nbytes for share in shares) or master.nbytes,
        "moments": sum(state[name].nbytes for name in names),
        "gradients": bound,
    }
    engine.destroy()
    flat, rank = subject_of(type(build(case))).flat, engine.global_rank
    with small_shards(config):
        whole = 2 * 2 * gradients.layout_of(flat, 2).partition_numel
        bound = gradients.send(flat, [*reversed(range(len(flat)))], 2, bucket=500, rank=rank).bound
        states = estimate.states(flat, 2, Mode("", eight_bit=eight_bit, remainders=remainders))
    assert held == {"parameters": whole, **states, "gradients": bound}


def kept_by_autograd(model, ids):
    """Returns the bytes that autograd keeps for a backward, without parameters and tokens."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids)
    others = {parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), ids)}
    return sum(size for place, size in kept.items() if place not in others), loss


@pytest.fixture
def uncollected():
    """Python collects no garbage, as it may do nothing for long in any process."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_activations_are_those_that_autograd_keeps():
    """Activations would be counted twice, as of other layers, or for as long as Python collects no garbage."""
    kept, loss = kept_by_autograd(Small().to(device()), torch.zeros(2, TOKENS, dtype=torch.long, device=device()))
    found = activations_of(Small)
    # The last block's output goes to the head, and the loss is one number.
    assert found.forward[-1].after == kept + loss.nbytes
    assert found.backward[-1].after == 0
    names = {name for name, _ in Small().named_parameters()}
    assert {moment.gradient for moment in found.backward} == names | {None}


def activations_of(make_model, **varied):
    subject = subject_of(make_model, torch.float32)
    batch = {"ids": torch.zeros(2, TOKENS, dtype=torch.long)}
    question = Question(gpus=2, sequence=TOKENS, micro_batch=2, batch=lambda *sizes: batch)
    found = subject.activations(Mode("", **varied), question)
    assert subject.untraceable == {}
    return found


def test_a_checkpointed_block_keeps_its_input():
    """Checkpointing would change nothing, or blocks would not be computed again."""
    plain, checkpointed = activations_of(Small), activations_of(Small, checkpoint=True)
    of_block = 4 * 2 * TOKENS * 4 * WIDTH
    assert plain.forward[-1].after - checkpointed.forward[-1].after == LAYERS * of_block
    in_blocks = [moment.most for moment in checkpointed.backward if moment.block is not None]
    assert max(in_blocks) > of_block


class WithLoss(Small):
    """A language model whose loss is that of transformers."""

    smoothing = 0.0

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, MANY)

    def forward(self, ids):
        logits = self.head(self.body(ids))
        labels = ids.view(-1)
        return functional.cross_entropy(logits.view(-1, MANY), labels, label_smoothing=self.smoothing), logits


class Smoothed(WithLoss):
    smoothing = 0.1


class ScalesLoss(WithLoss):
    """Uses a parameter behind the logits, so that training leaves the graph whole."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, ids):
        loss, logits = super().forward(ids)
        return loss * self.temperature, logits


def highest(found):
    return max(moment.most for moment in found.backward)


def test_a_loss_is_in_chunks_only_where_training_has_chunks(monkeypatch):
    """A loss that training computes in one piece would be taken for one in chunks, and the peak would be too low."""
    monkeypatch.setattr("deepspeed.compile.features.loss.chunked_loss.CHUNK_LOGITS", 1)
    monkeypatch.setattr("deepspeed.compile.features.loss.chunked_loss.ALIGNED_ROWS", 8)
    whole, chunked = (activations_of(WithLoss, chunked_loss=wanted) for wanted in (False, True))
    logits = 4 * 2 * TOKENS * MANY
    assert highest(whole) - highest(chunked) >= logits // 2
    # Behind the last chunk there are the gradients of the head and of its input, the latter as a sum and as a copy.
    gradients = 4 * WIDTH * (MANY + 2 * 2 * TOKENS)
    assert highest(chunked) >= chunked.forward[-1].after + gradients
    smoothed = {highest(activations_of(Smoothed, chunked_loss=wanted)) for wanted in (False, True)}
    assert len(smoothed) == 1


def test_a_budget_keeps_logits_between_graphs():
    """The peak would lack logits: a loss that has a graph of its own reads them, whatever the budget is."""
    logits = 2 * TOKENS * MANY
    plain, budget = (activations_of(WithLoss, budget=value, chunked_loss=False) for value in (None, 0.0))
    kept = [found.forward[-1].after for found in (plain, budget)]
    assert logits <= kept[1] < kept[0]
    # Beside them is their gradient.
    assert highest(budget) - kept[1] >= logits


def test_zeros_for_logits_that_nobody_uses(monkeypatch):
    """Of a large loss that cannot have a graph of its own, autograd's zeros would be missing."""
    monkeypatch.setattr("deepspeed.compile.features.loss.own_graph.LARGE_NUMEL", 1)
    logits = 4 * 2 * TOKENS * MANY
    assert highest(activations_of(ScalesLoss)) - highest(activations_of(WithLoss)) >= logits // 2


class Attends(Block):
    dropout = 0.0

    def forward(self, x):
        heads = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
        made = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout, is_causal=True)
        return super().forward(made.transpose(1, 2).reshape(x.shape))


class DropsOut(Attends):
    dropout = 0.1


class AttendsInGroups(Block):
    def forward(self, x):
        heads = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
        fewer = heads[:, :2]
        made = functional.scaled_dot_product_attention(heads, fewer, fewer, is_causal=True, enable_gqa=True)
        return super().forward(made.transpose(1, 2).reshape(x.shape))


def small_of(kind, layers=LAYERS):
    def make_model():
        model = Small()
        model.body.layers = nn.ModuleList(kind() for _ in range(layers))
        return model

    return make_model


def test_attention_with_dropout_keeps_no_matrix():
    """Attention would have its matrix [tokens, tokens] as on a CPU, which no GPU keeps."""
    assert activations_of(small_of(DropsOut)).forward == activations_of(small_of(Attends)).forward


def test_the_workspace_of_attentions_backward(monkeypatch):
    """For long sequences, where it is the peak, a backward would need as much more as the queries take in fp32."""
    found = [activations_of(small_of(kind)).backward for kind in (Attends, AttendsInGroups)]
    monkeypatch.setattr(liveness, "_workspace", lambda kernel: 0)
    without = [activations_of(small_of(kind)).backward for kind in (Attends, AttendsInGroups)]
    more = [max(one.most - other.most for one, other in zip(*moments)) for moments in zip(found, without)]
    # Two sequences, and four heads, each with a number for a row. In groups, keys and values have two heads.
    of_queries = 4 * 2 * TOKENS * WIDTH
    assert more == [of_queries + 4 * 2 * TOKENS * 4, 3 * of_queries + 4 * 2 * TOKENS * 4]
    assert [[moment.after for moment in moments] for moments in found] == [
        [moment.after for moment in moments] for moments in without
    ]


class CallsBlocksItself(Stack):
    """As nanoGPT: the model itself calls its blocks."""

    def __init__(self):
        super().__init__(Block, LAYERS, WIDTH, VOCABULARY)
        self.head = nn.Linear(WIDTH, MANY)

    def forward(self, ids):
        logits = self.head(super().forward(ids))
        return logits, functional.cross_entropy(logits.view(-1, MANY), ids.view(-1))


def test_modes_that_need_blocks_make_some():
    """A model that calls its blocks itself would have no checkpointed mode, though the engine makes blocks for it."""
    chosen = [PLAIN, Mode("checkpointed", checkpoint=True), Mode("FSDP2", system="fsdp2")]
    answer = fits(CallsBlocksItself, modes=chosen, gpus=2, sequence=TOKENS)
    rows = {row.mode.name: row for row in answer.rows}
    plain, checkpointed, sharded = (rows[mode.name] for mode in chosen)
    assert all(answer.verdict(row) == "yes" for row in answer.rows)
    assert '"regional_compilation": true' in ", ".join(checkpointed.lines)
    assert "regional" not in str(plain.lines + sharded.lines)
    assert "lines with regional_compilation make blocks" in " ".join(answer.notes)


def rows_that_keep(*kept, memory=80.0):
    """Returns the name of a mode -> its row, for modes that keep so many blocks: "2", or "fit: 8 of 8 blocks"."""
    chosen = [Mode(str(keep), shard_parameters="all", keep=keep) for keep in kept]
    answer = fits(small_of(Block, 8), modes=chosen, gpus=2, sequence=20 * TOKENS, memory=memory)
    return {row.mode.name: row for row in answer.rows}


def test_blocks_that_stay_whole():
    """Blocks that keep_gathered keeps would not be counted, or "fit" would keep more than a GPU has room for."""
    block = 2 * sum(parameter.numel() for parameter in Block().parameters())
    # Each call traces the model anew.
    rows = rows_that_keep(0, 2, 3, 8, "fit")
    peaks = [rows[name].peak for name in ("0", "2", "3", "8")]
    assert peaks == sorted(peaks) and block <= peaks[-1] - peaks[0] <= 8 * block
    assert rows["fit: 8 of 8 blocks"].peak == peaks[-1]
    # A GPU with room for what three blocks need, and for what the allocator does not have.
    taken = peaks[-2] / estimate.GIB + estimate.CONTEXT + estimate.NCCL
    less = rows_that_keep("fit", memory=1e-6 + taken / (0.95 * estimate.SHOWN))["fit: 3 of 8 blocks"]
    assert (less.mode.pace, less.peak) == (modes.SHARDED, peaks[-2])
    assert '"keep_gathered": "fit"' in ", ".join(less.lines) and "fit" in rows_that_keep("fit", memory=2.0)


def test_blocks_that_stay_whole_by_default(monkeypatch):
    """On many ranks the last block stays where the configuration says nothing, and would not be counted."""
    assert (keep.kept_by_default(keep.KEEP_LAST_FROM - 1), keep.kept_by_default(keep.KEEP_LAST_FROM)) == (0, 1)
    monkeypatch.setattr(estimate, "kept_by_default", lambda ranks: 4 * ranks)
    rows = rows_that_keep(0, 8)
    assert rows["0"].peak < rows["8"].peak == rows_that_keep(None)["None"].peak


class Twice(Small):
    def forward(self, ids):
        return (self.body(ids) - self.body(ids + 1)).square().mean()


def test_what_is_not_estimated_is_unknown():
    """A peak without activations would be called one that fits."""
    answer = fits(Twice, modes=[PLAIN], gpus=2, sequence=TOKENS)
    assert answer.verdict(answer.first) == "unknown"
    assert "it calls a module with blocks more than once" in answer.notes[0]
    # The states alone may be too much.
    assert fits(Twice, modes=[PLAIN], gpus=2, sequence=TOKENS, memory=1).verdict(answer.first) == "no"


def test_one_mode_that_cannot_be_traced_leaves_the_others(monkeypatch):
    """After an error in one mode all later rows would lack activations, and a mistake of ours would look like that."""
    subject, question = subject_of(Small), Question(sequence=TOKENS, micro_batch=1)
    assert subject.activations(Mode("", budget="half"), question) is None
    assert len(subject.untraceable) == 1
    assert subject.activations(PLAIN, question) is not None
    monkeypatch.setattr(sources, "batch_for", None)
    with pytest.raises(TypeError):
        subject.activations(Mode("", checkpoint=True), question)


def lowered(function, *inputs):
    """Returns the graph of a function in the operators that Inductor gets."""
    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)


@pytest.mark.parametrize(
    "function",
    [
        # exp, sin and cos are one kernel, which writes over the first product. The second product stands beside it.
        lambda x, weight: [(x @ weight).exp().sin().cos() @ weight],
        # The gradient of shifted logits, for example: its kernel reads them at other places.
        lambda x, weight: [nn.functional.pad((x @ weight).exp()[:-1], (0, 0, 1, 0)).sin()],
        lambda x, weight: [read_at_two_places((x @ weight).exp()).sin()],
    ],
    ids=["over its input", "sliced and padded", "read at two places"],
)
def test_results_of_kernels_have_memory(function):
    """Values that live in registers would be counted, or a result be counted in memory that its kernel still reads."""
    x, weight = torch.empty(8, 8), torch.empty(8, 8)
    moment = liveness.life_of_forward(lowered(function, x, weight), 1, [])[-1]
    assert moment == liveness.Moment(2 * x.nbytes, x.nbytes, None)


def read_at_two_places(x):
    return x + x.roll(1, 0)


@pytest.mark.parametrize(
    "read, rows",
    [
        # Two kernels would read too much to make the value again, so Inductor writes it to memory, beside two rows.
        (lambda made: [made.sum(0), (made * made).mean(-1)], 64 + 2),
        # As what both gradients of an activation are made of.
        (lambda made: [made.sin(), made * made], 2 * 64),
    ],
    ids=["by two kernels", "by its own kernel"],
)
def test_a_value_of_many_reads(read, rows):
    """A value that Inductor writes to memory would be left out, or one that its own kernel reads be counted."""

    def function(a, b, c, d, e):
        return read(a * b + c * d + e)

    inputs = [torch.empty(64, 64) for _ in range(5)]
    life = liveness.life_of_forward(lowered(function, *inputs), 2, [])
    assert life[-1].most == rows * inputs[0][0].nbytes


def test_fsdp2_holds_what_its_units_need():
    """A unit larger than the last one would not be counted, nor the padding of a parameter's first dimension."""
    assert fsdp2.share_of((5, 3), 4) == 6 and fsdp2.share_of((), 4) == 1
    activations = Activations([Moment(10, 10)], [Moment(10, 0, name) for name in "cba"], 0)
    units = [fsdp2.Unit([name], size, 0, size // 2) for name, size in (("a", 4), ("b", 100), ("c", 8))]
    found = fsdp2.peaks_of(activations, units, {"a": 4, "b": 100, "c": 8}, reshard=True, size=2)
    assert found.at_rest == 12 * 56 and found.step == found.at_rest + 4 * 56
    assert found.forward == found.at_rest + 10 + 2 * 100 + 2 * 100


def test_gradients_arrive_in_shards():
    """The peak of a backward would lack shards that arrive beside a gradient on its way, or have gradients whole."""
    flat = [nn.Parameter(torch.empty(1024, dtype=torch.bfloat16, device="meta")) for _ in range(8)]
    whole, shard = 2048, 1024
    sent = gradients.send(flat, [*reversed(range(8))], 2, bucket=1)
    assert sent.arrived == [whole + shard + arrived * shard for arrived in range(8)]
    assert sent.bound == 8 * shard


@vary("stage", [1, 2])
@vary("world", [2, 5, 40])
def test_no_rank_needs_more_than_the_first(world, stage):
    """A rank with a higher peak would be left out, because only the first rank is estimated."""
    sizes = (1000, 7, 300 * 1024, 256 * 40, 1, 257 * 39, 512)
    flat = [nn.Parameter(torch.empty(numel, dtype=torch.bfloat16, device="meta")) for numel in sizes]
    arrivals = [*reversed(range(len(flat)))]
    first, *others = (gradients.send(flat, arrivals, world, stage, 2, 3000, rank=rank) for rank in range(world))
    for sent in others:
        assert sent.bound <= first.bound and sent.before <= first.before
        assert all(held <= of_first for held, of_first in zip(sent.arrived, first.arrived, strict=True))
    assert first.bound + sum(sent.bound for sent in others) == 2 * sum(sizes)
    # The rest of a rank's memory is the same on each.
    layouts = [gradients.layout_of(flat, world, rank) for rank in range(world)]
    assert len({(layout.partition_numel, layout.flat_numel) for layout in layouts}) == 1


@vary("stage", [1, 2])
def test_gradients_of_earlier_micro_batches(stage):
    """With accumulation, ZeRO-1 keeps whole gradients and ZeRO-2 a partition; the table would miss them."""
    flat = [nn.Parameter(torch.empty(1000, dtype=torch.bfloat16, device="meta")) for _ in range(4)]
    sent = gradients.send(flat, [3, 2, 1, 0], 2, stage, accumulation=3)
    # Of 1000 elements the first rank has 512.
    assert sent.before == (8000, 4096)[stage - 1]
    assert sent.bound == 4096


def test_accumulation_has_a_row_for_each_stage():
    """ZeRO-2 would have the figure of ZeRO-1, which keeps whole gradients."""
    asked = {"gpus": 2, "sequence": TOKENS, "accumulation": 3}
    found = {
        row.mode.name: row
        for row in fits(Small, modes=modes.modes_for(Question(**asked), False, False)[:2], **asked).rows
    }
    assert found["ZeRO-1"].peak > found["ZeRO-2"].peak
    assert '"stage": 2' in ", ".join(found["ZeRO-2"].lines)


@pytest.mark.quick
def test_modes_that_have_a_meaning():
    """The table would have a mode that is refused, or the default again, or lack one as a parameter is frozen."""

    def names(has_frozen=False, has_blocks=True, **asked):
        return {mode.name for mode in modes.modes_for(Question(accumulation=1, **asked), has_frozen, has_blocks)}

    everything = names(True, gpus=2, dtype=torch.bfloat16)
    assert everything == {mode.name for mode in modes.MODES}
    of_many = {name for name in everything if "sharded" in name and "resharded" not in name}
    of_one = everything - of_many
    assert names(True, gpus=1, dtype=torch.bfloat16) == of_one
    assert everything - names(False, gpus=2, dtype=torch.bfloat16) == {name for name in everything if "frozen" in name}
    assert not any("remainders" in name for name in names(gpus=2, dtype=torch.float32))
    assert not any("checkpointed" in name or "FSDP2" in name for name in names(has_blocks=False))
    lines = [", ".join(mode.lines(enables=True, is_whole=True)) for mode in modes.MODES]
    assert len(set(lines)) == len(lines) and not any("overlap_param_gather" in line for line in lines)


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


@pytest.mark.follows(
    "name a function without arguments, and leave its weights",
    "has no function {}; name one that returns a model",
    "name a module of this folder or of PYTHONPATH",
    "`pip install transformers`, or name a function that makes a model",
    "and no torch.nn.Module; name a function that returns a model",
)
def test_the_command_prints_modes(capsys, this_module):
    """The table would lack modes, their order, or the lines to write."""
    printed = run(capsys, "--model", f"{this_module}:small", "--gpus", 2, "--sequence", TOKENS, "--memory", 8, "--all")
    lines = printed.splitlines()
    assert lines[0].startswith(f"{this_module}:small (Small): 0.000 billion parameters")
    rows = [line.split("  ")[0] for line in lines]
    for name in ("ZeRO-1 or 2", "checkpointed", "8-bit states", "optimizer on the host", "FSDP2, resharded"):
        assert name in rows
    assert '"compile": {"deepcompile": true, "optimizer_states": "8bit"}, "zero_optimization": {"stage": 1}' in printed
    assert '"bf16": {"enabled": true}' in printed
    assert "torch.utils.checkpoint at each block" in printed and "gradient_checkpointing_enable" not in printed
    assert "Off the 8 GB, which a GPU shows as GiB, go not shown by the GPU 0.12, CUDA context 1.81," in " ".join(
        printed.split()
    )


BASE = {"zero_optimization": {"stage": 2}, "compile": {"deepcompile": True}, "bf16": {"enabled": True}}


@pytest.mark.follows("--checkpoint goes with --config")
def test_a_configuration_of_checkpointed_layers(capsys, this_module, tmp_path):
    """Who gives --config with --checkpoint, as is asked for, would get the memory of layers without checkpoints."""
    arguments = ("--model", f"{this_module}:small", "--gpus", 2, "--sequence", TOKENS)
    config, figures = tmp_path / "ds_config.json", tmp_path / "figures.json"
    config.write_text(json.dumps(BASE))
    forwards = []
    for more in ((), ("--checkpoint",)):
        run(capsys, *arguments, "--config", config, "--json", figures, *more)
        forwards.append(json.loads(figures.read_text())["rows"][0]["forward"])
    assert forwards[1] < forwards[0]


@pytest.mark.follows("has no sections; name a file as DeepSpeed reads it")
def test_json_has_bytes(capsys, this_module, tmp_path):
    """A program that reads the figures would get rounded ones, or not those of its own configuration."""
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({**BASE, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}))
    arguments = ("--model", f"{this_module}:small", "--gpus", 2, "--sequence", TOKENS)
    run(capsys, *arguments, "--config", config, "--json", tmp_path / "figures.json")
    answer = json.loads((tmp_path / "figures.json").read_text())
    elements = sum(parameter.numel() for parameter in Small().parameters())
    assert answer["trained"] == elements and (answer["micro_batch"], answer["accumulation"]) == (2, 2)
    first = answer["rows"][0]
    assert first["mode"] == "your configuration" and first["fits"] == "yes"
    # bf16 parameters, and half of the masters and moments, with padding.
    padded = gradients.layout_of([*Small().parameters()], 2).flat_numel
    assert elements < padded < 1.05 * elements
    apart = estimate.WORKSPACES + device_bytes(2)
    assert first["at_rest"] - apart == pytest.approx(2 * padded + 12 * padded // 2, rel=1e-3)


@pytest.mark.follows("change that, or leave the configuration out")
@pytest.mark.quick
@vary(
    "varied, sentence",
    [
        # All that is not estimated is named, so that nobody mends one reason and is refused for the next one.
        (
            {"zero_optimization": {"stage": 3}, "compile": {"deepcompile": False}},
            "has ZeRO stage 3, and only the stages 1 and 2 are estimated, and does not set compile.deepcompile",
        ),
        ({"compile": None}, "DeepSpeed refuses the configuration"),
        ({"compile": {"deepcompile": True, "activation_memory_budget": "half"}}, "is not a part of the activations"),
        ({"optimizer": {"type": "Lamb", "params": {}}}, "has lamb, and only Adam and AdamW are estimated"),
        ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "has zero_optimization.round_robin"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "DeepSpeed refuses the configuration"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": -1}}, "reduce_bucket_size: Input should be greater"),
        ({"sequence_parallel_size": "two"}, "has sequence_parallel_size 'two', which does not divide 2 GPUs"),
        ({"sequence_parallel_size": 4}, "has sequence_parallel_size 4, which does not divide 2 GPUs"),
        ({"train_micro_batch_size_per_gpu": 0}, "DeepSpeed refuses the configuration: Train batch size: 0 has to be"),
        ({"bf16": {"enabled": False}}, "trains in torch.float32, and torch.bfloat16 is asked for"),
        # What the engine refuses.
        (
            {
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
                "compile": {"deepcompile": True, "store_param_remainders": True, "optimizer_states": "8bit"},
            },
            "has remainders with its optimizer on the host, and has states in 8 bits with its optimizer on the host",
        ),
        (
            {"compile": {"deepcompile": True, "shard_parameters": "all", "overlap_param_gather": True}},
            "has overlap_param_gather with sharded parameters",
        ),
        ({"hybrid_engine": {"enabled": True}}, "has hybrid_engine.enabled, which is not estimated"),
    ],
)
def test_a_configuration_that_is_not_estimated(varied, sentence):
    """The row of a configuration would have the figures of another one, or the command would end with a traceback."""
    question = Question(gpus=2, dtype=torch.bfloat16)
    # What is advised: the configuration without that.
    assert configuration.apply(BASE, question, False)
    with pytest.raises(ValueError) as raised:
        configuration.apply({**BASE, **varied}, question, False)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.quick
def test_what_a_configuration_completes():
    """The micro-batch, the dtype and buckets of the row would not be those with which DeepSpeed trains."""
    zero = {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": False, "offload_optimizer": {"device": "cpu"}}
    config = {"train_batch_size": 256, "zero_optimization": zero, "compile": {"deepcompile": True}}
    mode, question, notes = configuration.apply(config, Question(gpus=2), True)
    assert (mode.stage, mode.offload, mode.checkpoint) == (2, True, True)
    assert (question.micro_batch, question.accumulation, question.dtype) == (128, 1, torch.float32)
    assert not question.overlap and question.bucket == Question.bucket
    assert "zero_optimization.reduce_bucket_size" in notes[0]
    *_, question, _ = configuration.apply({**config, "bf16": {"enabled": "auto"}}, Question(micro_batch=2), False)
    assert (question.micro_batch, question.accumulation, question.dtype) == (2, 128, torch.bfloat16)


@pytest.mark.follows("is not above 0; use the real number", "is not from 1 to {}; use the real number")
@pytest.mark.quick
@vary(
    "name, value, says",
    [
        ("gpus", 0, "from 1 to 16777216"),
        ("memory", -5, "above 0"),
        *((name, value, "from 1 to 16777216") for name, value in (("sequence", 10**20), ("micro_batch", 2**40))),
    ],
)
def test_numbers_that_no_gpu_has(name, value, says):
    """A question without a meaning would get an answer, torch raise OverflowError, or the command run for hours."""
    with pytest.raises(ValueError, match=f"{name}={value} is not {says}; use the real number"):
        Question(**{name: value})
    assert getattr(Question(**{name: 1}), name) == 1


def test_a_model_that_cannot_be_traced(capsys, this_module):
    """The command would end with the traceback of a model whose code reads values, though its states are known."""
    printed = run(capsys, "--model", f"{this_module}:reads_values", "--gpus", 2)
    assert "ReadsValues could not be traced (" in " ".join(printed.split()) and "above 0.2" in printed
    assert "Recommended: no mode, because activations are unknown." in printed and "yes" not in printed


def test_what_is_written_is_estimated():
    """The command would refuse the lines that it has the user write."""
    rows = fits(Small, gpus=2, sequence=TOKENS).rows
    rows = [row for row in rows if row.mode.system == "fork" and not row.mode.checkpoint]
    lines = [json.loads(f"{{{', '.join(row.lines)}}}") for row in rows]
    assert lines
    for line in lines:
        configuration.apply({**line, "bf16": {"enabled": True}}, Question(gpus=2), False)


class OfImages(nn.Module):
    main_input_name, config = "pixel_values", SimpleNamespace(image_size=8, num_channels=1)

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, pixel_values, labels):
        return self.block(pixel_values.flatten(1)).square().mean()


@pytest.mark.follows("whose size its configuration has; name no sequence")
def test_images_have_no_tokens():
    """A sequence that a model of images does not read would be dropped in silence, and be printed."""
    with pytest.raises(sources.Unusable, match="OfImages takes images, .* name no sequence"):
        fits(OfImages, sequence=TOKENS)
    answer = fits(OfImages, modes=[PLAIN], micro_batch=2)
    assert answer.question.sequence is None and answer.first.forward is not None


def test_options_that_gain_nothing_have_no_row():
    """The table would be full of rows that say what plain ones say."""
    names = {row.mode.name for row in fits(Small, sequence=TOKENS).rows}
    assert names.isdisjoint({"loss in chunks", "loss in chunks, checkpointed"})


def test_fsdp2_reduces_each_micro_batch():
    """FSDP2 would be charged with whole gradients that it keeps only where it is told to."""
    ranks = 4
    modes_of_stages = [Mode("whole", system="fsdp2"), Mode("reduced", system="fsdp2", stage=2)]
    rows = fits(Small, modes=modes_of_stages, gpus=ranks, sequence=TOKENS, accumulation=2).rows
    forward = {row.mode.name: row.forward for row in rows}
    elements = sum(parameter.numel() for parameter in Small().parameters())
    alone = fits(Small, modes=modes_of_stages, gpus=ranks, sequence=TOKENS).rows[0].forward
    assert forward["whole"] - alone == 2 * elements
    # A rank's share, in fp32.
    assert forward["reduced"] - alone == pytest.approx(4 * elements / ranks, rel=0.01)


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


class Declines(Small):
    """As a model of transformers that cannot checkpoint, of a configuration with quantized weights."""

    supports_gradient_checkpointing, config = False, SimpleNamespace(quantization_config={"quant_method": "fp8"})

    def gradient_checkpointing_enable(self):
        raise ValueError("Declines does not support activation checkpointing.")


def test_what_a_model_declines():
    """The lines to write would raise, or dense weights be taken for those of the configuration."""
    answer = fits(Declines, modes=[Mode("checkpointed", checkpoint=True)], sequence=TOKENS)
    assert "torch.utils.checkpoint at each block" in answer.first.lines
    assert any("quantization of the configuration is not counted" in note for note in answer.notes)


@pytest.mark.follows(
    "there is no file {}; name a config.json",
    "reads no configuration of {} ({}); name a config.json",
)
@pytest.mark.slow
@vary("lora", [None, 4])
def test_a_model_of_transformers(capsys, tmp_path, lora):
    """A config.json would make another model, or one whose attention has a mask, which no training of it has."""
    pytest.importorskip("transformers", reason="a config.json needs transformers: requirements/benchmarks.txt")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    adapters = ("--lora", lora) if lora else ()
    printed = run(capsys, "--model", tmp_path / "config.json", "--gpus", 2, "--sequence", 128, "--all", *adapters)
    assert "(Qwen3ForCausalLM)" in printed and "could not be traced" not in printed
    assert ('"shard_parameters": "frozen"' in printed) == bool(lora)
    make_model = sources.named(str(tmp_path))
    masks = []
    subject = subject_of(make_model)
    subject.model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    assert estimate.row_of(subject, PLAIN, Question(gpus=2, sequence=128, accumulation=1)).forward is not None
    assert masks == [None]


@pytest.mark.slow
@vary("word", ["0.6b, 4096, 8", "0.6b 14 layers", "8b, 4096, 2 GPUs", "inputs_on_host"])
def test_what_was_measured(package, word):
    """What is estimated would be far from what GPUs hold: more than 3 % above, or more than 1 % below."""
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    benchmark = package("fits")
    runs = [measured for measured in benchmark.MEASURED if word in measured.line]
    far = [found for found in benchmark.compare(runs) if benchmark.is_far(*found[-2:])]
    assert runs and not far


def test_verdicts():
    """A mode would be said to fit that leaves less than the allocator reserves beyond the peak."""
    answer = fits(Small, modes=[PLAIN], gpus=2, sequence=TOKENS)
    row = answer.first
    taken = 80 - sum(answer.left_out.values())
    for part, verdict in ((1.01, "no"), (0.99, "tight"), (0.82, "tight"), (0.81, "yes")):
        assert answer.verdict(row._replace(peak=int(part * taken * estimate.GIB))) == verdict


class Conv1D(nn.Module):
    """As transformers has it: a linear layer whose weight is transposed."""

    def __init__(self, outer, inner):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inner, outer))

    def forward(self, x):
        return x @ self.weight


def with_positions():
    model = Small()
    model.positions, model.config = nn.Embedding(32, WIDTH), SimpleNamespace(max_position_embeddings=32)
    for layer in model.body.layers:
        layer.up, layer.down = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)
    return model


@pytest.mark.follows("{} has {} positions; ask for a sequence of at most so many")
def test_adapters_and_positions_as_a_gpt_has_them():
    """A GPT of transformers would have no adapters, and be asked about more tokens than it has positions."""
    answer = fits(with_positions, modes=[PLAIN], gpus=2, lora=4)
    assert answer.trained == LAYERS * 2 * 4 * 5 * WIDTH and answer.question.sequence == 32
    with pytest.raises(ValueError, match="has 32 positions; ask for a sequence of at most so many"):
        fits(with_positions, modes=[PLAIN], sequence=33)
    assert fits(with_positions, modes=[PLAIN], sequence=32).rows


def frozen():
    return Small().requires_grad_(False)


class Features(nn.Module):
    """A model of other arguments than token ids."""

    main_input_name = "input_features"

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, input_features):
        return self.layers(input_features).square().mean()


@pytest.mark.follows(
    "no parameter of the model is trained; set requires_grad of some",
    "call fits(..., batch=...) with a function that makes it",
)
def test_a_model_that_is_asked_about_otherwise():
    """Who trains no parameter, or features, would be told to do what is refused in turn."""
    with pytest.raises(ValueError, match="no parameter of the model is trained; set requires_grad of some"):
        fits(frozen, modes=[PLAIN])
    assert fits(small, modes=[PLAIN], sequence=TOKENS).first.forward is not None
    with pytest.raises(ValueError, match="Features takes input_features; call fits"):
        sources.batch_for(Features(), 2, 8)
    made = fits(Features, modes=[PLAIN], batch=lambda *_: {"input_features": torch.empty(2, 8, WIDTH)})
    assert made.first.forward is not None

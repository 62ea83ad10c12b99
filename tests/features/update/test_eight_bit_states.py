# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Adam with 8-bit states: its maps, its blocks, and its step beside torchao's."""

import copy
import importlib
from typing import List, NamedTuple
from unittest import mock

import pytest
import torch

from deepspeed.compile.features.checkpoints.order import BaseOrder
from deepspeed.compile.features.update import every_step
from deepspeed.compile.features.update.adam_operators import Elements, Settings
from deepspeed.compile.features.update.blockwise import (
    FORM,
    SIGNED,
    fp32_values,
    is_blockwise,
    names_of,
    to_blocks,
    to_fp32,
    zeros,
)
from deepspeed.compile.features.update.dynamic_map import BLOCK, codes_of, decode, encode, make_map, zero_code
from deepspeed.compile.features.update.every_step import EveryStepAdam
from deepspeed.compile.features.update.saved_blocks import saved, taken, to_fp32_in_base_order
from deepspeed.compile.features.update.states import StatesOfAdam, convert_saved
from deepspeed.compile.zero_1_and_2.layout import Layout
from deepspeed.compile.zero_1_and_2.parameter.runs import in_one_run
from deepspeed.compile.zero_1_and_2.step import partition_gradient
from deepspeed.compile.zero_1_and_2.step import partitions as of_partition
from deepspeed.compile.zero_1_and_2.step.partition_gradient import PartitionGradient
from deepspeed.compile.zero_1_and_2.step.partitions import Ranges
from deepspeed.compile.zero_1_and_2.step.rule import Partition

from support.ids import vary
from support.optimizers import Views, deepspeed_adam, skip_without_kernel
from support.training import default_dtype, device, ranges_of, relative_error

NUMEL = 21 * BLOCK
# Binary fractions, so that scalars that are computed in fp32 have the same bits as those computed in fp64.
EXACT = {"lr": 2**-4, "betas": (0.75, 0.9375), "eps": 2**-20, "weight_decay": 0.25}


# The maps -----------------------------------------------------------------------------------------------------------


def searched(values, table):
    """Returns the codes that a search in the table finds: the next value, of two the one that is not nearer.

    Without a sign, what is not zero, nor subnormal, gets the code of another value than zero.
    """
    lower = (torch.searchsorted(table, values, right=True) - 1).clamp(min=0)
    upper = (lower + 1).clamp(max=255)
    rounds_up = values - table[lower] >= (table[upper] - table[lower]) * 0.5
    codes = torch.where(rounds_up, upper, lower)
    return codes if table[0] < 0 else codes.clamp(min=(values >= torch.finfo(torch.float32).tiny).long())


@pytest.mark.quick
@vary("signed", [True, False])
def test_codes_are_those_of_the_table(signed):
    """Codes are computed without a search, which rounding could put on the wrong side of a midpoint.

    At each midpoint of the table and some roundings around it, at each value, and at random ones of all sizes.
    """
    table, thresholds = (tensor.cpu() for tensor in make_map(signed, device()))
    assert len(table) == 256 and table[zero_code(signed)] == 0 and table[-1] == 1
    middle = ((table[1:].double() + table[:-1].double()) / 2).float()
    torch.manual_seed(0)
    given = [table, middle, thresholds[1:-1], torch.rand(100_000) ** 8]
    for _ in range(3):
        given += [torch.nextafter(given[-1 if _ else 1], torch.tensor(2.0))]
    below = middle
    for _ in range(3):
        below = torch.nextafter(below, torch.tensor(-2.0))
        given.append(below)
    values = torch.cat([*given, *(-value for value in given if signed), torch.tensor([0.0, -0.0, 1.0])])
    values = values.clamp(-1 if signed else 0, 1).to(device())
    codes = codes_of(values, thresholds.to(device()))
    assert codes.dtype == torch.uint8
    assert torch.equal(codes.cpu().long(), searched(values.cpu(), table))


@vary("signed", [True, False])
def test_maps_are_in_fp32_whatever_the_default_is(signed):
    """A map that is made while a model is built in fp64 would make all codes of the process others."""
    with default_dtype(torch.float64):
        assert {tensor.dtype for tensor in make_map.__wrapped__(signed, torch.device("cpu"))} == {torch.float32}


@vary("signed", [True, False])
def test_maps_are_torchaos(signed):
    """A map of our own would load checkpoints and compare with papers as if it were another one."""
    quantization = pytest.importorskip("torchao.optim.quant_utils", reason="needs torchao")
    table = make_map(signed, torch.device("cpu")).values
    assert table.tolist() == torch.tensor(quantization.create_dynamic_map(signed=signed)).tolist()


@pytest.mark.quick
@vary("signed", [True, False])
def test_tiny_values_keep_their_size(signed):
    """Where a block's scale has a floor, second moments of small gradients are rounded up and weights stand still."""
    blocks = torch.rand(2, BLOCK, device=device()) * 1e-30
    table, thresholds = make_map(signed, blocks.device)
    decoded = decode(*encode(blocks, thresholds), table)
    assert (decoded - blocks).abs().max() < 0.02e-30


# A partition --------------------------------------------------------------------------------------------------------


def draw(seed, numel=NUMEL):
    """Draws gradients, bf16 1-D, of several sizes, and a block of zeros."""
    torch.manual_seed(seed)
    gradient = torch.randn(numel) * 10 ** torch.empty(numel).uniform_(-2, 0)
    gradient[5 * BLOCK : 6 * BLOCK] = 0
    return gradient.bfloat16().to(device())


def views_of(gradient, cuts):
    """Returns a gradient as the gradients of parameters that begin at ``cuts``."""
    borders = sorted({0, *cuts, len(gradient)})
    pairs = zip(borders, borders[1:], strict=False)
    return Views({first: gradient[first:last].clone() for first, last in pairs})


class OneRank:
    """One rank's partition [first, last) of a flat tensor, with an optimizer of its master weights."""

    def __init__(self, flat, first, last, make):
        self.master = torch.nn.Parameter(flat[first:last].clone())
        self.optimizer = make([self.master])
        self.first, self.last = first, last
        self.rule = EveryStepAdam(in_8_bits=True)
        # As in an engine, the new parameters lie in the group's flat tensor.
        self.new = torch.zeros(len(flat), dtype=torch.bfloat16, device=flat.device)[first:last]

    @property
    def state(self):
        return self.optimizer.state[self.master]

    def step(self, gradient, factor=None, spans=(), cuts=(3 * BLOCK, 4 * BLOCK, 6 * BLOCK, 8 * BLOCK)):
        """Steps on the whole flat tensor's gradient, ``spans`` of the flat tensor first."""
        new = in_one_run(self.new)
        partition = Partition(self.optimizer, 0, factor, gradient.dtype, new, step_is_unpatched=True)
        step = self.rule.begin(partition)
        views = views_of(gradient[self.first : self.last], [cut - self.first for cut in cuts if cut > self.first])
        views = Views({offset: view for offset, view in views.items() if view.numel()})
        taken = PartitionGradient(views, factor, self.master.data, gradient.dtype)
        ranges = Ranges(step, self.last - self.first, taken, lambda *_: None)
        cut = [(max(first, self.first), min(last, self.last)) for first, last in spans]
        with mock.patch.object(of_partition, "SMALL_NUMEL", 0):
            ranges.step_first([(first - self.first, last - self.first) for first, last in cut if first < last])
            ranges.step_rest()

    def fp32(self, state):
        return fp32_values(self.state, state, 0, self.master.numel())


def adamw(parameters, **more):
    return torch.optim.AdamW(parameters, **{"lr": 0.01, "weight_decay": 0.1, **more})


def partitions(flat, ranks, make=adamw):
    """Returns each rank's partition of a flat tensor that is padded to as many blocks for each."""
    size = -(-len(flat) // (ranks * BLOCK)) * BLOCK
    flat = torch.cat([flat, flat.new_zeros(size * ranks - len(flat))])
    return [OneRank(flat, rank * size, (rank + 1) * size, make) for rank in range(ranks)]


def flat_weights():
    torch.manual_seed(7)
    return torch.randn(NUMEL).to(device())


@vary("ranks_count", [2, 3, 4, 5])
def test_bits_do_not_depend_on_the_number_of_ranks(monkeypatch, ranks_count):
    """Blocks that begin with a range would be rounded otherwise. Parameters that are stepped first change nothing."""
    # Larger gradients are read where they lie, in whole blocks.
    monkeypatch.setattr(partition_gradient, "IN_PLACE_NUMEL", 2 * BLOCK)
    flat, (one,) = flat_weights(), partitions(flat_weights(), 1)
    several = partitions(flat, ranks_count)
    factor = torch.full((1,), 0.5, device=device())
    for seed in range(4):
        gradient = draw(seed)
        one.step(gradient, factor)
        padded = torch.cat([gradient, gradient.new_zeros(several[-1].last - NUMEL)])
        for rank in several:
            with ranges_of(3 * BLOCK):
                rank.step(padded, factor, spans=[(4 * BLOCK, 6 * BLOCK), (8 * BLOCK, NUMEL)])
    for name in SIGNED:
        for kind in names_of(name):
            together = torch.cat([rank.state[kind] for rank in several])[: NUMEL // BLOCK]
            assert torch.equal(together, one.state[kind])
    masters = torch.cat([rank.master.data for rank in several])[:NUMEL]
    assert torch.equal(masters, one.master.data)
    assert torch.equal(torch.cat([rank.new for rank in several])[:NUMEL], one.master.data.bfloat16())
    assert relative_error([masters], [flat]) > 1e-2


KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "Adam decoupled": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW with a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "DeepSpeed's AdamW": lambda p: deepspeed_adam(p, adamw=True, lr=0.01, weight_decay=0.1),
    "DeepSpeed's Adam": lambda p: deepspeed_adam(p, adamw=False, lr=0.01, weight_decay=0.1),
    "DeepSpeed's Adam uncorrected": lambda p: deepspeed_adam(p, adamw=False, lr=0.01, bias_correction=False),
}


@pytest.mark.parametrize("name", [*KINDS])
def test_it_is_the_optimizers_own_step_but_for_rounding(name):
    """A kind of Adam whose decay, correction or sign the step mistakes would train as another one.

    With schedules of everything, of which the optimizer's own step knows nothing.
    """
    flat, make = flat_weights(), KINDS[name]
    expected = torch.nn.Parameter(flat.clone())
    own = make([expected])
    rank = OneRank(flat, 0, NUMEL, make)
    for seed in range(5):
        torch.manual_seed(seed)
        gradient = torch.randn(NUMEL).bfloat16().to(device())
        for optimizer in (own, rank.optimizer):
            (group,) = optimizer.param_groups
            if not torch.is_tensor(group["lr"]):
                group["lr"] = 0.01 / (1 + seed)
            group["betas"] = (0.8 + 0.01 * seed, 0.95 + 0.005 * seed)
        expected.grad = gradient.float()
        own.step()
        rank.step(gradient)
    error = relative_error([rank.master], [expected])
    moved = relative_error([expected], [flat])
    # The first step has no rounded states. A value has a rounding of 1/128 of the largest one at most.
    assert error < 0.01 * moved and moved > 1e-3, (error, moved)
    for state in SIGNED:
        assert relative_error([rank.fp32(state)], [own.state[expected][state]]) < 0.02
    assert int(rank.state["step"]) == int(own.state[expected]["step"]) == 5
    assert type(rank.state["step"]) is type(own.state[expected]["step"])


def test_tiny_gradients_move_weights_as_with_states_in_fp32():
    """Where a block's scale has a floor, a loss that is scaled by 1e-9 leaves the weights where they are."""
    flat = flat_weights()
    expected = torch.nn.Parameter(flat.clone())
    own, rank = torch.optim.AdamW([expected], eps=1e-15), OneRank(flat, 0, NUMEL, lambda p: adamw(p, eps=1e-15))
    own.param_groups[0].update(lr=0.01, weight_decay=0.1)
    for seed in range(5):
        gradient = draw(seed) * 1e-9
        expected.grad = gradient.float()
        own.step()
        rank.step(gradient)
    error, moved = (relative_error([rank.master], [other]) for other in (expected, flat))
    # Of small gradients in a block of large ones, the states are rounded most.
    assert error < 0.1 * moved and moved > 1e-2, (error, moved)


@vary("adamw", [True, False])
def test_beside_torchao(adamw):
    """Torchao's optimizer has the same codes, scales and weights, where its scalars have the same bits.

    A block whose scale is taken before the new moment, or with another rounding, would have others.
    From the third step on, its root of the correction is rounded otherwise, and with it the weights. Without decoupled
    decay, the states depend on the weights.
    """
    torchao = pytest.importorskip("torchao.optim", reason="needs torchao")
    flat = flat_weights()[: 16 * BLOCK]
    expected = torch.nn.Parameter(flat.clone())
    own = (torchao.AdamW8bit if adamw else torchao.Adam8bit)([expected], **EXACT)
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    rank = OneRank(flat, 0, len(flat), lambda parameters: kind(parameters, **EXACT))
    small = torch.zeros(len(flat), dtype=torch.bool, device=device())
    for seed in range(5 if adamw else 3):
        # With decay that is not decoupled, some elements are small all the same.
        gradient = draw(seed, len(flat))
        gradient = gradient.sign() * gradient.abs().clamp(min=0.01, max=1)
        expected.grad = gradient.float()
        # Torchao's step compiles itself, which takes long on a CPU.
        with torch.compiler.set_stance("force_eager"):
            own.step()
        rank.step(gradient)
        theirs = own.state[expected]
        for state in SIGNED:
            codes, scales = names_of(state)
            # Torchao rounds small second moments to zero.
            small |= (theirs[state].codes == 0) & (rank.state[codes].view(-1) == 1) & (not SIGNED[state])
            differ = (rank.state[codes].view(-1) != theirs[state].codes)[~small].float().mean()
            # Torchao's scales have a floor.
            at_least = rank.state[scales].clamp(min=1e-12)
            if device().type == "cpu":
                assert differ == 0 and torch.equal(at_least, theirs[state].scale), (seed, state)
            else:
                # The kernel multiplies by 1 / scale, which may round what lies in the middle of two codes otherwise.
                assert differ < 1e-3 and relative_error([at_least], [theirs[state].scale]) < 1e-3
        masters = rank.master.data[~small], expected.data[~small]
        if seed < 2 and device().type == "cpu":
            assert torch.equal(*masters), seed
        assert small.float().mean() < 0.01 and relative_error([masters[0]], [masters[1]]) < (
            1e-7 if device().type == "cpu" else 1e-4
        )


def test_no_step_is_long_where_gradients_of_a_block_differ_much():
    """A second moment that became zero before the first moment did would make a step of hundreds of learning rates."""
    weights, longest = torch.zeros(BLOCK, device=device()), 0.0
    rank = OneRank(weights, 0, BLOCK, lambda parameters: torch.optim.AdamW(parameters, lr=1.0, weight_decay=0))
    sizes = torch.logspace(0, -6, BLOCK, device=device())
    for seed in range(50):
        torch.manual_seed(seed)
        before = rank.master.data.clone()
        rank.step((torch.randn(BLOCK, device=device()) * sizes).bfloat16())
        longest = max(longest, (rank.master.data - before).abs().max().item())
    # With states in fp32 it is 1.5.
    assert 0.5 < longest < 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, because the kernel is for GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel(monkeypatch, dtype):
    """The kernel for GPUs would step a block with what lies behind it."""
    flat, found = flat_weights(), []
    for by_kernel in (True, False):
        rank = OneRank(flat, BLOCK, NUMEL, adamw)
        if not by_kernel:
            monkeypatch.setattr(every_step, "kernel_for", lambda master: None)
        for seed in range(4):
            rank.optimizer.param_groups[0].update(lr=0.01 / (1 + seed), weight_decay=0.1 * seed, maximize=seed == 2)
            rank.step(draw(seed).to(dtype), torch.full((1,), 0.5, device=device()), spans=[(4 * BLOCK, 6 * BLOCK)])
        found.append([rank.master.data, rank.new, rank.state])
    # What lies in the middle of two codes may be rounded otherwise, because the kernel multiplies by 1 / scale. The
    # next step moves the master weight of such a code otherwise.
    apart = (found[0][0] - found[1][0]).abs()
    assert (apart > 1e-6).float().mean() < 1e-3 and apart.max() < 0.01
    assert relative_error(found[0][1:2], found[1][1:2]) < 1e-3
    for codes, scales in map(names_of, SIGNED):
        assert (found[0][2][codes] != found[1][2][codes]).float().mean() < 1e-3
        assert relative_error([found[0][2][scales]], [found[1][2][scales]]) < 1e-6


@pytest.mark.quick
@pytest.mark.parametrize("module", ["adam_kernel", "adam_operators"])
def test_steps_at_midpoints(module):
    """A step finds the code that a search in the table finds, at each midpoint and one rounding on either side.

    In blocks of scale 1. The kernel multiplies by 1 / scale, which another scale rounds.
    """
    if module == "adam_kernel":
        skip_without_kernel()
    signed, unsigned = (make_map(value, device()).thresholds[1:-1] for value in (True, False))
    middle = torch.cat([signed, unsigned, unsigned.sqrt(), -unsigned])
    around = [middle, *(middle.nextafter(torch.full_like(middle, end)) for end in (-2, 2))]
    found = torch.cat(around).clamp(-1, 1)
    # The largest magnitude of each block is 1, and so is its scale: both states are what the step makes of it.
    rows = found.new_ones(-(-found.numel() // (BLOCK - 1)), BLOCK)
    rows[:, 1:] = torch.nn.functional.pad(found, (0, rows.numel() - len(rows) - found.numel())).view(len(rows), -1)
    codes = [torch.full_like(rows, zero_code(state), dtype=torch.uint8) for state in (True, False)]
    scales = [rows.new_ones(len(rows)) for _ in codes]
    maps = [make_map(state, device()) for state in (True, False)]
    # Both moments are replaced: they become the gradient and its square.
    scalars = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 1], dtype=torch.float32, device=device())
    importlib.import_module(f"deepspeed.compile.features.update.{module}").step_rows(
        Elements(rows, rows.clone(), torch.empty_like(rows), codes, scales), Settings(scalars, maps)
    )
    for state, values in enumerate((rows, rows * rows)):
        assert torch.equal(scales[state], torch.ones_like(scales[state]))
        searched = torch.searchsorted(maps[state].thresholds[1:-1], values, right=True)
        assert torch.equal(codes[state].long(), searched)


@pytest.mark.quick
def test_other_entries_of_a_state_are_no_states_in_8_bits():
    """A count that an optimizer keeps beside the states of parameters would be taken for codes."""
    assert not any(map(is_blockwise, (3, "codes", {}, {"step": 1})))


class OtherForm(NamedTuple):
    """The optimizer whose checkpoint has states of another form or partition."""

    optimizer: torch.optim.Optimizer
    single_partition_of_fp32_groups: List[torch.Tensor]
    base_orders: List[BaseOrder]


@pytest.mark.follows(
    "load them with the release of this fork, the number of ranks and the settings with which they were saved",
    "load them with the number of ranks and the settings with which they were saved",
)
@vary("by_caller", [False, True])
def test_states_that_are_saved_and_loaded(by_caller):
    """A load by torch would change the bits, also of states that the caller has got from the inner optimizer."""
    flat = flat_weights()
    # The parameter begins within a block of the base's flat tensor.
    order = BaseOrder(Layout([(torch.nn.Parameter(flat), NUMEL)], 1, 0), [6], 2, None, torch.device("cpu"))
    rank = OneRank(flat, 0, NUMEL, adamw)
    for seed in range(3):
        rank.step(draw(seed))
    held = copy.deepcopy(rank.state)
    state_dict = rank.optimizer.state_dict()
    if not by_caller:
        state_dict["state"] = {0: saved(state_dict["state"][0], order)}
    assert all(torch.equal(value, rank.state[name]) for name, value in held.items()), "saving changed the states"
    other = OneRank(flat, 0, NUMEL, adamw)
    other.master.data.copy_(rank.master.data)
    other.optimizer.load_state_dict(copy.deepcopy(state_dict))
    loaded = dict(other.state)
    if not by_caller:
        taken(loaded, order, other.master.device)
    to_blocks(loaded, other.master)
    assert {name: value.dtype for name, value in loaded.items()} == {name: value.dtype for name, value in held.items()}
    assert all(torch.equal(loaded[name], held[name]) for name in held)
    other.optimizer.state[other.master] = loaded
    for loader in (rank, other):
        loader.step(draw(9))
    assert all(torch.equal(other.state[name], rank.state[name]) for name in held)

    # In the base's order, as a tool converts it.
    in_base = saved(dict(rank.state), order)
    to_fp32_in_base_order(in_base)
    assert {*in_base} == {"step", *SIGNED} and len(in_base["exp_avg"]) == order.numel
    assert torch.equal(in_base["exp_avg"][6 : 6 + NUMEL].to(device()), rank.fp32("exp_avg"))
    # Torch's load casts codes to fp32.
    plain = {name: value.float() for name, value in rank.state.items()}
    to_fp32(plain, rank.master)
    assert torch.equal(plain["exp_avg"], rank.fp32("exp_avg"))
    to_blocks(plain, rank.master)
    for state in SIGNED:
        again = fp32_values(plain, state, 0, NUMEL)
        assert relative_error([again], [rank.fp32(state)]) < 0.02
        assert plain[names_of(state)[0]].shape == zeros(rank.master)[names_of(state)[0]].shape
    with pytest.raises(ValueError, match="8-bit optimizer states were loaded that belong to another partition"):
        to_blocks(dict(rank.state), other.master[: 5 * BLOCK])
    # As both advise.
    rank.optimizer.state[rank.master] = saved(rank.state, order)
    mine = OtherForm(rank.optimizer, [rank.master], [order])
    StatesOfAdam(in_8_bits=True).refuse_others(mine)
    short = BaseOrder(Layout([(torch.nn.Parameter(flat), 7 * BLOCK)], 1, 0), [0], 2, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="8-bit optimizer states were loaded that belong to another partition"):
        StatesOfAdam(in_8_bits=True).refuse_others(mine._replace(base_orders=[short]))
    rank.state[FORM]["version"] = 1
    checkpoint = {"optimizer_state_dict": {"base_optimizer_state": {"state": {0: rank.state}}}}
    for read in (lambda: StatesOfAdam(in_8_bits=True).refuse_others(mine), lambda: convert_saved(checkpoint)):
        with pytest.raises(ValueError, match="8-bit optimizer states were loaded of the form {'version': 1, 'elem"):
            read()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Master weights as parameters and remainders: the two formats, and Adam's step in both."""

import copy
import importlib
import itertools

import pytest
import torch

from deepspeed.compile.features.update import adam_operators
from deepspeed.compile.features.update.adam_operators import Elements, Scalars, Settings
from deepspeed.compile.features.update.every_step import EveryStepAdam
from deepspeed.compile.features.update.remainders import join, split
from deepspeed.compile.zero_1_and_2.parameter.runs import in_one_run
from deepspeed.compile.zero_1_and_2.step.partition_gradient import PartitionGradient
from deepspeed.compile.zero_1_and_2.step.partitions import Ranges
from deepspeed.compile.zero_1_and_2.step.rule import Partition

from support.ids import vary
from support.optimizers import Views, skip_without_kernel
from support.training import device, ranges_of

NUMEL = 20 * 256


def bits(values):
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16).cpu()


def all_kinds():
    """Returns master weights of all upper halves with lower halves around ties and borders: all signs, zeros,
    subnormals, infinities, NaN, and carries into the exponent."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    borders = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]
    lower = torch.tensor([*borders, *torch.randint(0, 2**16, (7,)).tolist()], dtype=torch.int32)
    return ((upper[:, None] << 16) | lower).flatten().view(torch.float32).to(device())


@pytest.mark.quick
def test_every_kind_of_master_weight_comes_back():
    """A remainder that overflows at a tie, or at an infinity, would change a master weight by a whole unit of bf16."""
    masters = all_kinds()
    parameters, remainders = split(masters)
    numbers = ~masters.isnan()
    assert torch.equal(bits(join(parameters, remainders))[numbers.cpu()], bits(masters)[numbers.cpu()])
    assert join(parameters, remainders)[~numbers].isnan().all() and parameters[~numbers].isnan().all()
    rounded = masters.bfloat16()
    differ = (bits(parameters) != bits(rounded)) & numbers.cpu()
    ties = (bits(masters) & 0xFFFF) == 0x8000
    assert differ.any() and ties[differ].all()
    apart = (bits(parameters).int() - bits(rounded).int()).abs()
    assert apart[differ].max() == 1, "a tie is rounded to a number that is not next to it"


@pytest.mark.quick
def test_a_parameter_that_was_changed():
    """Who prunes weights in place would train on NaN, because zero less a remainder has the bits of a NaN."""
    _, remainders = split(torch.randn(1000, device=device()))
    assert (remainders < 0).any() and (remainders > 0).any()
    for value in (0.0, -0.0, 1.5, -3e38):
        changed = torch.full((1000,), value, dtype=torch.bfloat16, device=device())
        masters = join(changed, remainders)
        assert torch.equal(split(masters)[0], changed)
        assert ((masters - changed.float()).abs() <= changed.float().abs() * 2**-8 + 1e-38).all()
    for value in (torch.inf, torch.nan):
        changed = torch.full((1000,), value, dtype=torch.bfloat16, device=device())
        masters = join(changed, remainders)
        assert masters.isnan().all() if value != value else (masters > 3e38).all()


class Beside:
    """One partition stepped with master weights in fp32, and one with their remainders, on the same gradients.

    Args:
        make: makes the optimizer of a list of parameters.
        rule: makes the rule for the states.
    """

    def __init__(self, make, in_8_bits=False):
        torch.manual_seed(0)
        self.masters = torch.randn(NUMEL, device=device()) * 10 ** torch.empty(NUMEL, device=device()).uniform_(-6, 0)
        self.sides = []
        for has_remainders in (False, True):
            master = torch.nn.Parameter(self.masters.clone())
            new, remainders = split(master.data)
            optimizer = make([master])
            rule = EveryStepAdam(in_8_bits, [remainders] if has_remainders else None)
            if has_remainders:
                master.data = master.data.new_full((1,), torch.nan).expand(NUMEL)
            self.sides.append((optimizer, rule, new, remainders))

    def step(self, gradient, spans=()):
        for optimizer, rule, new, _ in self.sides:
            there = in_one_run(new)
            partition = Partition(optimizer, 0, None, torch.bfloat16, there, step_is_unpatched=True)
            borders = [0, *(border for span in spans for border in span), NUMEL]
            views = {
                first: gradient[first:last].clone() for first, last in itertools.pairwise(borders) if first < last
            }
            given = PartitionGradient(Views(views), None, torch.empty(0, device=device()), torch.bfloat16)
            ranges = Ranges(rule.begin(partition), NUMEL, given, lambda first, last: None)
            ranges.step_first([*spans])
            ranges.step_rest()

    def compare(self):
        """Asserts that master weights have the same bits, and parameters but at ties."""
        (optimizer, _, rounded, _), (_, _, new, remainders) = self.sides
        master = optimizer.param_groups[0]["params"][0].data
        assert torch.equal(bits(join(new, remainders)), bits(master))
        differ = bits(new) != bits(rounded)
        assert ((bits(master) & 0xFFFF) == 0x8000)[differ].all()
        return master


ADAMS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=2e-3, weight_decay=0.1, amsgrad=True),
    "maximize": lambda p: torch.optim.AdamW(p, lr=2e-3, maximize=True),
}


@pytest.mark.options("compile.store_param_remainders")
@vary(
    "states, make",
    [*(("fp32", name) for name in ADAMS), ("8bit", "AdamW")],
)
@vary("steps", [20], slow=[10_000])
def test_master_weights_have_the_bits_of_those_in_fp32(states, make, steps, monkeypatch):
    """Master weights that lose a bit somewhere would train otherwise than with the option off."""
    beside = Beside(ADAMS[make], in_8_bits=states == "8bit")
    with ranges_of(1504):
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            gradient = torch.randn(NUMEL, generator=generator).bfloat16().to(device())
            # Of blocks that spans cut, one part is stepped after the other.
            beside.step(gradient, [(256, 768), (1024, 1792)] if step % 2 else ())
    assert not torch.equal(beside.compare(), beside.masters)


@pytest.mark.quick
def test_states_come_back_from_other_states():
    """Loaded states of another form would be stepped as if they were fp32 states."""
    beside = Beside(ADAMS["AdamW"])
    beside.step(torch.ones(NUMEL, dtype=torch.bfloat16, device=device()))
    optimizer, rule, new, _ = beside.sides[1]
    (state,) = optimizer.state.values()
    state["exp_avg"] = state["exp_avg"].half()
    assert rule.begin(Partition(optimizer, 0, None, torch.bfloat16, in_one_run(new), step_is_unpatched=True)) is None


@pytest.mark.parametrize("in_8_bits", [False, True], ids=["fp32", "8bit"])
def test_the_kernel_does_what_the_operators_do(in_8_bits):
    """The kernel has the formats' arithmetic once more."""
    skip_without_kernel()
    from deepspeed.compile.features.update.blockwise import SIGNED, map_of

    step_rows = importlib.import_module("deepspeed.compile.features.update.adam_kernel").step_rows
    rows = (37, 256)
    torch.manual_seed(0)
    kinds = all_kinds()
    kinds = kinds[kinds.abs() < 1e30]
    masters = kinds[torch.randperm(len(kinds), device=kinds.device)[: rows[0] * rows[1]]].view(rows)
    scalars = torch.tensor(Scalars(0.5, 0.0, 0.01, 0.1, 0.01, 1e-3, 0.5, 0.3, 1e-8), device=device())
    settings = Settings(scalars, tuple(map_of(state, masters) for state in SIGNED) if in_8_bits else ())
    new, remainders = split(masters)
    states = (torch.zeros(rows, device=device()),) * 2
    scales = ()
    if in_8_bits:
        states = tuple(torch.full(rows, code, dtype=torch.uint8, device=device()) for code in (127, 0))
        scales = (torch.zeros(rows[0], device=device()),) * 2
    gradient = torch.randn(rows, device=device()).bfloat16()
    first = Elements(gradient, remainders, new, tuple(map(torch.clone, states)), tuple(map(torch.clone, scales)))
    second = Elements(*copy.deepcopy(tuple(first)))
    step_rows(first, settings)
    adam_operators.step_rows(second, settings)
    ours, theirs = (join(elements.new, elements.master) for elements in (first, second))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)
    assert torch.equal(split(ours)[0], first.new), "a parameter is not the one of its master weight"


def test_the_kernel_keeps_every_kind():
    """With a rate of zero the kernel joins and splits, whose arithmetic it has once more."""
    skip_without_kernel()
    step_rows = importlib.import_module("deepspeed.compile.features.update.adam_kernel").step_rows
    kinds = all_kinds().view(-1, 256)
    scalars = torch.tensor(Scalars(0.0, 0.0, 0.0, 0.1, 0.01, 0.0, 0.5, 0.3, 1e-8), device=device())
    new, remainders = split(kinds)
    # Changed by the user: zeros and infinities whose remainders have the wrong sign.
    new[-1], remainders[-1] = 0.0, -5
    new[-2], remainders[-2] = torch.inf, 5
    expected, zeros = split(join(new, remainders)), join(new, remainders) == 0
    states = tuple(torch.zeros(kinds.shape, device=device()) for _ in range(2))
    step_rows(Elements(torch.zeros_like(new), remainders, new, states), Settings(scalars))
    # A product with zero makes NaN of what is infinite, and a difference of zeros may have either sign.
    numbers = expected[0].isfinite() & ~zeros
    assert new[zeros].eq(0).all() and remainders[zeros].eq(0).all()
    assert torch.equal(bits(new)[numbers.cpu()], bits(expected[0])[numbers.cpu()])
    assert torch.equal(remainders[numbers], expected[1][numbers])
    assert new[expected[0].isnan()].isnan().all()

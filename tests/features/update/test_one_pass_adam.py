# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Adam in one pass is Adam in fp64, and torch's own, but for rounding. It compiles once for all settings."""

import copy
import random
import warnings
from unittest import mock

import pytest
import torch
from torch._inductor import config, cpu_vec_isa
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch._inductor.utils import fresh_cache

from deepspeed.accelerator import get_accelerator
from deepspeed.compile.features.update import adam
from deepspeed.compile.features.update.adam import OnePassAdam
from deepspeed.compile.features.update.adam_operators import (
    Elements,
    Scalars,
    Settings,
    compile_step,
    step_rows,
)
from deepspeed.compile.features.update.dynamic_map import BLOCK, decode, encode, make_map
from deepspeed.compile.features.update.own_ranges import OwnStep
from deepspeed.compile.zero_1_and_2.step.partition_gradient import ALIGN_NUMEL, PartitionGradient
from deepspeed.compile.zero_1_and_2.step.partitions import Ranges, note_step

from support.beside import warnings_logged
from support.ids import vary
from support.optimizers import ADAMS, AdamInFp64, Views, partition_of, skip_without_kernel
from support.training import as_traced, device, ranges_of, updates_compiled_from

NUMEL = 63 * ALIGN_NUMEL
LARGE = 64
# Roundings of fp32 in some steps. Each element's may be of the largest elements', because of differences.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


@pytest.fixture(scope="module", autouse=True)
def with_vectors():
    """Compiles updates as in training, where those on the host have vectors; conftest.py turns these off elsewhere."""
    valid_vec_isa_list.cache_clear()
    with config.patch({"cpp.vec_isa_ok": None}):
        yield
    valid_vec_isa_list.cache_clear()


def draw(seed, numel=NUMEL):
    """Draws bf16 gradients of all sizes, with padding between them; returns offset -> gradient, and all as one.

    The first 40 elements are always zero, as an embedding's are whose tokens do not come.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    flat, gradients, offset = torch.zeros(numel), {}, random.choice([0, ALIGN_NUMEL])
    while offset < numel - 20:
        size = min(random.choice([1, 7, 16, 40, 64, 100, 256]), numel - offset)
        gradients[offset] = torch.randn(size).bfloat16().to(device())
        gradients[offset][: max(40 - offset, 0)] = 0
        flat[offset : offset + size] = gradients[offset]
        # As shards, gradients begin at whole vectors.
        offset += -(-size // ALIGN_NUMEL) * ALIGN_NUMEL + random.choice([0, 0, 0, 1, 2]) * ALIGN_NUMEL
    return Views(gradients), flat.to(device())


def begin(rule, optimizer, index=0, factor=None, new=None):
    return rule.begin(partition_of(optimizer, index, factor, new))


def run(update, gradient):
    """Steps all elements with a gradient that lies in one tensor."""
    taken = PartitionGradient(Views({0: gradient}), None, gradient, gradient.dtype)
    Ranges(update, gradient.numel(), taken, lambda *_: None).step_rest()


@pytest.mark.quick
@vary("seed", [*range(8)])
def test_ranges(seed):
    """A range that ends within a vector, or between gradients that are copied, would make the next one unaligned."""
    with updates_compiled_from(ALIGN_NUMEL, LARGE):
        numel = NUMEL // ALIGN_NUMEL * ALIGN_NUMEL
        views, flat = draw(seed, numel)
        # Keep the gradients, so that nothing else gets an address of theirs.
        held = [*views.values()]
        lie = {view.data_ptr(): offset for offset, view in views.items() if view.numel() >= LARGE}
        gradient, first, read = PartitionGradient(views, None, flat, torch.bfloat16), 0, []
        while first < numel:
            taken = gradient.unscaled(first, min(first + 300, numel))
            last = first + taken.numel()
            assert taken.numel() > 0 and taken.numel() % ALIGN_NUMEL == 0
            assert torch.equal(taken.float(), flat[first:last]) and taken.data_ptr() % 16 == 0
            read += [offset for pointer, offset in lie.items() if pointer == taken.data_ptr()]
            first = last
        assert read == [*lie.values()]
        assert held and not gradient._rest, "gradients are held longer than they are needed"


# The arithmetic -----------------------------------------------------------------------------------------------------


def implementation(name, like):
    """Returns what steps rows: as operators, compiled by Inductor, or as the kernel for GPUs."""
    if name == "kernel":
        skip_without_kernel()
        return adam.kernel().step_rows
    return compile_step(like) if name == "compiled" else step_rows


@pytest.mark.parametrize("states", ["fp32", "amsgrad", "8bit"])
@pytest.mark.parametrize("name", ["operators", "compiled", "kernel"])
@vary("dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_that_of_fp64(name, states, dtype):
    """A format that the pass mistakes, or a scalar in the place of another one, would train as another optimizer.

    With 5 rows, which fill no program of the kernel.
    """
    if (name, states) == ("compiled", "8bit"):
        pytest.skip("8-bit states are stepped operator by operator where there is no kernel")
    torch.manual_seed(0)
    columns, betas = BLOCK if states == "8bit" else ALIGN_NUMEL, (0.9, 0.95)
    gradient, master, mean = (torch.randn(5, columns, device=device()) for _ in range(3))
    values = [mean, *(torch.rand(5, columns, device=device()) + 0.1 for _ in range(2 if states == "amsgrad" else 1))]
    # Triton's interpreter rounds to bf16 otherwise than a GPU.
    gradient, new, maps, scales = gradient.to(dtype), torch.zeros_like(master, dtype=torch.float16), (), ()
    tensors = tuple(value.clone() for value in values)
    if states == "8bit":
        maps = tuple(make_map(signed, device()) for signed in (True, False))
        tensors, scales = zip(*(encode(values[i], maps[i].thresholds) for i in range(2)), strict=True)
        values = [decode(tensors[i], scales[i], maps[i].values) for i in range(2)]
    optimizer = torch.optim.Adam([torch.nn.Parameter(master)], lr=0.01, betas=betas, eps=1e-3, weight_decay=0.1)
    elements = Elements(gradient, master.clone(), new, tensors, scales)
    step = implementation(name, elements)
    expected = AdamInFp64(master, values)
    # Five times each: with decay of the gradient, decoupled, and up the gradient.
    for count in range(1, 16):
        decoupled, sign = count > 5, -1.0 if count > 10 else 1.0
        optimizer.param_groups[0].update(decoupled_weight_decay=decoupled, maximize=sign < 0, lr=0.01 * count)
        if states == "8bit":
            expected.states = [decode(*tensor, table.values).double() for *tensor, table in zip(tensors, scales, maps)]
        expected.step(0.5 * gradient, optimizer, count)
        scalars = Scalars(
            factor=0.5 * sign,
            decay_of_gradient=0.0 if decoupled else 0.1,
            decay=0.001 * count if decoupled else 0.0,
            weight=1 - betas[0],
            weight_sq=1 - betas[1],
            rate=0.01 * count,
            correction=1 - betas[0] ** count,
            root_of_correction_sq=(1 - betas[1] ** count) ** 0.5,
            epsilon=1e-3,
        )
        step(elements, Settings(torch.tensor(scalars, device=device()), maps))
        assert torch.equal(new, elements.master.half())
        assert (elements.master - expected.master).abs().max() < 1e-6 * count, count
        for index, value in enumerate(expected.states):
            if states == "8bit":
                codes, _ = encode(value.float(), maps[index].thresholds)
                # What lies in the middle of two codes may be rounded otherwise.
                assert (codes != tensors[index]).float().mean() < 2e-3
                largest = value.abs().amax(-1)
                assert ((scales[index] - largest) / largest).abs().max() < 1e-6
            else:
                assert (tensors[index] - value).abs().max() < 1e-6 * (1 + value.abs().max())


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has vectors of one width"
)
def test_processors_that_share_a_cache():
    """Code for vectors of another width would be taken from the cache, and skip a half of the elements in silence."""
    rows = torch.ones(4, ALIGN_NUMEL)
    elements = Elements(rows, rows.clone(), rows.bfloat16(), (torch.zeros_like(rows), torch.zeros_like(rows)))
    scalars = Scalars(1.0, 0.0, 0.0, 0.1, 0.1, 0.5, 1.0, 1.0, 1e-8)
    with fresh_cache():
        for isa in (cpu_vec_isa.VecAVX512(), cpu_vec_isa.VecAVX2()):
            with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda isa=isa: [isa]):
                step = compile_step(elements)
            step(elements, Settings(torch.tensor(scalars)))
            assert torch.equal(elements.new, elements.master.bfloat16()), isa
    assert elements.master.max() < 1


def step_beside(given, optimizer, expected, whole, rule, factor):
    """Steps one optimizer in one pass over each range, and another one at once. Returns whether that was done."""
    views, flat = given
    spans = [
        (offset, min(offset + -(-view.numel() // ALIGN_NUMEL) * ALIGN_NUMEL, NUMEL)) for offset, view in views.items()
    ]
    whole.grad = flat * factor
    expected.step()
    (parameter,) = optimizer.param_groups[0]["params"]
    new = torch.full((NUMEL,), 7.0, dtype=torch.bfloat16, device=device())
    gradient = PartitionGradient(views, factor, parameter.data, torch.bfloat16)
    in_one_pass = begin(rule, optimizer, factor=factor, new=new)
    finished = []
    stepped = Ranges(
        in_one_pass or OwnStep(partition_of(optimizer, new=new)), NUMEL, gradient, lambda *span: finished.append(span)
    )
    # Some gradients are stepped before the others, among them the last.
    spans = [spans[0], spans[2], spans[-1]]
    stepped.step_first(spans)
    assert sum(last - first for first, last in finished) == sum(last - first for first, last in spans)
    stepped.step_rest()
    assert sum(last - first for first, last in finished) == NUMEL
    torch.testing.assert_close(new, parameter.data.bfloat16(), rtol=0, atol=0)
    return in_one_pass is not None


def schedule(optimizer, name, step):
    """Gives a step other settings than the step before. A warm-up begins at zero, and a decay ends there."""
    (group,) = optimizer.param_groups
    rates = [0.1, 0.0, 0.08, 1e-42, 0.06, -0.05, 0.0, 0.04]
    group["lr"] = torch.tensor([rates[step]]) if name == "AdamW with a tensor" else rates[step]
    group["betas"] = (0.85 + 0.01 * step, 0.95 + 0.005 * step)
    group["weight_decay"] *= 0.9
    group["eps"] = 1e-7 / (1 + step)
    if name == "AdamW capturable":
        # There torch itself makes NaN of a rate of zero.
        group["lr"] = max(abs(rates[step]), 0.01)


# A C++ compiler takes long, so on a CPU most run as they are traced.
@vary(
    "name, traced",
    [*((name, True) for name in ADAMS), ("AdamW", False), pytest.param("Adam", False, marks=pytest.mark.slow)],
)
def test_steps_are_those_of_fp64_and_of_torch(name, traced):
    """An Adam of one of its kinds would train as another kind, or with settings of an earlier step.

    Torch's own step is held to fp64 as well: what is asked for is not more than it has.
    """
    make = ADAMS[name]
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer, rule = make([whole]), make([cut]), OnePassAdam()
    zeros = [torch.zeros(NUMEL, device=device())] * (3 if optimizer.param_groups[0].get("amsgrad") else 2)
    in_fp64 = AdamInFp64(whole, zeros)
    with updates_compiled_from(LARGE, LARGE), ranges_of(300), as_traced(traced and device().type == "cpu"):
        for step in range(8):
            factor = torch.full((1,), 1 / (1 + step), device=device())
            for stepped in (expected, optimizer):
                schedule(stepped, name, step)
            given = draw(step)
            in_fp64.step(given[1] * factor, optimizer, 1 + step)
            assert step_beside(given, optimizer, expected, whole, rule, factor) == (step > 0)
    assert len(rule._passes) == 1, "other settings need no other pass"
    # Torch's fused kernel rounds 1 - beta to fp32, which makes 1.3e-5 of the second moments.
    close = {"rtol": 3e-5, "atol": 1e-5} if "fused" in name or name.startswith("DeepSpeed") else CLOSE
    torch.testing.assert_close(cut, whole, **close)
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert str(ours["param_groups"]) == str(theirs["param_groups"])
    torch.testing.assert_close(ours["state"], theirs["state"], **close)
    for parameter in (cut, whole):
        torch.testing.assert_close(parameter.data.double(), in_fp64.master, **close)
    states = [optimizer.state[cut][state] for state in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: len(zeros)]]
    for state, value in zip(states, in_fp64.states, strict=True):
        torch.testing.assert_close(state.double(), value, **close)


# The rule -----------------------------------------------------------------------------------------------------------


def described(value):
    """Describes an object of an optimizer, what it contains, and which objects all these are."""
    if isinstance(value, dict):
        inside = [(described(key), described(entry)) for key, entry in value.items()]
    elif isinstance(value, (list, tuple)):
        inside = [described(entry) for entry in value]
    else:
        inside = value.tolist() if torch.is_tensor(value) else repr(value)
    return type(value), id(value), inside


@pytest.mark.parametrize("counts", ["tensors", "numbers"])
@vary("name", [*ADAMS])
def test_beginning_changes_nothing_of_an_optimizer(name, counts):
    """An overflow may end a step that has begun, and what it has changed would count as a step."""
    parameter = torch.nn.Parameter(torch.randn(NUMEL // ALIGN_NUMEL * ALIGN_NUMEL, device=device()))
    optimizer = ADAMS[name]([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    if counts == "numbers":
        # As in old checkpoints.
        state["step"] = float(state["step"])
    before, kind = described(vars(optimizer)), type(state["step"])
    with updates_compiled_from(LARGE), as_traced(True):
        step = begin(OnePassAdam(), optimizer)
    assert described(vars(optimizer)) == before
    run(step, parameter.grad.bfloat16())
    assert type(state["step"]) is kind and state["step"] == 2


def test_what_is_not_stepped_in_one_pass():
    """A subclass of Adam may do something else, and a state of another format would be read as fp32."""
    parameter = torch.nn.Parameter(torch.ones(NUMEL, device=device()))

    class MyAdam(torch.optim.AdamW):
        pass

    def in_one_pass(optimizer, steps=1):
        for _ in range(steps):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return begin(OnePassAdam(), optimizer) is not None

    with updates_compiled_from(LARGE), as_traced(True):
        assert in_one_pass(torch.optim.AdamW([parameter]))
        # The optimizer makes its states in the first step.
        assert not in_one_pass(torch.optim.AdamW([parameter]), steps=0)
        assert not in_one_pass(MyAdam([parameter])) and not in_one_pass(torch.optim.NAdam([parameter]))
        assert not in_one_pass(torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
        betas = torch.tensor(0.9), torch.tensor(0.99)
        assert in_one_pass(torch.optim.AdamW([parameter], lr=torch.tensor(0.1), betas=betas, foreach=False))
        # It would lose the square of a gradient that is much smaller than the last one.
        assert not in_one_pass(torch.optim.AdamW([parameter], betas=(0.9, 0.0)))
        # With a setting of which the pass knows nothing, and a state that is lacking, or of another format.
        optimizer = torch.optim.AdamW([parameter])
        assert in_one_pass(optimizer)
        for name in ("differentiable", "amsgrad"):
            optimizer.param_groups[0][name] = True
            assert begin(OnePassAdam(), optimizer) is None
            optimizer.param_groups[0][name] = False
        assert begin(OnePassAdam(), optimizer) is not None
        optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].bfloat16()
        assert begin(OnePassAdam(), optimizer) is None
    assert not in_one_pass(torch.optim.AdamW([parameter])), "compiling takes longer than it saves"


def test_a_rate_that_is_no_number():
    """A schedule that divides zero by zero must not go unnoticed."""
    parameter = torch.nn.Parameter(torch.randn(16 * ALIGN_NUMEL, device=device()))
    parameter.grad, new = torch.ones_like(parameter), torch.zeros_like(parameter, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    optimizer.param_groups[0]["lr"] = float("nan")
    with updates_compiled_from(LARGE), as_traced(True):
        update = begin(OnePassAdam(), optimizer, new=new)
        run(update, parameter.grad.bfloat16())
    assert new.isnan().all() and parameter.isnan().all()


def test_new_values_in_memory_that_is_not_aligned():
    """Shards begin at any vector. Code that took them for aligned to more would copy them, or read others."""
    numel = 2**22 if device().type != "cpu" else NUMEL // ALIGN_NUMEL * ALIGN_NUMEL
    # Another rank's partition may be aligned, and torch's caches have what that rank has compiled.
    for offset in (0, 1 if device().type == "cpu" else ALIGN_NUMEL):
        whole = torch.nn.Parameter(torch.randn(numel, device=device()))
        cut = copy.deepcopy(whole)
        expected, optimizer = (torch.optim.AdamW([parameter], lr=0.1, foreach=False) for parameter in (whole, cut))
        memory, rule = torch.zeros(numel + ALIGN_NUMEL, dtype=torch.bfloat16, device=device()), OnePassAdam()
        new, other, most = memory[offset : offset + numel], memory[-1 if offset == 0 else 0], 0
        with updates_compiled_from(LARGE, LARGE), as_traced(False):
            for _ in range(3):
                gradient = torch.randn(numel, device=device()).bfloat16()
                whole.grad, cut.grad = gradient.float(), None
                expected.step()
                update = begin(rule, optimizer, new=new)
                if update is None:
                    cut.grad = gradient.float()
                    optimizer.step()
                    continue
                if device().type != "cpu":
                    torch.cuda.reset_peak_memory_stats()
                    most = -torch.cuda.memory_allocated()
                run(update, gradient)
                if device().type != "cpu":
                    most += torch.cuda.max_memory_allocated()
                assert torch.equal(new, cut.data.bfloat16())
        torch.testing.assert_close(cut, whole, **CLOSE)
        assert other == 0 and most < numel


def test_a_pass_that_cannot_be_compiled():
    """Without a compiler, the step would raise or warn each time, in place of the optimizer's own step."""
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer, rule = torch.optim.AdamW([whole]), torch.optim.AdamW([cut]), OnePassAdam()
    fails = mock.patch.object(
        adam, "kernel" if device().type == "cuda" else "compile_step", side_effect=RuntimeError("no compiler\nat all")
    )
    with updates_compiled_from(LARGE, LARGE), fails, warnings_logged() as said:
        for step in range(4):
            factor = torch.ones(1, device=device())
            assert not step_beside(draw(step), optimizer, expected, whole, rule, factor)
    assert len(said) == 1 and said[0].endswith("several passes over memory (RuntimeError: no compiler)"), said
    torch.testing.assert_close(cut, whole, **CLOSE)


def test_a_scheduler_that_is_newer_than_the_states():
    """Torch would warn of a scheduler that steps first, which is as old as the engine after a load without it."""
    parameter = torch.nn.Parameter(torch.randn(NUMEL // ALIGN_NUMEL * ALIGN_NUMEL, device=device()))
    before, optimizer = torch.optim.AdamW([parameter]), torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    before.step()
    optimizer.load_state_dict(before.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with updates_compiled_from(LARGE, LARGE), as_traced(True):
        step = begin(OnePassAdam(), optimizer)
    # An overflow may end the step before its first range, so that nothing was stepped.
    assert not hasattr(optimizer, "_opt_called")
    run(step, parameter.grad.bfloat16())
    note_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@pytest.mark.skipif(get_accelerator().device_name() == "cpu", reason="only before a GPU the host can run ahead")
@vary("settings", [{"fused": True}, {"fused": False}, {"fused": True, "lr": torch.tensor(0.001)}])
def test_the_host_does_not_wait_for_a_range(settings):
    """A fused AdamW counts its steps on the GPU, another one on the host."""
    parameter = torch.nn.Parameter(torch.randn(NUMEL // ALIGN_NUMEL * ALIGN_NUMEL, device=device()))
    gradient = torch.randn_like(parameter).bfloat16()
    optimizer, rule, new = torch.optim.AdamW([parameter], **settings), OnePassAdam(), gradient.clone()
    parameter.grad = gradient.float()
    optimizer.step()
    with updates_compiled_from(LARGE):
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                update = begin(rule, optimizer, new=new)
                run(update, gradient)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@vary("name", ["AdamW", "DeepSpeed's Adam"], slow=["AdamW maximize"])
def test_new_values_may_be_written_over_gradients(name):
    """With offloading both are in one memory, so generated code that wrote first would read parameters."""
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer = (ADAMS[name]([parameter]) for parameter in (whole, cut))
    rule, memory = OnePassAdam(), torch.empty(NUMEL, dtype=torch.bfloat16, device=device())
    with updates_compiled_from(LARGE, LARGE), ranges_of(300), as_traced(False):
        for _ in range(4):
            memory.normal_()
            whole.grad = memory.float()
            expected.step()
            gradient = PartitionGradient(Views({0: memory}), None, cut.data, torch.bfloat16)
            step = begin(rule, optimizer, new=memory) or OwnStep(partition_of(optimizer, new=memory))
            Ranges(step, NUMEL, gradient, lambda *_: None).step_rest()
            assert torch.equal(memory, cut.data.bfloat16())
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)

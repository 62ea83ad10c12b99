# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A compiled update is the optimizer's own, to a rounding of fp32. It holds no gradient longer."""

import copy
import random
import warnings
from unittest import mock

import pytest
import torch
from torch._inductor import config
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from deepspeed.accelerator import get_accelerator
from deepspeed.compile.zero12.update import compiled as compiled_update
from deepspeed.compile.zero12.update.compiled import CompiledUpdates
from deepspeed.compile.zero12.update.groups import note_step
from deepspeed.compile.zero12.update.own_step import OwnStep
from deepspeed.compile.zero12.update.ranges import ALIGN_NUMEL, PartitionGradient, Ranges
from deepspeed.ops.adam import FusedAdam

from support.beside import warnings_logged
from support.ids import vary
from support.optimizers import MORE_OPTIMIZERS, OPTIMIZERS, Views, deepspeed_adam, partition_of
from support.training import as_recorded, device, ranges_of, updates_compiled_from

NUMEL = 1000
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
    flat, gradients, offset = torch.zeros(numel), {}, random.choice([0, 3])
    while offset < numel - 20:
        size = min(random.choice([1, 7, 16, 40, 64, 100, 256]), numel - offset)
        gradients[offset] = torch.randn(size).bfloat16().to(device())
        gradients[offset][: max(40 - offset, 0)] = 0
        flat[offset : offset + size] = gradients[offset]
        offset += size + random.choice([0, 0, 0, 1, 16])
    return Views(gradients), flat.to(device())


def begin(updates, optimizer, index=0, factor=None, new=None):
    return updates.begin(partition_of(optimizer, index, factor, new))


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
        assert read == [offset for offset in lie.values() if offset % ALIGN_NUMEL == 0]
        assert held and not gradient._rest, "gradients are held longer than they are needed"


def step_beside(given, optimizer, whole, expected, updates, factor):
    """Steps one optimizer in compiled ranges and another one at once. Returns whether the update was compiled."""
    views, flat = given
    spans = [(offset, offset + view.numel()) for offset, view in views.items()]
    whole.grad = flat * factor
    expected.step()
    (parameter,) = optimizer.param_groups[0]["params"]
    new = torch.full((NUMEL,), 7.0, dtype=torch.bfloat16, device=device())
    gradient = PartitionGradient(views, factor, parameter.data, torch.bfloat16)
    compiled = begin(updates, optimizer, factor=factor, new=new)
    finished = []
    stepped = Ranges(
        compiled or OwnStep(partition_of(optimizer, new=new)), NUMEL, gradient, lambda *span: finished.append(span)
    )
    # Some gradients are stepped before the others, among them the last.
    spans = [spans[0], spans[2], spans[-1]]
    stepped.step_first(spans)
    assert sum(last - first for first, last in finished) == sum(last - first for first, last in spans)
    stepped.step_rest()
    assert sum(last - first for first, last in finished) == NUMEL
    assert torch.equal(new, parameter.data.bfloat16())
    return compiled is not None


# A C++ compiler takes long, so on a CPU most run as they are recorded.
@vary(
    "name, recorded",
    [
        *((name, True) for name in (*OPTIMIZERS, *MORE_OPTIMIZERS)),
        ("AdamW", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("AdamW with a tensor", "SGD")),
    ],
)
def test_updates_are_those_of_torch(name, recorded):
    """A learning rate that was recorded as a number would stay what it was when the update was compiled."""
    make = {**OPTIMIZERS, **MORE_OPTIMIZERS}[name]
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer, updates = make([whole]), make([cut]), CompiledUpdates()
    # A warm-up begins at zero, and a decay ends there. A long exponential decay comes close, a linear one may go on.
    rates = [1.0, 0.0, 0.8, 1e-42, 0.6, -0.5, 0.0, 0.4, 0.3]
    if name == "AdamW capturable":
        # There torch itself makes NaN of a rate of zero.
        rates = [abs(rate) if abs(rate) > 0.1 else 0.1 for rate in rates]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, rates.__getitem__) for each in (expected, optimizer)]
    with updates_compiled_from(LARGE, LARGE), ranges_of(300), as_recorded(recorded and device().type == "cpu"):
        for step in range(8):
            factor = torch.full((1,), 1 / (1 + step), device=device())
            was_compiled = step_beside(draw(step), optimizer, whole, expected, updates, factor)
            assert was_compiled or step == 0
            for scheduler in schedulers:
                scheduler.step()
    assert len(updates._updates) == 1, "another learning rate needs no other update"
    # Torch's fused kernel rounds 1 - beta to fp32, which makes 1.3e-5 of the second moments.
    close = {"rtol": 3e-5, "atol": 1e-5} if name == "AdamW fused" else CLOSE
    torch.testing.assert_close(cut, whole, **close)
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], **close)


def described(value):
    """Describes an object of an optimizer, what it contains, and which objects all these are."""
    if isinstance(value, dict):
        inside = [(described(key), described(each)) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        inside = [described(each) for each in value]
    else:
        inside = value.tolist() if torch.is_tensor(value) else repr(value)
    return type(value), id(value), inside


@vary(
    "name, counts",
    [
        *((name, "tensors") for name in (*OPTIMIZERS, "DeepSpeed's")),
        ("AdamW", "numbers"),
        *(pytest.param(name, "tensors", marks=pytest.mark.slow) for name in MORE_OPTIMIZERS),
        *(
            pytest.param(name, "numbers", marks=pytest.mark.slow)
            for name in (*OPTIMIZERS, *MORE_OPTIMIZERS, "DeepSpeed's")
            if name != "AdamW"
        ),
    ],
)
def test_compiling_changes_nothing_of_an_optimizer(name, counts):
    """A step that is recorded counts, and replaces states, unless the recording puts all back.

    And a number that the recording reads from a tensor would make the host wait for the GPU, in each range.
    """
    make = {**OPTIMIZERS, **MORE_OPTIMIZERS, "DeepSpeed's": FusedAdam}[name]
    parameter = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    optimizer = make([parameter])
    optimizer.register_state_dict_pre_hook(lambda _: None)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter] if parameter in optimizer.state else {}
    if counts == "numbers":
        # As in old checkpoints.
        state.update({key: value.item() for key, value in state.items() if torch.is_tensor(value) and not value.dim()})
    before = described(vars(optimizer))
    with updates_compiled_from(LARGE), as_recorded(True):
        update = begin(CompiledUpdates(), optimizer)
    assert update is not None
    assert described(vars(optimizer)) == before
    kinds = {name: type(value) for name, value in state.items()}
    update.finish()
    assert {name: type(value) for name, value in state.items()} == kinds
    targets = {node.target for node in update._update.elements.graph.nodes}
    assert torch.ops.aten.copy_.default in targets
    assert not targets & {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}


@pytest.mark.skipif(get_accelerator().device_name() == "cpu", reason="DeepSpeed's kernel for GPUs")
@vary("adamw", [True, False])
def test_updates_of_deepspeed_adam(adamw):
    """FusedAdam in C++ cannot be recorded, so another Adam's update takes its place, whose settings could differ."""

    def make(p):
        return deepspeed_adam(p, adamw, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)

    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer, updates = make([whole]), make([cut]), CompiledUpdates()
    with updates_compiled_from(LARGE, LARGE), ranges_of(300):
        for step in range(6):
            factor = torch.full((1,), 0.5, device=device())
            assert step_beside(draw(step), optimizer, whole, expected, updates, factor) == (step > 0)
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-5, atol=1e-6)


def test_what_is_not_compiled():
    """An update without states, or with a value of a tensor in it, would be that of the first step for ever."""
    parameter = torch.nn.Parameter(torch.ones(NUMEL, device=device()))

    def compiled(optimizer, steps=1):
        for _ in range(steps):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return begin(CompiledUpdates(), optimizer) is not None

    with updates_compiled_from(LARGE), as_recorded(True):
        assert compiled(torch.optim.AdamW([parameter]))
        # The optimizer makes its states in the first step.
        assert not compiled(torch.optim.AdamW([parameter]), steps=0)
        assert compiled(torch.optim.SGD([parameter], lr=0.1), steps=0)
        assert not compiled(torch.optim.SGD([parameter], lr=0.1, momentum=0.9), steps=0)
        assert not compiled(deepspeed_adam([parameter], True, bias_correction=False))
        # A record would keep the value of a tensor.
        betas = torch.tensor(0.9), torch.tensor(0.99)
        assert not compiled(torch.optim.AdamW([parameter], lr=torch.tensor(0.1), betas=betas, foreach=False))
        assert compiled(torch.optim.AdamW([parameter], lr=torch.tensor(0.1), foreach=False))
    assert not compiled(torch.optim.AdamW([parameter])), "compiling takes longer than it saves"


@pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="an optimizer on the host")
def test_new_parameters_written_over_gradients():
    """With offloading they are. An update of DeepSpeed's Adam that wrote first would read parameters as gradients."""
    numel = NUMEL // ALIGN_NUMEL * ALIGN_NUMEL
    whole = torch.nn.Parameter(torch.randn(numel, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer = (deepspeed_adam([each], True, lr=0.1, weight_decay=0.1) for each in (whole, cut))
    updates = CompiledUpdates()
    with updates_compiled_from(LARGE, LARGE):
        for step in range(3):
            memory = draw(step, numel)[1].bfloat16()
            whole.grad = cut.grad = memory.float()
            expected.step()
            if step == 0:
                optimizer.step()
            else:
                run(begin(updates, optimizer, new=memory), memory)
                assert torch.equal(memory, cut.data.bfloat16())
    torch.testing.assert_close(cut, whole, **CLOSE)
    torch.testing.assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"], **CLOSE)


def test_settings_that_change_each_step():
    """A schedule of the weight decay would compile an update in each step, or step with an old decay."""
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer = torch.optim.AdamW([whole]), torch.optim.AdamW([cut])
    updates, compiled = CompiledUpdates(), []
    with updates_compiled_from(LARGE, LARGE), as_recorded(True), warnings_logged() as said:
        for step in range(compiled_update.MAX_UPDATES + 4):
            for each in (expected, optimizer):
                each.param_groups[0]["weight_decay"] = 0.1 / (1 + step)
            factor = torch.ones(1, device=device())
            compiled.append(step_beside(draw(step), optimizer, whole, expected, updates, factor))
    assert compiled == [False] + [True] * compiled_update.MAX_UPDATES + [False] * 3
    assert len(updates._updates) == compiled_update.MAX_UPDATES
    assert len(said) == 1 and "other settings than the learning rate change" in said[0]
    torch.testing.assert_close(cut, whole, **CLOSE)


def test_entries_of_groups_that_are_no_settings():
    """Entries that no step reads, as schedulers leave them, would make each group compile its own update."""
    parameters = [torch.nn.Parameter(torch.randn(NUMEL, device=device())) for _ in range(12)]
    groups = [
        {"params": [each], "lr": 0.1 / (1 + index), "lr_scale": 0.9**index, "name": f"layer {index}"}
        for index, each in enumerate(parameters)
    ]
    optimizer, updates = torch.optim.AdamW(groups), CompiledUpdates()
    torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [0.1 * (1 + index) for index in range(12)], total_steps=9, cycle_momentum=False
    )
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    with updates_compiled_from(LARGE), as_recorded(True):
        assert all(begin(updates, optimizer, index) is not None for index in range(12))
    assert len(updates._updates) == 1


def test_a_rate_that_is_no_number():
    """A schedule that divides zero by zero must not go unnoticed."""
    parameter = torch.nn.Parameter(torch.randn(16 * ALIGN_NUMEL, device=device()))
    parameter.grad, new = torch.ones_like(parameter), torch.zeros_like(parameter, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    optimizer.param_groups[0]["lr"] = float("nan")
    with updates_compiled_from(LARGE), as_recorded(True):
        update = begin(CompiledUpdates(), optimizer, new=new)
        run(update, parameter.grad.bfloat16())
    assert new.isnan().all() and parameter.isnan().all()


@vary("adamw", [True, False])
def test_deepspeed_adam_that_was_loaded(adamw):
    """Settings that a load brings in another type would make a resumed training compile another update."""

    def make():
        parameter = torch.nn.Parameter(torch.ones(NUMEL, device=device()))
        parameter.grad = torch.ones_like(parameter)
        optimizer = deepspeed_adam([parameter], adamw, lr=0.01)
        optimizer.step()
        return optimizer

    optimizer, loaded, updates = make(), make(), CompiledUpdates()
    loaded.load_state_dict(optimizer.state_dict())
    with updates_compiled_from(LARGE), mock.patch.object(compiled_update, "compile_update") as compiled:
        assert begin(updates, optimizer) is not None and begin(updates, loaded) is not None
    assert compiled.call_count == 1


def test_new_values_in_memory_that_is_not_aligned():
    """Partitions of odd sizes begin anywhere. On a GPU, Inductor must not copy them to an address that it likes."""
    numel = 2**22 if device().type != "cpu" else NUMEL // ALIGN_NUMEL * ALIGN_NUMEL
    # Another rank's partition may be aligned, and torch's caches have what that rank has compiled.
    for offset in (0, 1):
        whole = torch.nn.Parameter(torch.randn(numel, device=device()))
        cut = copy.deepcopy(whole)
        expected, optimizer = (torch.optim.AdamW([each], lr=0.1, foreach=False) for each in (whole, cut))
        memory, updates = torch.zeros(numel + 1, dtype=torch.bfloat16, device=device()), CompiledUpdates()
        new, other, most = memory[offset : offset + numel], memory[-1 if offset == 0 else 0], 0
        with updates_compiled_from(LARGE, LARGE), as_recorded(False):
            for _ in range(3):
                gradient = torch.randn(numel, device=device()).bfloat16()
                whole.grad, cut.grad = gradient.float(), None
                expected.step()
                update = begin(updates, optimizer, new=new)
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


def test_an_update_that_cannot_be_compiled():
    """Without a compiler, the step would raise or warn each time, in place of the optimizer's own step."""
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer, updates = torch.optim.AdamW([whole]), torch.optim.AdamW([cut]), CompiledUpdates()
    fails = mock.patch.object(compiled_update, "compile_update", side_effect=RuntimeError("no compiler\nat all"))
    with updates_compiled_from(LARGE, LARGE), fails, warnings_logged() as said:
        for step in range(4):
            factor = torch.ones(1, device=device())
            assert not step_beside(draw(step), optimizer, whole, expected, updates, factor)
    assert len(said) == 1 and said[0].endswith("several passes over memory (RuntimeError: no compiler)"), said
    torch.testing.assert_close(cut, whole, **CLOSE)


def test_a_scheduler_that_is_newer_than_the_states():
    """Torch would warn of a scheduler that steps first, which is as old as the engine after a load without it."""
    parameter = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    before, optimizer = torch.optim.AdamW([parameter]), torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    before.step()
    optimizer.load_state_dict(before.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with updates_compiled_from(LARGE, LARGE), as_recorded(True):
        step = begin(CompiledUpdates(), optimizer)
    # An overflow may end the step before its first range, so that nothing was stepped.
    assert not hasattr(optimizer, "_opt_called")
    step.finish()
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
    optimizer, updates, new = torch.optim.AdamW([parameter], **settings), CompiledUpdates(), gradient.clone()
    parameter.grad = gradient.float()
    optimizer.step()
    with updates_compiled_from(LARGE):
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                update = begin(updates, optimizer, new=new)
                run(update, gradient)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_scalar_states_in_another_order():
    """States that the update takes by their order would be exchanged where a load brings another order."""
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer, updates = torch.optim.NAdam([whole]), torch.optim.NAdam([cut]), CompiledUpdates()
    with updates_compiled_from(LARGE, LARGE), as_recorded(True):
        for step in range(5):
            if step == 3:
                optimizer.state[cut] = dict(reversed(optimizer.state[cut].items()))
            factor = torch.ones(1, device=device())
            assert step_beside(draw(step), optimizer, whole, expected, updates, factor) == (step > 0)
    torch.testing.assert_close(cut, whole, **CLOSE)


@vary("amsgrad", [False, True])
def test_new_values_may_be_written_over_gradients(amsgrad):
    """With offloading both are in one memory, so generated code that wrote first would read parameters."""
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    cut = copy.deepcopy(whole)
    expected, optimizer = (torch.optim.AdamW([each], lr=0.1, amsgrad=amsgrad) for each in (whole, cut))
    updates, memory = CompiledUpdates(), torch.empty(NUMEL, dtype=torch.bfloat16, device=device())
    with updates_compiled_from(LARGE, LARGE), ranges_of(300), as_recorded(False):
        for _ in range(4):
            memory.normal_()
            whole.grad = memory.float()
            expected.step()
            gradient = PartitionGradient(Views({0: memory}), None, cut.data, torch.bfloat16)
            update = begin(updates, optimizer, new=memory)
            step = update or OwnStep(partition_of(optimizer, new=memory))
            Ranges(step, NUMEL, gradient, lambda *_: None).step_rest()
            assert torch.equal(memory, cut.data.bfloat16())
    torch.testing.assert_close(cut, whole, **CLOSE)

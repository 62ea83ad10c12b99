# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A flat partition stepped in ranges is what it is stepped whole."""

import collections
import copy
import dataclasses
import functools
import weakref
from types import MethodType
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._contextlib import _DecoratorContextManager

from deepspeed.compile.features.update import adam, own_ranges
from deepspeed.compile.features.update.own_ranges import OwnRanges, OwnStep
from deepspeed.compile.zero_1_and_2.step.authors import runs_unpatched_step
from deepspeed.compile.zero_1_and_2.step.partition_gradient import ALIGN_NUMEL, PartitionGradient
from deepspeed.compile.zero_1_and_2.step.partitions import Ranges
from deepspeed.compile.zero_1_and_2.step.rule import Partition
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from support.ids import vary
from support.lifetime import backward, start, take_steps, targets_at_calls
from support.on_ranks import on_ranks
from support.optimizers import MORE_OPTIMIZERS, OPTIMIZERS, Views, deepspeed_adam, partition_of
from support.training import (
    OVERLAPPED,
    ROUNDING,
    Case,
    as_traced,
    device,
    ranges_of,
    relative_error,
    step_in_one_pass,
    updates_compiled_from,
)

NUMEL = 50


def may_be_cut(optimizer):
    """Whether ranges of an optimizer's only parameter are stepped."""
    return runs_unpatched_step(optimizer) and OwnRanges().begin(partition_of(optimizer)) is not None


@pytest.mark.quick
def test_a_partition_says_whether_the_step_is_unpatched():
    """A rule that makes a partition and forgets it would step in place of an optimizer that users have hooked."""
    (written,) = [field for field in dataclasses.fields(Partition) if field.name == "step_is_unpatched"]
    assert written.default is dataclasses.MISSING


class Gradients(NamedTuple):
    views: Views
    flat: torch.Tensor  # the same, with the padding


def draw_gradients(seed):
    """Draws gradients with padding in front of them, between them and behind them."""
    torch.manual_seed(seed)
    flat, runs = torch.zeros(NUMEL), [(2, 5), (7, 20), (30, 1), (33, 14)]
    for offset, numel in runs:
        flat[offset : offset + numel] = torch.randn(numel).bfloat16().float()
    return Gradients(Views({offset: flat[offset : offset + numel].bfloat16() for offset, numel in runs}), flat)


@pytest.mark.quick
@vary("size", [1, 3, 7, 32, 50, 100])
@pytest.mark.parametrize("factor", [None, 1 / 3], ids=["unscaled", "scaled"])
def test_gradient(size, factor):
    """A range that begins or ends within a gradient, or in padding, would get the elements of its neighbour."""
    given, flat = draw_gradients(0)
    held = [weakref.ref(view) for view in given.values()]
    gradient = PartitionGradient(given, factor and torch.tensor([factor]), torch.empty(0), torch.bfloat16)
    assert not given
    taken = [gradient.scaled(first, min(first + size, NUMEL)).clone() for first in range(0, NUMEL, size)]
    assert torch.equal(torch.cat(taken), flat if factor is None else flat * torch.tensor([factor]))
    assert not gradient._rest and not any(view() is not None for view in held), "gradients are held too long"


@pytest.mark.quick
@pytest.mark.parametrize("factor", [None, 1 / 3], ids=["unscaled", "scaled"])
def test_a_gradient_in_one_tensor_is_not_copied(factor):
    """A copy would take the memory of a whole partition, which a gradient in one tensor saves."""
    flat = torch.randn(NUMEL)
    expected, gradients = flat.clone(), Views({2: flat[2:7], 7: flat[7:27]})
    gradients.flat_partition = flat
    gradient = PartitionGradient(gradients, factor and torch.tensor([factor]), torch.empty(0), torch.float32)
    assert torch.equal(gradient.unscaled(16, NUMEL), expected[16:48]) and not gradients
    for first, last in ((40, NUMEL), (0, 40)):
        taken = gradient.scaled(first, last)
        assert taken.data_ptr() == flat[first:].data_ptr()
        assert torch.equal(taken, expected[first:last] * torch.tensor([factor or 1.0]))


@pytest.mark.quick
@pytest.mark.parametrize("method", ["scaled", "unscaled"])
def test_pictures_show_the_memory_of_a_range_with_gradients(method):
    """The picture would count the memory of a range as activations, because no name tells it."""
    classify = pytest.importorskip("deepspeed.compile.tools.memory_picture.classify")
    views, _ = draw_gradients(0)
    gradient = PartitionGradient(views, None, torch.empty(0), torch.bfloat16)
    with torch.profiler.profile() as profiler:
        getattr(gradient, method)(0, 32)
    assert classify.HOLDS_GRADIENT & {event.name for event in profiler.events()}


@pytest.mark.quick
@pytest.mark.parametrize("returned", [0, 8])
def test_a_rule_that_does_not_say_how_far_it_went(returned):
    """A rule that returns nothing, or too much, would be called for ever, or leave elements out."""
    step = mock.Mock(run=lambda *_: returned)
    with pytest.raises(RuntimeError, match=f"from 0 to 4 at most and returned {returned}; a rule must return"):
        Ranges(step, 4, None, lambda *_: None).step_rest()


@pytest.mark.follows("a rule must return the end of the elements")
@pytest.mark.quick
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranges_step_as_the_whole(name):
    """An optimizer that counts a step for each range, or cuts no state, trains otherwise than whole."""
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(NUMEL))
    cut = copy.deepcopy(whole)
    expected, optimizer = OPTIMIZERS[name]([whole]), OPTIMIZERS[name]([cut])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    expected_scheduler = torch.optim.lr_scheduler.StepLR(expected, 2, 0.5)
    stepped, new = [], torch.empty(NUMEL)
    for step in range(6):
        given, flat = draw_gradients(step)
        whole.grad = flat
        expected.step()
        assert may_be_cut(optimizer)
        stepped.clear()
        with ranges_of(7):
            gradient = PartitionGradient(given, None, cut.data, torch.bfloat16)
            own = OwnStep(partition_of(optimizer, new=new))
            Ranges(own, NUMEL, gradient, lambda *span: stepped.append(span)).step_rest()
        assert torch.equal(new, cut)
        assert stepped == [(first, min(first + 7, NUMEL)) for first in range(0, NUMEL, 7)]
        scheduler.step()
        expected_scheduler.step()
    # A fused kernel rounds otherwise where a vector of elements is cut short.
    closeness = {"rtol": 1e-6 if name == "AdamW fused" else 0, "atol": 0}
    torch.testing.assert_close(cut, whole, **closeness)
    assert list(optimizer.state) == [cut] * len(expected.state) and len(optimizer.param_groups) == 1
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], **closeness)


def test_what_must_be_stepped_whole():
    """An optimizer that looks at a whole parameter, as at its norm, would look at a range."""
    parameter = torch.nn.Parameter(torch.ones(4))

    class Own(torch.optim.AdamW):
        pass

    def stepped(cls):
        optimizer = cls([parameter], lr=0.1)
        parameter.grad = torch.ones(4)
        optimizer.step()
        return optimizer

    assert may_be_cut(stepped(torch.optim.AdamW))
    # A class that nobody has looked at may use the whole parameter, for example its norm.
    assert not may_be_cut(stepped(Own))
    assert not may_be_cut(stepped(torch.optim.Adafactor))
    # As a checkpoint from before there was momentum has it.
    without = stepped(torch.optim.SGD)
    without.state[parameter]["momentum_buffer"] = None
    assert not may_be_cut(without)
    hooked = stepped(torch.optim.AdamW)
    hooked.register_step_post_hook(lambda *_: None)
    assert not may_be_cut(hooked)
    # Torch's own hook, for a daemon that profiles, would count each range as a step.
    for hook in (lambda *_: None, torch.profiler._optimizer_post_hook):
        handle = register_optimizer_step_post_hook(hook)
        assert not may_be_cut(stepped(torch.optim.AdamW))
        handle.remove()
    assert may_be_cut(stepped(torch.optim.AdamW))


def around(function):
    """Returns what a user puts around ``function`` with ``functools.wraps``."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def method_before_a_scheduler(optimizer):
    optimizer.step = MethodType(around(type(optimizer).step), optimizer)
    StepLR(optimizer, 1)


def wrapper_of_a_schedulers_step(optimizer):
    StepLR(optimizer, 1)
    optimizer.step = around(optimizer.step)


def marked(optimizer):
    step = optimizer.step
    optimizer.step = lambda: step()
    optimizer.step._wrapped_by_lr_sched = optimizer.step.hooked = True


class Timed(_DecoratorContextManager):
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def another_optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])


def of_another_optimizers_scheduler(optimizer):
    # Kept, because the wrapper does not keep it.
    optimizer.other = another_optimizer()
    StepLR(optimizer.other, 1)
    optimizer.step = optimizer.other.step


ON_THE_INSTANCE = {
    "method before a scheduler": method_before_a_scheduler,
    "wrapper of a scheduler's step": wrapper_of_a_schedulers_step,
    "marked": marked,
    "partial": lambda optimizer: setattr(optimizer, "step", functools.partial(optimizer.step)),
    "compiled": lambda optimizer: setattr(optimizer, "step", torch.compile(optimizer.step, backend="eager")),
    "in a context": lambda optimizer: setattr(optimizer, "step", Timed()(optimizer.step)),
    "of another optimizer": lambda optimizer: setattr(optimizer, "step", another_optimizer().step),
    "of another optimizer's scheduler": of_another_optimizers_scheduler,
    "other class": lambda optimizer: setattr(optimizer, "__class__", type("Other", (torch.optim.AdamW,), {})),
}


@pytest.mark.quick
@vary("replaced", ON_THE_INSTANCE)
def test_a_step_that_was_replaced(replaced):
    """What a user put in place of step() would be left out, because ranges call the class's own."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
    assert may_be_cut(optimizer)
    ON_THE_INSTANCE[replaced](optimizer)
    assert not may_be_cut(optimizer)


def of_a_mock(function):
    return mock.MagicMock(side_effect=function)


def of_a_cache(function):
    return functools.lru_cache(around(function))


def of_made_source(function):
    """As ``mock.create_autospec()`` makes it, in a namespace without a name."""
    namespace = {"function": function}
    exec("def made(*args, **kwargs): return function(*args, **kwargs)", namespace)
    del namespace["__builtins__"]
    return namespace["made"]


@pytest.mark.quick
@pytest.mark.parametrize("replaced", [of_a_mock, of_a_cache, of_made_source])
def test_a_replacement_that_is_no_plain_function(replaced):
    """A replacement without code or module to read would raise, or pass for torch's own."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
    with mock.patch.object(torch.optim.AdamW, "step", replaced(torch.optim.AdamW.step)):
        assert not may_be_cut(optimizer)
    assert may_be_cut(optimizer)


@pytest.mark.parametrize("before", [False, True], ids=["later", "before"])
def test_a_step_that_was_replaced_for_all_optimizers(before):
    """Torch marks as its own what it finds on a class, so what was replaced before would pass for torch's."""

    def make():
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])

    optimizer, step = make(), torch.optim.AdamW.step
    for replaced in (around(step), torch.no_grad()(around(step))):
        with mock.patch.object(torch.optim.AdamW, "step", replaced):
            assert not may_be_cut(make() if before else optimizer)
    assert may_be_cut(optimizer)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE_OPTIMIZERS, "DeepSpeed's"])
def test_what_torch_itself_puts_around_a_step(name):
    """Schedulers and torch.compile wrap each step(), after which no optimizer would be stepped in ranges."""
    make = {**OPTIMIZERS, **MORE_OPTIMIZERS, "DeepSpeed's": lambda p: deepspeed_adam(p, True)}[name]
    optimizer = make([torch.nn.Parameter(torch.ones(4, device=device()))])
    assert may_be_cut(optimizer)
    StepLR(optimizer, 1)
    ExponentialLR(optimizer, 0.9)
    # Its first call replaces methods of all optimizers.
    torch.compile(torch.neg, backend="eager")(torch.ones(1))
    assert may_be_cut(optimizer)


class Halving:
    """A step() of the user, which halves gradients, in one of three places. Notes the elements that it is given."""

    def __init__(self, optimizer, place):
        self.optimizer, self.place, self.seen = optimizer, place, []
        if place == "method":
            optimizer.step = MethodType(self.around(type(optimizer).step), optimizer)
        if place != "class":
            # A scheduler's wrapper calls the step() that there was when the scheduler was made.
            StepLR(optimizer, 100)
        if place == "wrapper":
            optimizer.step = self.around(optimizer.step)

    def around(self, function):
        @functools.wraps(function)
        def step(*args, **kwargs):
            gradients = [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]
            self.seen.append([gradient.numel() for gradient in gradients])
            torch._foreach_mul_(gradients, 0.5)
            return function(*args, **kwargs)

        return step

    def replaced(self, step):
        """Within it the class has another step(), if that is the place, and not from the beginning."""
        cls = type(self.optimizer)
        is_replaced = self.place == "class" and step >= 3
        return mock.patch.object(cls, "step", self.around(cls.step) if is_replaced else cls.step)


@vary("place", ["method", "wrapper", "class"])
@vary("one_pass", [False, True])
@vary("groups", [1, 2])
@on_ranks(2)
def test_a_users_step_is_called_as_without_ranges(place, one_pass, groups):
    """Ranges would call it several times for a parameter group, each time with a part of the gradient."""
    case = Case(adam=one_pass, dtype="bf16", model="RepeatedLayers", clipping=0.1, groups=groups)
    ends, seen = [], []
    least = 2 * ALIGN_NUMEL if one_pass else 2**30
    for deepcompile in (True, False):
        with ranges_of(48), updates_compiled_from(least, 32), as_traced(True):
            module, engine = start(dataclasses.replace(case, deepcompile=deepcompile))
            begin = [parameter.float().clone() for parameter in module.parameters()]
            if deepcompile:
                step_in_one_pass(engine)
                partitions = [master.numel() for master in engine.optimizer.single_partition_of_fp32_groups]
            halving = Halving(engine.optimizer.optimizer, place)
            for step in range(5):
                backward(engine, step)
                with halving.replaced(step):
                    engine.step()
            ends.append([safe_get_full_fp32_param(parameter).clone() for parameter in module.parameters()])
            seen.append(halving.seen)
            engine.destroy()
    in_ranges, without = seen
    # DeepSpeed's own partitions have another number of elements.
    assert [*map(len, in_ranges)] == [*map(len, without)]
    # The optimizer steps one parameter group after the other, each whole.
    assert in_ranges == [[numel] for numel in partitions] * (len(in_ranges) // groups)
    assert len(in_ranges) == groups * (2 if place == "class" else 5)
    moved = relative_error(ends[1], begin)
    assert relative_error(*ends) < ROUNDING["bf16"] * moved and moved > 1e-3


@on_ranks(2)
def test_an_engine_steps_in_ranges():
    """An engine that scales all gradients into fp32 at once takes the memory that ranges save."""
    trained, calls, take = [], [], PartitionGradient.scaled

    def taken(self, first, last):
        calls.append((numel, step))
        return take(self, first, last)

    with mock.patch.object(PartitionGradient, "scaled", taken):
        for numel in (50, own_ranges.RANGE_NUMEL):
            with ranges_of(numel):
                module, engine = start(Case(dtype="bf16", clipping=0.1))
                for step in range(3):
                    backward(engine, step)
                    engine.step()
                trained.append([safe_get_full_fp32_param(parameter).clone() for parameter in module.parameters()])
                engine.destroy()
    # Pieces of the fp32 gradient, in each step in ranges.
    pieces = [calls.count((50, step)) for step in range(3)]
    assert pieces[0] > 5 and pieces == 3 * pieces[:1]
    assert relative_error(*trained) == 0


@vary("one_pass", [False, True])
@on_ranks(2)
def test_a_gradient_is_released_after_its_last_range(one_pass):
    """A list of gradients that a step keeps to its end would hold those of the whole model."""
    if one_pass and device().type != "cpu":
        pytest.skip("on a GPU one kernel reads all gradients, and makes nothing beside them")
    # No parameter is so small that the first rank has all of it.
    case = Case(adam=one_pass, dtype="bf16", model="AlignedBlocksWithin")
    with ranges_of(50), updates_compiled_from(2 * ALIGN_NUMEL if one_pass else 2**30, 32), as_traced(True):
        engine = start(case).engine
        if one_pass:
            step_in_one_pass(engine)
        # What reads the gradient of a range when it is stepped.
        reads = (adam, "Elements") if one_pass else (PartitionGradient, "scaled")
        counts = targets_at_calls(*reads, engine, steps=3)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 5 and counts[-1] <= 2


@vary("one_pass", [False, True])
@vary("overlapped", [False, True])
@on_ranks(2)
def test_no_copy_of_a_gradient_outlives_the_step_of_its_group(one_pass, overlapped):
    """A reference that the step's last call leaves would let those of all parameter groups exist at once."""
    case = Case(adam=one_pass, dtype="bf16", model="BlocksWithin", groups=3, config=OVERLAPPED if overlapped else {})
    made, kept = [], []
    # In one pass gradients are scaled as they are read, and small ones are gathered before.
    copying = "_gather" if one_pass else "scaled"
    function = getattr(PartitionGradient, copying)

    def noted(self, *args):
        gradient = function(self, *args)
        # A slice of the memory that the next call overwrites.
        made.extend([weakref.ref(gradient), weakref.ref(self._gathered if one_pass else self._memory)])
        return gradient

    def sent(gather, method):
        function = getattr(gather, method)

        def noted(self):
            tensors = [reference() for reference in made]
            kept.append(len([tensor for tensor in tensors if tensor is not None and tensor.numel()]))
            return function(self)

        return mock.patch.object(gather, method, noted)

    least = 2 * ALIGN_NUMEL if one_pass else 2**30
    with updates_compiled_from(least, 32), as_traced(True):
        _, engine = start(case)
        gather = type(engine.optimizer._deepcompile.gather)
        if one_pass:
            step_in_one_pass(engine)
        with mock.patch.object(PartitionGradient, copying, noted), sent(gather, "start_first"), sent(gather, "start"):
            take_steps(engine, 3)
        engine.destroy()
    # On a GPU one kernel reads all gradients where they lie.
    assert made or (one_pass and device().type != "cpu")
    # Whenever parameters are sent.
    assert kept == 3 * [0, 0]


@on_ranks(2)
def test_a_whole_step_keeps_no_copy_for_the_next_partition():
    """The fp32 gradients of two partitions would exist at once, where the optimizer steps partitions whole."""
    made, kept, function = [], [], PartitionGradient.scaled

    def noted(self, *args):
        kept.append(sum(reference() is not None for reference in made))
        gradient = function(self, *args)
        made.append(weakref.ref(gradient))
        return gradient

    _, engine = start(Case(dtype="bf16", model="BlocksWithin", groups=3))
    # A hook would be called for each range.
    engine.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    with mock.patch.object(PartitionGradient, "scaled", noted):
        take_steps(engine, 2)
    engine.destroy()
    # Whenever a partition is copied.
    assert kept == 6 * [0]


class NotingStates(collections.defaultdict):
    """An optimizer's states. Notes states of ranges, which the step takes out again when a range is stepped."""

    def __init__(self):
        super().__init__(dict)
        self.taken = []

    def pop(self, *args):
        states = super().pop(*args)
        self.taken += [weakref.ref(value) for value in states.values() if value.dim()]
        return states

    def held(self):
        return sum(reference() is not None for reference in self.taken)


@on_ranks(2)
def test_no_state_of_a_range_outlives_the_step_of_the_range():
    """In the first step, which makes states, those of all groups would exist at once beside the whole ones."""
    kept = []

    def noted(owner, method):
        function = getattr(owner, method)
        return mock.patch.object(owner, method, lambda *args: kept.append(states.held()) or function(*args))

    with ranges_of(16):
        _, engine = start(Case(dtype="bf16", model="BlocksWithin", groups=3, config=OVERLAPPED))
        gather = type(engine.optimizer._deepcompile.gather)
        states = engine.optimizer.optimizer.state = NotingStates()
        with noted(PartitionGradient, "scaled"), noted(gather, "start_first"), noted(gather, "start"):
            take_steps(engine)
        engine.destroy()
    assert len(states.taken) > 6
    # Whenever a range begins, or parameters are sent.
    assert len(kept) > 8 and not any(kept), kept


class Interrupted(torch.optim.SGD):
    """Raises as an interrupt does that comes just after a range has taken the place of the parameter groups."""

    armed = False

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "param_groups" and Interrupted.armed:
            Interrupted.armed = False
            raise KeyboardInterrupt


@pytest.mark.quick
def test_an_interrupted_optimizer_has_its_groups():
    """An interrupt would leave the optimizer with a range in place of its parameter groups."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = Interrupted([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(4)
    optimizer.step()
    groups, Interrupted.armed = optimizer.param_groups, True
    gradient = PartitionGradient(Views({0: torch.ones(4)}), None, parameter.data, torch.float32)
    with pytest.raises(KeyboardInterrupt):
        OwnStep(partition_of(optimizer)).run(gradient, 0, 4)
    assert optimizer.param_groups is groups and [*optimizer.state] == [parameter]


@on_ranks(2)
def test_an_optimizer_whose_step_raises_has_its_groups():
    """DeepSpeed's method, which steps a whole partition, would leave one group, and a load would not fit."""
    _, engine = start(Case(dtype="bf16", model="BlocksWithin", groups=3))
    optimizer = engine.optimizer.optimizer

    def step():
        raise ArithmeticError

    optimizer.step, before = step, len(optimizer.param_groups)
    backward(engine)
    with pytest.raises(ArithmeticError):
        engine.step()
    engine.destroy()
    assert before == len(optimizer.param_groups) > 1


@on_ranks(2)
def test_a_loaded_state_is_stepped_in_ranges(tmp_path):
    """A load replaces states and groups, of which ranges would still cut the old ones."""

    def momentum(parameter):
        return safe_get_full_optimizer_state(parameter, "momentum_buffer")

    seen = []
    with ranges_of(50):
        for loads in (False, True):
            module, engine = start(Case(dtype="bf16"))
            if loads:
                engine.load_checkpoint(tmp_path, tag="two")
            for step in range(2 if loads else 0, 4):
                if step == 2 and not loads:
                    engine.save_checkpoint(tmp_path, tag="two")
                take_steps(engine, first=step)
            parameters, reads = [*module.parameters()], (safe_get_full_fp32_param, momentum)
            seen.append([read(parameter).clone() for parameter in parameters for read in reads])
            engine.destroy()
    assert relative_error(*seen) == 0

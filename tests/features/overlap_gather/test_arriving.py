# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The class of a parameter that is on its way, without ranks: who waits, and who need not."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.compile.features.overlap_gather.arriving import Arrival, Arriving, can_be_marked, mark, unmark
from deepspeed.compile.features.overlap_gather.guards_of_callers import all_guards
from deepspeed.compile.features.overlap_gather.without_values import WITHOUT_VALUES

from support.parameter_gather import past_the_class


class Delayed:
    """Parameters of which one unit each gets its value when somebody waits for it."""

    def __init__(self, value, count=1, has_streams=False):
        self.value, self.waits, self.has_streams = value, [], has_streams
        self.parameters = [Parameter(torch.full((2, 2), 7.0)) for _ in range(count)]
        self.send()

    def send(self):
        for unit, parameter in enumerate(self.parameters):
            parameter.data.fill_(7.0)
            mark([parameter], Arrival(self, unit))
        self.waits.clear()

    def receive(self, unit):
        # A compiler may ask within its own modes.
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if unit not in self.waits:
                self.parameters[unit].fill_(self.value)
        self.waits.append(unit)

    def receive_all(self):
        for unit, parameter in enumerate(self.parameters):
            if isinstance(parameter, Arriving):
                self.receive(unit)

    def arrive(self, unit):
        self.receive(unit)
        if not self.has_streams:
            unmark([self.parameters[unit]])

    def mark_again(self, parameter, arrival):
        if self.has_streams:
            mark([parameter], arrival)

    def arrive_all(self):
        for unit in range(len(self.parameters)):
            self.arrive(unit)


def outcome(function, value, arguments):
    """What a function gives of a tensor of these values."""
    torch.manual_seed(0)
    tensor = Parameter(torch.full((2, 2), value))
    result = function(tensor, *arguments)
    if isinstance(result, torch.Tensor) and result is not tensor:
        assert result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        return (
            result.shape if function.__name__.endswith(("empty_like", "empty", "empty_strided")) else result.tolist()
        )
    return None if result is tensor or "hook" in function.__name__ else result


# Arguments that functions take beside the tensor.
ARGUMENTS = {
    "is_same_size": [torch.zeros(2, 2)],
    "_has_compatible_shallow_copy_type": [torch.zeros(2, 2)],
    "randint_like": [9],
    "new_empty": [(2,)],
    "new_zeros": [(2,)],
    "new_ones": [(2,)],
    "new_empty_strided": [(2,), (1,)],
    "register_hook": [print],
    "register_post_accumulate_grad_hook": [print],
}
SET = {"grad": None, "_grad": None, "requires_grad": False, "_backward_hooks": None}


@pytest.mark.quick
def test_who_need_not_wait_reads_no_values():
    """A function that reads values, or gives another tensor of the same memory, would do so before these arrive."""
    for function in WITHOUT_VALUES:
        name = function.__name__
        if name in ("__get__", "__set__", "__delete__"):
            attribute = function.__self__.__name__
            assert function.__self__ is getattr(torch.Tensor, attribute)
            arguments = [SET.get(attribute)] if name == "__set__" else []
        else:
            arguments = ARGUMENTS.get(name, [])
        if name != "__delete__":
            assert outcome(function, 1.5, arguments) == outcome(function, -2.5, arguments), name


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore")
def test_every_other_function_of_torch_waits():
    """A function that is new in torch, or that torch does not show to a class, would read what was there before."""
    reached = 0
    for function in torch.overrides.get_testing_overrides():
        for arguments in (1, 2):
            delayed = Delayed(1.0)
            result = NotImplemented
            with contextlib.suppress(Exception), torch.no_grad():
                result = function(*delayed.parameters * arguments)
            # Most take other arguments. Some say so before they ask the class.
            if result is NotImplemented and not delayed.waits:
                continue
            if function is torch.Tensor.set_:
                # Torch does not show it. It gives a parameter other memory, into which nothing is sent.
                continue
            reached += 1
            name = torch.overrides.resolve_name(function) or str(function)
            assert bool(delayed.waits) == (function not in WITHOUT_VALUES), name
            assert type(delayed.parameters[0]) is not Parameter or delayed.waits, name
    assert reached > 800


def saved(parameter):
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READS = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "operator": lambda p: p + 0,
    "operator, other first": lambda p: torch.zeros(2, 2) + p,
    "in a list": lambda p: torch.stack([p])[0],
    "foreach": lambda p: torch._foreach_add([p, p], 0)[1],
    "lerp_": lambda p: torch.zeros(2, 2).lerp_(p.detach(), 1.0),
    "copy_": lambda p: torch.zeros(2, 2).copy_(p),
    "view": lambda p: p.view(-1).view(2, 2),
    "T": lambda p: p.T.T,
    "index": lambda p: p[:],
    "linear": lambda p: torch.nn.functional.linear(torch.eye(2), p).T,
    "to": lambda p: p.to(torch.float64),
    "item": lambda p: torch.full((2, 2), p[0, 0].item()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "data_ptr": lambda p: (p.data_ptr(), p.detach())[1],
    "untyped_storage": lambda p: torch.empty(0).set_(p.untyped_storage(), 0, (2, 2)),
    "share_memory_": lambda p: p.share_memory_(),
    "set data": lambda p: (setattr(p, "data", p.data.clone()), p)[1],
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": saved,
    "type": lambda p: type(p)(torch.full((2, 2), 3.0)),
    "repr": lambda p: torch.full((2, 2), 3.0) if "3." in repr(p) and "Arriving" not in repr(p) else None,
    "iterate": lambda p: torch.stack(list(p)),
    "inference_mode": torch.inference_mode()(lambda p: p * 1),
    "no_grad in place": torch.no_grad()(lambda p: p.mul_(1)),
    "autograd.grad": lambda p: torch.autograd.grad((p * p).sum(), p)[0] / 2,
    "custom operator": lambda p: torch.ops.aten.clone.default(p),
    "parameters_to_vector": lambda p: torch.nn.utils.parameters_to_vector([p]).view(2, 2),
    "functional_call": lambda p: (
        torch.func.functional_call(torch.nn.Linear(2, 2, bias=False), {"weight": p}, torch.eye(2)).T
    ),
    "vmap": lambda p: torch.func.vmap(lambda row: row * 1)(p.data),
    "vmap of itself": lambda p: torch.func.vmap(lambda row: row * 1)(p),
    "vmap of a dict": lambda p: torch.func.vmap(lambda row: row["p"] * 1)({"p": p}),
}


@pytest.mark.options("compile.overlap_param_gather")
@pytest.mark.quick
@pytest.mark.parametrize("has_streams", [False, True], ids=["", "streams"])
@pytest.mark.parametrize("how", READS)
def test_a_read_waits(how, has_streams):
    """A way to read a parameter that goes past the class would read what was there before the step. On a GPU, readers
    would see the class, or the class would be gone when another stream reads."""
    delayed = Delayed(3.0, has_streams=has_streams)
    (parameter,) = delayed.parameters
    number = hash(parameter)
    assert isinstance(parameter, Parameter) and isinstance(parameter, torch.Tensor)
    result = READS[how](parameter)
    if how == "type":
        parameter.detach()
    assert result.double().tolist() == [[3.0, 3.0]] * 2
    assert isinstance(parameter, Arriving) == has_streams and hash(parameter) == number
    unmark([parameter])
    assert type(parameter) is Parameter and not vars(parameter)
    assert not isinstance(result, Arriving) or result is parameter, "a copy would wait for ever"


def test_a_write_waits_and_stands():
    """What was written would be overwritten by what is on its way."""
    for write in (
        lambda p: p.data.fill_(5.0),
        lambda p: torch.nn.init.constant_(p, 5.0),
        lambda p: torch._foreach_copy_([p.data], [torch.full((2, 2), 5.0)]),
        lambda p: setattr(p, "data", torch.full((2, 2), 5.0)),
        torch.no_grad()(lambda p: p.copy_(torch.full((2, 2), 5.0))),
        torch.no_grad()(lambda p: p.__setitem__(slice(None), 5.0)),
    ):
        delayed = Delayed(3.0)
        (parameter,) = delayed.parameters
        write(parameter)
        assert delayed.waits == [0] and parameter.tolist() == [[5.0, 5.0]] * 2


def test_what_describes_does_not_wait():
    """Code that only looks at a parameter, such as zero_grad(), would have the next forward overlap nothing."""
    delayed = Delayed(3.0)
    (parameter,) = delayed.parameters
    module = torch.nn.Linear(2, 2, bias=False)
    module.weight = parameter
    assert (parameter.shape, parameter.dtype, parameter.device, parameter.numel()) == (
        (2, 2),
        torch.float32,
        torch.device("cpu"),
        4,
    )
    assert parameter.requires_grad and parameter.grad is None and parameter.is_leaf and len(parameter) == 2
    parameter.register_hook(print).remove()
    parameter.register_post_accumulate_grad_hook(print).remove()
    module.train().eval().requires_grad_(True).zero_grad()
    parameter.grad = torch.zeros_like(parameter)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    parameter.grad = None
    assert dict(module.named_parameters()) == {"weight": parameter}
    assert not delayed.waits and isinstance(parameter, Arriving)


def test_tensors_that_cannot_be_marked():
    """Who has a class of its own for functions, or its values in other tensors, would be read past the class."""

    class Sees(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    class Wraps(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return NotImplemented

    class Final(Parameter):
        def __init_subclass__(cls):
            raise TypeError("no subclasses")

    class Other(Parameter):
        pass

    for kind in (Sees, Wraps, Final):
        tensor = torch.Tensor._make_subclass(kind, torch.zeros(2))
        assert not can_be_marked(tensor) and type(tensor) is kind
    assert can_be_marked(Parameter(torch.zeros(2))) and can_be_marked(Other(torch.zeros(2)))


AVERAGES = [torch.zeros(2, 2) for _ in range(3)]


def average(parameters):
    with torch.no_grad():
        torch._foreach_lerp_(AVERAGES, parameters, 1.0)
    return sum(average.sum() for average in AVERAGES)


def halve(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)
    return 2 * sum(parameter.detach().sum() for parameter in parameters)


def copies(parameters):
    made = [torch.zeros(2, 2) for _ in parameters]
    with torch.no_grad():
        torch._foreach_copy_(made, parameters)
    return sum(tensor.sum() for tensor in made)


COMPILED = {
    "norms": lambda parameters: torch.stack([parameter.detach().pow(2).sum() for parameter in parameters]).sum() / 3,
    "penalty": lambda parameters: sum((parameter * 1).sum() for parameter in parameters if parameter.requires_grad),
    "data": lambda parameters: sum(parameter.data.sum() for parameter in parameters),
    "sizes": lambda parameters: (
        torch.tensor(3.0) * sum(parameter.shape[0] * parameter.numel() // 2 for parameter in parameters)
    ),
    # Dynamo asks the class of a tensor in a list, and not in a tuple or a second list.
    "tuple": lambda parameters: torch.cat((parameters[0], *parameters[1:])).sum(),
    "copies": copies,
    "average": average,
    "halve": halve,
}


@pytest.mark.parametrize("of", ["list", "module"])
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", past_the_class, pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("how", COMPILED)
def test_code_that_a_caller_compiles(how, backend, of):
    """Dynamo reads the class of parameters in guards: it would compile such code anew in each step, or past the wait.
    With ``fullgraph`` it would raise. Before torch 2.13, guards would leave out the class of what a module holds."""
    torch._dynamo.reset()
    delayed, called = Delayed(3.0, count=3), COMPILED[how]
    held = delayed.parameters
    if of == "module":
        held, called = torch.nn.ParameterList(held), lambda module: COMPILED[how](list(module.parameters()))
    compiled = torch.compile(called, backend=backend, fullgraph=True)
    delayed.arrive_all()
    before = sum(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values())
    with all_guards():
        for step in range(6):
            # As in a loop whose first step reads before anything is sent.
            if step:
                delayed.send()
            assert float(compiled(held)) == 36, step
            delayed.arrive_all()
    assert sum(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values()) - before <= 2


@pytest.mark.parametrize("left_out", [False, True])
def test_code_that_was_compiled_before(left_out):
    """Code that a caller has compiled before the engine's set-up would read old values of what a module holds, where
    guards leave out the class: before torch 2.13, or by an option of Dynamo."""
    torch._dynamo.reset()
    delayed = Delayed(3.0, count=3)
    module = torch.nn.ParameterList(delayed.parameters)
    compiled = torch.compile(lambda: average(list(module)), backend=past_the_class, fullgraph=True)
    delayed.arrive_all()
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=left_out):
        # Only a second call finds that the module holds the same objects.
        assert [float(compiled()) for _ in range(2)] == [36, 36]
        with all_guards(), all_guards():
            delayed.send()
            assert float(compiled()) == 36
            delayed.arrive_all()


def once(x: torch.Tensor):
    return x * 1


PAST_THE_CLASS = {
    "grad": lambda p: torch.func.grad(lambda weight: weight.square().sum())(p) / 2,
    "vjp": lambda p: torch.func.vjp(lambda weight: weight * 1, p)[0],
    "jacrev": lambda p: torch.func.jacrev(lambda weight: weight.square().sum())(p) / 2,
    "grad of another tensor": lambda p: torch.func.grad(lambda x, weight: (x * weight).sum())(torch.ones(2, 2), p),
    "functionalize": lambda p: torch.func.functionalize(once)(p),
    "torch.jit.script": lambda p: torch.jit.script(once)(p),
}


@pytest.mark.quick
@pytest.mark.parametrize("how", PAST_THE_CLASS)
def test_what_reads_past_the_class(how):
    """A limit of docs/reference/options.md: torch calls nothing that the parameter's class sees. Where a new torch
    does, the page would warn of what waits by itself."""
    delayed = Delayed(3.0)
    (parameter,) = delayed.parameters
    assert PAST_THE_CLASS[how](parameter).tolist() == [[7.0, 7.0]] * 2 and not delayed.waits
    assert PAST_THE_CLASS[how](parameter.detach()).tolist() == [[3.0, 3.0]] * 2

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in ``test_lifetime.py``. Each function runs on every rank and returns what it saw."""

import copy
import ctypes
import gc
import tempfile
import threading
import time
import warnings

import torch
import torch.distributed as dist

from deepspeed.compile.zero12 import chunked_step, gradient_counters, reset_gradient_counters
from deepspeed.compile.zero12.optimizer import is_attached
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

from support.models import Model
from support.training import (
    average_gradients,
    batch,
    build,
    default_dtype,
    device,
    held,
    make_engine,
    make_optimizer,
    relative_error,
)


def start(case, module=None):
    torch._dynamo.reset()
    module = module or build(case)
    return module, make_engine(module, case)


def backward(engine, step=0, micro_step=0):
    engine.backward(engine(batch(step, micro_step, dist.get_rank(), 4)))


def stages_of_a_target(case):
    """Held bytes after compile and after each backward and step of one accumulation window, and the protocol."""
    _, engine = start(case)
    optimizer = engine.optimizer
    seen = {"compile": held(gradient_counters(engine)), "registered": gradient_counters(engine)["registered"]}
    for micro_step in range(case.accumulation):
        backward(engine, 0, micro_step)
        seen[f"backward {micro_step}"] = held(gradient_counters(engine))
        if micro_step == case.accumulation - 1:
            group = optimizer.averaged_gradients[0]
            flat = group.flat_partition
            seen["partition"] = int(optimizer.partition_size[0])
            seen["flat"] = None if flat is None else (flat.dim(), flat.numel())
            storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in group}
            seen["bytes"] = sum(storages.values())
            seen["numel"] = sum(view.numel() for view in group)
            del group, flat
        engine.step()
    seen["step"] = held(gradient_counters(engine))
    seen["handed over after step"] = [entry for entry in optimizer.averaged_gradients.values() if entry is not None]
    engine.destroy()
    seen["optimizer attributes"] = [
        name for name in vars(optimizer) if "deepcompile" in name.lower() or "zero12" in name
    ]
    seen["optimizer is itself again"] = not is_attached(optimizer)
    return seen


def entries_as_in_the_base(case):
    """What code written for the base's own entries of ``averaged_gradients`` finds in those of this fork.

    Returns (names that an entry lacks, dtypes and devices of its tensors, elements of the flat partition that the
    base's step finds, or None, elements of a partition, bytes held when the base has released it, entries after a
    step).
    """
    _, engine = start(case)
    optimizer = engine.optimizer
    with default_dtype(torch.float64):
        backward(engine)
        entry = optimizer.averaged_gradients[0]
        kinds = {(tensor.dtype, tensor.device.type) for tensor in entry}
    names = [name for name in dir(GradPartitionBufferGroup([], torch.zeros(0))) if not name.startswith("_")]
    lacking = [name for name in [*names, "release_grad_buffers"] if not hasattr(entry, name)]
    flat = optimizer._get_preflattened_grad_partition(0)
    numel = None if flat is None else flat.numel()
    del flat, entry
    optimizer._release_preflattened_grad_buffers()
    released = held(gradient_counters(engine))
    optimizer.zero_grad()
    backward(engine, 1)
    engine.step()
    after_step = list(optimizer.averaged_gradients.values())
    engine.destroy()
    return lacking, kinds, numel, int(optimizer.partition_size[0]), released, after_step


ACTIVATION_NUMEL = 7919  # no other tensor has as many elements
live_activations = []


@torch.library.custom_op("deepcompile_tests::pass_on", mutates_args=())
def pass_on(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("deepcompile_tests::count_activations", mutates_args=())
def count_activations(gradient: torch.Tensor) -> torch.Tensor:
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    live_activations.append(sum(each.numel() == ACTIVATION_NUMEL for each in tensors))
    return gradient.clone()


for operator in (pass_on, count_activations):
    operator.register_fake(torch.empty_like)
pass_on.register_autograd(lambda _, gradient: count_activations(gradient))


class SeveralActivations(torch.nn.Module):
    """Has activations counted in the backward when all of those have been used that lie behind its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = pass_on(x * self.weight).expand(ACTIVATION_NUMEL)
        for _ in range(3):
            # Torch saves a cumulated sum rather than compute it again.
            x = x * x.cumsum(0) / ACTIVATION_NUMEL
        return x.mean()


def activations_behind_their_last_use(case):
    """How many activations live when a backward has used all of them, in each step."""
    live_activations.clear()
    _, engine = start(case, SeveralActivations().to(device()))
    for _ in range(3):
        engine.backward(engine(torch.ones(1, device=device())))
        engine.step()
    engine.destroy()
    return list(live_activations)


def binding_moments(case):
    """Bound bytes on this rank each time a block's input gradient has been computed, last block first."""
    bound = []

    class Watched(Model):
        def run_block(self, block, x):
            torch._dynamo.graph_break()
            if x.requires_grad:
                x.register_hook(lambda gradient: bound.append(gradient_counters(engine)["bound"]))
            return block(x)

    torch.manual_seed(0)
    _, engine = start(case, Watched(depth=4).to(device()))
    backward(engine)
    engine.step()
    bound.clear()
    backward(engine, 1)
    engine.step()
    engine.destroy()
    return bound


def release_by(how, case):
    """Held bytes after a backward and then after ``how``; then whether training goes on rightly."""
    module, engine = start(case)
    backward(engine)
    before = held(gradient_counters(engine))
    if how == "zero_grad":
        engine.optimizer.zero_grad()
        after = held(gradient_counters(engine))
        message = None
        try:
            engine.step()
        except RuntimeError as error:
            message = str(error)
        assert message and "found no gradients" in message, message
        engine.micro_steps += 1
        engine._running_engine_step = False
    elif how == "destroy":
        reducer = engine.optimizer._zero12.reducer
        engine.destroy()
        after = held(reducer.counters())
        after["registered"] = reducer.counters()["registered"]
        return before, after, 0.0
    backward(engine, 1)
    engine.step()
    plain = build(case)
    optimizer = make_optimizer(plain, case)
    plain(batch(1, 0, dist.get_rank(), 4)).backward()
    average_gradients(plain)
    optimizer.step()
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return before, after, error


class Raises(torch.autograd.Function):
    """Identity whose backward raises while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Raises.armed:
            raise ArithmeticError("half way through the backward")
        return gradient


def backward_that_raises(case, direct):
    """A backward raises after some gradients were reduced; returns what is held then, and the error afterwards."""

    class Fragile(Model):
        def run_block(self, block, x):
            return self.maybe_raise(block(x))

        @torch.compiler.disable
        def maybe_raise(self, x):
            return Raises.apply(x)

    torch.manual_seed(0)
    module = Fragile().to(device())
    plain = copy.deepcopy(module)
    _, engine = start(case, module)
    rank = dist.get_rank()

    def run_backward(step, micro_step=0):
        loss = engine(batch(step, micro_step, rank, 4))
        if direct:
            loss.backward()
        else:
            engine.backward(loss)

    Raises.armed = False
    for micro_step in range(case.accumulation - 1):
        run_backward(9, micro_step)
        engine.step()
    Raises.armed = True
    reset_gradient_counters(engine)
    raised = False
    try:
        run_backward(9, case.accumulation - 1)
    except ArithmeticError:
        raised = True
    received = gradient_counters(engine)["from_graphs"]
    # A device's thread drops the graph task, and with it what the backward left, a moment after the exception.
    deadline = time.monotonic() + 5
    while torch.cuda.is_available() and any(held(gradient_counters(engine)).values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    after = held(gradient_counters(engine))
    Raises.armed = False
    # The micro-batches before the one that raised were dropped with it: the next is the first of a step.
    optimizer = make_optimizer(plain, case)
    for step in range(2):
        for micro_step in range(case.accumulation):
            run_backward(step, micro_step)
            engine.step()
            (plain(batch(step, micro_step, rank, 4)) / case.accumulation).backward()
        average_gradients(plain)
        optimizer.step()
        optimizer.zero_grad()
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return raised, received, after, error


def two_engines_taking_turns(first, second):
    """Trains two engines step by step in turns; returns both errors against plain loops."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    pairs = []
    for seed, case in enumerate((first, second)):
        module = build(case, seed)
        plain = copy.deepcopy(module)
        pairs.append((case, module, make_engine(module, case), plain, make_optimizer(plain, case)))
    for step in range(4):
        for case, _, engine, plain, optimizer in pairs:
            for micro_step in range(case.accumulation):
                engine.backward(engine(batch(step, micro_step, rank, 4)))
                engine.step()
                (plain(batch(step, micro_step, rank, 4)) / case.accumulation).backward()
            average_gradients(plain)
            optimizer.step()
            optimizer.zero_grad()
    errors = [relative_error(module.parameters(), plain.parameters()) for _, module, _, plain, _ in pairs]
    for _, _, engine, _, _ in pairs:
        engine.destroy()
    return errors


def overlapping_windows(first, second):
    """The second engine trains between the first one's micro-batches."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    modules = [build(case, seed) for seed, case in enumerate((first, second))]
    plains = [copy.deepcopy(module) for module in modules]
    engines = [make_engine(module, case) for module, case in zip(modules, (first, second))]
    optimizers = [make_optimizer(plain, case) for plain, case in zip(plains, (first, second))]
    for step in range(3):
        for micro_step in range(first.accumulation):
            for index, case in enumerate((first, second)):
                engines[index].backward(engines[index](batch(step, micro_step, rank, 4)))
                engines[index].step()
                (plains[index](batch(step, micro_step, rank, 4)) / case.accumulation).backward()
                if micro_step == case.accumulation - 1 or case.accumulation == 1:
                    average_gradients(plains[index])
                    optimizers[index].step()
                    optimizers[index].zero_grad()
    errors = [relative_error(a.parameters(), b.parameters()) for a, b in zip(modules, plains)]
    for engine in engines:
        engine.destroy()
    return errors


class EqualMatrices(torch.nn.Module):
    """Eight matrices of 64 elements."""

    def __init__(self):
        super().__init__()
        self.matrices = torch.nn.ParameterList(torch.eye(8) for _ in range(8))

    def forward(self, ids):
        x = ids[:, :1] + torch.ones(1, 8, device=ids.device)
        for matrix in self.matrices:
            x = x @ matrix
        return x.square().mean()


def pending_bytes(case, equal=False):
    """(peak pending, bucket in bytes, largest gradient in bytes, bucket bytes after the backward)."""
    module, engine = start(case, EqualMatrices().to(device()) if equal else None)
    backward(engine)
    counters = gradient_counters(engine)
    engine.step()
    largest = max(parameter.nbytes for parameter in module.parameters())
    engine.destroy()
    return counters["peak_pending"], case.bucket * 4, largest, counters["bucket"]


class LargeMatrices(torch.nn.Module):
    """Three with as many elements as a bucket is sent with, and one four times as large, whose gradient is first."""

    def __init__(self):
        super().__init__()
        shapes = [(2**12, 2**13)] * 3 + [(2**13, 2**14)]
        with torch.device(device()):
            self.matrices = torch.nn.ParameterList(torch.full(shape, 2.0**-12) for shape in shapes)

    def forward(self, ids):
        x = ids[0, :1].to(self.matrices[0].dtype) + torch.ones(1, 2**12, device=ids.device, dtype=torch.bfloat16)
        there, back, again, last = self.matrices
        return (x @ there @ back.t() @ again @ last).square().mean()


def large_gradients(case):
    """(buckets sent, gradients of the smaller size pending at most)."""
    module, engine = start(case, LargeMatrices())
    backward(engine)
    counters = gradient_counters(engine)
    engine.destroy()
    return counters["buckets_sent"], counters["peak_pending"] / module.matrices[0].nbytes


def full_gradients(case):
    """Error of safe_get_full_grad() between backward and step against a plain loop's averaged gradients."""
    module, engine = start(case)
    plain = build(case)
    backward(engine)
    plain(batch(0, 0, dist.get_rank(), 4)).backward()
    average_gradients(plain)
    found = [safe_get_full_grad(parameter) for parameter in module.parameters()]
    error = relative_error(found, [parameter.grad for parameter in plain.parameters()])
    engine.step()
    engine.destroy()
    return error


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated_bytes(on_gpu):
    """Bytes in use: of the CUDA caching allocator, or of the C heap (which torch's CPU tensors come from)."""
    if on_gpu:
        return torch.cuda.memory_allocated()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def net_bytes_of_a_step(case):
    """(growth of allocated bytes over a whole step, growth up to its optimizer step, bytes of a partition)."""
    torch.manual_seed(0)
    module, engine = start(case, Model(width=256).to(device()))
    for step in range(3):
        backward(engine, step)
        engine.step()
    ids = batch(3, 0, dist.get_rank(), 4)
    dist.barrier()
    before = allocated_bytes(ids.is_cuda)
    loss = engine(ids)
    engine.backward(loss)
    del loss
    held_between = allocated_bytes(ids.is_cuda) - before
    partition = gradient_counters(engine)["bound"]
    engine.step()
    dist.barrier()
    net = allocated_bytes(ids.is_cuda) - before
    engine.destroy()
    return net, held_between, partition


def train_with_a_straggler(case, delay):
    """Each rank in turn starts its backward late, so that the others' collectives wait while they compute on."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    module = build(case)
    plain = copy.deepcopy(module)
    engine = make_engine(module, case)
    optimizer = make_optimizer(plain, case)
    waited = 0.0
    for step in range(case.steps):
        loss = engine(batch(step, 0, rank, 4))
        if step > 0 and rank == step % dist.get_world_size():
            time.sleep(delay)
        begun = time.monotonic()
        engine.backward(loss)
        if loss.is_cuda:
            # There the device waits and not the host.
            torch.cuda.synchronize()
        waited = max(waited, time.monotonic() - begun) if step > 0 else 0.0
        engine.step()
        plain(batch(step, 0, rank, 4)).backward()
        average_gradients(plain)
        optimizer.step()
        optimizer.zero_grad()
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error, waited


def without_synchronization(case):
    """no_sync() and coalesce_grad_reduction(): errors against a plain loop over the same batches."""
    errors = []
    for context in ("no_sync", "coalesce_grad_reduction"):
        if context == "no_sync" and case.stage == 2:
            continue  # the engine refuses it
        module, engine = start(case)
        plain = build(case)
        optimizer = make_optimizer(plain, case)
        rank = dist.get_rank()
        with getattr(engine, context)():
            for micro_step in range(2):
                backward(engine, 0, micro_step)
                kept = held(gradient_counters(engine))
                assert kept["bound"] == 0 and kept["unreduced"] > 0, kept
        if context == "no_sync":
            backward(engine, 0, 2)
        engine.step()
        for micro_step in range(3 if context == "no_sync" else 2):
            plain(batch(0, micro_step, rank, 4)).backward()
        average_gradients(plain)
        optimizer.step()
        errors.append(relative_error(module.parameters(), plain.parameters()))
        engine.destroy()
    return errors


def use_after_destroy(case):
    """Returns the message that a backward through a graph of a destroyed engine gives."""
    module, engine = start(case)
    backward(engine)
    engine.step()
    loss = engine(batch(1, 0, dist.get_rank(), 4))
    engine.destroy()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def again_after_destroy(case):
    """An engine made, destroyed and made again on the same module trains as a plain loop does."""
    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    rank = dist.get_rank()
    for life in range(2):
        engine = make_engine(module, case)
        optimizer = make_optimizer(plain, case)
        for step in range(2):
            engine.backward(engine(batch(step, life, rank, 4)))
            engine.step()
            plain(batch(step, life, rank, 4)).backward()
            average_gradients(plain)
            optimizer.step()
            optimizer.zero_grad()
        engine.destroy()
    return relative_error(module.parameters(), plain.parameters())


def taken_over(case):
    """Error of a module's parameters after a second engine was made for it while the first was not destroyed."""
    module, first = start(case)
    plain = build(case)
    optimizer = make_optimizer(plain, case)
    step_beside(first, plain, optimizer, 0)
    optimizer = make_optimizer(plain, case)
    second = make_engine(module, case)
    for step in range(1, 4):
        step_beside(second, plain, optimizer, step)
    error = relative_error(module.parameters(), plain.parameters())
    second.destroy()
    first.destroy()
    return error


def several_backwards(case):
    """Two losses with a backward each, then one backward of two forwards, before one step; all forwards come first."""
    module, engine = start(case)
    plain = build(case)
    optimizer = make_optimizer(plain, case)
    rank = dist.get_rank()
    losses = [engine(batch(0, number, rank, 4)) for number in range(4)]
    for number in range(2):
        engine.backward(losses[number])
        plain(batch(0, number, rank, 4)).backward()
    engine.backward(losses[2] + losses[3])
    (plain(batch(0, 2, rank, 4)) + plain(batch(0, 3, rank, 4))).backward()
    engine.step()
    average_gradients(plain)
    optimizer.step()
    error = relative_error(module.parameters(), plain.parameters())
    after = held(gradient_counters(engine))
    engine.destroy()
    return error, after


def step_beside(engine, plain, optimizer, step):
    """Trains an engine and a plain loop on the same batch for one step."""
    backward(engine, step)
    engine.step()
    plain(batch(step, 0, dist.get_rank(), 4)).backward()
    average_gradients(plain)
    optimizer.step()
    optimizer.zero_grad()


def polled_counters(case):
    """Trains while another thread reads the counters without pause; returns how often it read, and the error."""
    module, engine = start(case)
    plain = build(case)
    optimizer = make_optimizer(plain, case)
    reads, done = [0], threading.Event()

    def poll():
        while not done.is_set():
            gradient_counters(engine)
            reads[0] += 1

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        for step in range(10):
            step_beside(engine, plain, optimizer, step)
    finally:
        done.set()
        poller.join()
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return reads[0], error


def some_gradients_only(case):
    """torch.autograd.grad() for an activation, then a whole backward; and asking it for a parameter's gradient."""
    module, engine = start(case)
    plain = build(case)
    ids = batch(0, 0, dist.get_rank(), 4)
    seen = []
    hook = module.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    loss = engine(ids)
    hook.remove()
    torch.autograd.grad(loss, seen[0], retain_graph=True)
    engine.backward(loss, retain_graph=True)
    plain(ids).backward()
    average_gradients(plain)
    found = [safe_get_full_grad(parameter) for parameter in module.parameters()]
    error = relative_error(found, [parameter.grad for parameter in plain.parameters()])
    message = ""
    try:
        torch.autograd.grad(loss, module.head.weight)
    except RuntimeError as raised:
        message = str(raised)
    engine.destroy()
    return error, message


def hook_on_one_rank(case):
    """Rank 0 alone watches a gradient, as loggers do."""
    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    watched = []
    if dist.get_rank() == 0:
        module.blocks[1].up.weight.register_hook(lambda gradient: watched.append(gradient.norm()))
    _, engine = start(case, module)
    optimizer = make_optimizer(plain, case)
    for step in range(2):
        step_beside(engine, plain, optimizer, step)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return len(watched), error


def chunks_of_a_step(case):
    """(pieces of the fp32 gradient in steps 1 and 2, in step 0, error beside an engine that steps whole)."""
    trained, calls, default = [], [], chunked_step.CHUNK_NUMEL
    take = chunked_step.MasterGradient.take

    def taken(self, first, last):
        calls.append((numel, step))
        return take(self, first, last)

    chunked_step.MasterGradient.take = taken
    for numel in (50, default):
        chunked_step.CHUNK_NUMEL = numel
        try:
            module, engine = start(case)
            for step in range(3):
                backward(engine, step)
                engine.step()
            trained.append([safe_get_full_fp32_param(parameter).clone() for parameter in module.parameters()])
            engine.destroy()
        finally:
            chunked_step.CHUNK_NUMEL = default
    chunked_step.MasterGradient.take = take
    return sum(call[0] == 50 and call[1] > 0 for call in calls), calls.count((50, 0)), relative_error(*trained)


def swap_parameters(case):
    """Gives parameters other memory between steps, as code that averages weights does; the error of the training."""
    module, engine = start(case)
    plain = build(case)
    optimizer = make_optimizer(plain, case)
    for step in range(3):
        step_beside(engine, plain, optimizer, step)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    step_beside(engine, plain, optimizer, 3)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error


def synchronizations(case):
    """What torch says where the host waits for the device from a backward's beginning to the optimizer's step."""
    _, engine = start(case)
    inner, inner_step = engine.optimizer.optimizer, engine.optimizer.optimizer.step

    def stepped():
        torch.cuda.set_sync_debug_mode("default")
        return inner_step()

    # As a learning rate's schedule marks what it puts there: the partition is stepped in chunks all the same.
    stepped._wrapped_by_lr_sched = True
    inner.step = stepped
    waited = []
    for step in range(case.steps):
        for micro_step in range(case.accumulation):
            loss = engine(batch(step, micro_step, dist.get_rank(), 4))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                # Compiling, in the first steps, waits.
                torch.cuda.set_sync_debug_mode("warn" if step > 1 else "default")
                engine.backward(loss)
                engine.step()
                torch.cuda.set_sync_debug_mode("default")
            told = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
            waited += [f"{warning.filename}:{warning.lineno}" for warning in told]
    engine.destroy()
    return waited


def chunks_of_a_loaded_state(case):
    """Trains 2 steps, saves, and trains 2 more, there and in a new engine that loads; the largest difference."""
    default, chunked_step.CHUNK_NUMEL = chunked_step.CHUNK_NUMEL, 50
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    seen = []
    try:
        for loads in (False, True):
            module, engine = start(case)
            if loads:
                engine.load_checkpoint(folder[0], tag="two")
            for step in range(2 if loads else 0, 4):
                if step == 2 and not loads:
                    engine.save_checkpoint(folder[0], tag="two")
                backward(engine, step)
                engine.step()
            seen.append(
                [
                    read(parameter).clone()
                    for parameter in module.parameters()
                    for read in (
                        safe_get_full_fp32_param,
                        lambda parameter: safe_get_full_optimizer_state(parameter, "momentum_buffer"),
                    )
                ]
            )
            engine.destroy()
    finally:
        chunked_step.CHUNK_NUMEL = default
    return relative_error(*seen)

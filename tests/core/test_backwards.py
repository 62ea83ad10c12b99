# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Backwards that raise, that come several before a step, that are not reduced yet, and that are watched."""

import contextlib
import threading
import time
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.compile.zero_1_and_2 import gradient_counters, reset_gradient_counters
from deepspeed.compile.zero_1_and_2.step.partitions import StepOfGroups
from deepspeed.utils import safe_get_full_grad

from support.beside import Beside, check
from support.engines import CaseBeside
from support.faults import Injected, fragile, held_soon, in_backward, raise_injected, train_step
from support.graph_cache import compiled_anew
from support.ids import vary
from support.lifetime import alive_soon, backward, start
from support.on_ranks import on_ranks
from support.threads import meanwhile
from support.training import (
    BOUND,
    NOTHING,
    Case,
    average_gradients,
    batch,
    build,
    held,
    relative_error,
)


@pytest.mark.sanitized
@pytest.mark.parametrize("model", ["OneGraph", "OddSizes", "TiedEmbedding"])
@vary("stage", [1, 2])
@on_ranks(2)
def test_full_gradients_between_backward_and_step(stage, model):
    """safe_get_full_grad() would read a gradient at another place of the partition than where it was bound."""
    case = Case(stage=stage, model=model)
    pair, ids = Beside(build(case), case), batch(0, 0, dist.get_rank(), 4)
    pair.engine.backward(pair.engine(ids))
    pair.plain(ids).backward()
    average_gradients(pair.plain)
    found = [safe_get_full_grad(parameter) for parameter in pair.module.parameters()]
    error = relative_error(found, [parameter.grad for parameter in pair.plain.parameters()])
    pair.engine.step()
    pair.engine.destroy()
    assert error < BOUND


@pytest.mark.sanitized
@vary("swapped", ["all", "one"])
@vary("stage", [1, 2])
@on_ranks(2)
def test_parameters_that_were_given_other_memory(stage, swapped):
    """The step would write into memory that a parameter has left, also where others lie as the optimizer put them."""
    case = Case(stage=stage)
    pair = Beside(build(case), case)
    for step in range(3):
        pair.step(batch(step, 0, dist.get_rank(), 4))
        # As code that averages weights does.
        for parameter in [*pair.module.parameters()][: 1 if swapped == "one" else None]:
            parameter.data = parameter.data.clone()
    pair.step(batch(3, 0, dist.get_rank(), 4))
    check([pair.end()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there the host can run ahead")
@vary("regional", [False, True])
@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "check_grad_overflow"])
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 2)])
@on_ranks(2)
def test_the_host_waits_before_the_optimizer_only_to_agree(asked, regional, stage, accumulation):
    """A copy to the host between backward and optimizer would make the host wait for the device in every step."""
    config = {"bf16": {"check_grad_overflow": asked}, "compile": {"regional_compilation": regional}}
    _, engine = start(
        Case(stage=stage, accumulation=accumulation, backend="inductor", dtype="bf16", clipping=0.1, config=config)
    )
    run, waited = StepOfGroups.run, []

    def stepped(*args):
        torch.cuda.set_sync_debug_mode("default")
        return run(*args)

    for step in range(4):
        for micro_step in range(accumulation):
            loss = engine(batch(step, micro_step, dist.get_rank(), 4))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                # Compiling, in the first steps, waits.
                torch.cuda.set_sync_debug_mode("warn" if step > 1 else "default")
                engine.backward(loss)
                # Not in the optimizer, because an optimizer whose step() was replaced is not stepped in ranges.
                with mock.patch.object(StepOfGroups, "run", stepped):
                    engine.step()
                torch.cuda.set_sync_debug_mode("default")
            # Torch does not tell of the wait for an event, with which ranks agree in Reducer::agree_and_reduce_late().
            told = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
            waited += [f"{warning.filename}:{warning.lineno}" for warning in told]
    engine.destroy()
    assert bool(waited) == asked, waited


@pytest.mark.core
@pytest.mark.sanitized
# ZeRO-2 refuses no_sync().
@vary("stage, context", [(1, "no_sync"), (1, "coalesce_grad_reduction"), (2, "coalesce_grad_reduction")])
@on_ranks(2)
def test_gradients_kept_by_no_sync_and_coalescing(stage, context):
    """Gradients that the caller has kept from reduction would be reduced at once, or be lost at the step."""
    case = Case(stage=stage)
    pair = Beside(build(case), case)
    engine = pair.engine
    micro_batches = 3 if context == "no_sync" else 2
    with getattr(engine, context)():
        for micro_step in range(2):
            backward(engine, 0, micro_step)
            kept = held(gradient_counters(engine))
            assert kept["bound"] == 0 and kept["unreduced"] > 0, kept
    if context == "no_sync":
        backward(engine, 0, 2)
    engine.step()
    for micro_step in range(micro_batches):
        pair.plain(batch(0, micro_step, dist.get_rank(), 4)).backward()
    pair.step_plain()
    assert pair.last_error() < BOUND


@contextlib.contextmanager
def counters_polled(engine):
    """Within it another thread reads the counters without pause. Yields a list of how long each reading took."""
    seconds = []

    def poll():
        began = time.monotonic()
        gradient_counters(engine)
        reset_gradient_counters(engine)
        seconds.append(time.monotonic() - began)

    with meanwhile(poll):
        yield seconds


@pytest.mark.sanitized
@on_ranks(2)
def test_counters_may_be_read_from_another_thread():
    """Reading the counters would race with a thread that drops or reduces the gradients that are counted."""
    pair = CaseBeside(Case(bucket=50))
    engine = pair.engine
    with counters_polled(engine) as reads:
        for step in range(5):
            # The caller drops gradients that lie in `parameter.grad`, which the other thread is reading.
            with engine.no_sync():
                backward(engine, step)
            for parameter in pair.module.parameters():
                parameter.grad = None
            engine.zero_grad()
            pair.step(step)
    assert pair.last_error() < BOUND and len(reads) > 10


@pytest.mark.sanitized
@on_ranks(2)
def test_counters_do_not_wait_for_other_ranks():
    """The counters' lock would be held while the reducer waits for another rank, and so would a monitor's thread."""
    _, engine = start(Case(bucket=50))
    backward(engine)
    engine.step()
    with counters_polled(engine) as seconds:
        # Rank 1 begins its backward late.
        time.sleep(4 * dist.get_rank())
        backward(engine, 1)
    engine.step()
    engine.destroy()
    assert max(seconds) < 2


def _two_backwards(engine, case):
    """Runs the first of two backwards of a step. Returns its gradients, and the loss of the second, which raises."""
    module = engine.module
    loss = engine(batch(1, 1, dist.get_rank(), 4))
    backward(engine, 1)
    in_backward.happen = raise_injected
    if case.accumulation == 1:
        return engine.optimizer.averaged_gradients[0].targets(), loss
    engine.step()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None], loss


# Of the gradients of the first backward, some are bound and handed over, and those of two micro-batches unreduced.
@pytest.mark.sanitized
@pytest.mark.table
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 1)])
@on_ranks(2)
def test_a_backward_that_raised_leaves_nothing(stage, accumulation):
    """Gradients would be held until the engine is called again, or the caller take the wrong one for the last."""
    case = Case(stage=stage, accumulation=accumulation, bucket=50)
    pair = fragile(case)
    gradients, loss = _two_backwards(pair.engine, case)
    storages = [StorageWeakRef(gradient.untyped_storage()) for gradient in gradients]
    del gradients
    with contextlib.suppress(Injected):
        loss.backward()
    # Before the engine is called again.
    now, alive = held_soon(pair.engine), alive_soon(storages)
    is_boundary = pair.engine.is_gradient_accumulation_boundary()
    pair.step(2)
    assert pair.last_error() < BOUND
    assert now == NOTHING and alive == 0
    assert is_boundary == (accumulation == 1)


@pytest.mark.core
@on_ranks(2)
def test_a_backward_after_one_that_raised_without_a_forward_between():
    """DeepSpeed would take the backward for a part of the one that raised, and never end it."""
    pair = fragile(Case(stage=2, bucket=50))
    raises, loss = (pair.engine(batch(step, 0, dist.get_rank(), 4)) for step in (9, 0))
    in_backward.happen = raise_injected
    with pytest.raises(Injected):
        raises.backward()
    loss.backward()
    pair.engine.step()
    pair.train_plain(0)
    assert pair.last_error() < BOUND


@pytest.mark.sanitized
@vary("stage", [1, 2])
@on_ranks(2)
def test_a_backward_begins_while_another_is_dropped(stage):
    """The thread of a backward that raised would drop the gradients of the backward that has begun since."""
    case = Case(stage=stage, bucket=50)
    pair = fragile(case)
    told, may_go_on, names = threading.Event(), threading.Event(), []

    def stay():
        names.append(threading.current_thread().name)
        told.set()
        may_go_on.wait(30)

    def raise_in_backward():
        with contextlib.suppress(Injected):
            loss.backward()

    gradients, loss = _two_backwards(pair.engine, case)
    # The other thread stays long where it drops a gradient.
    weakref.finalize(gradients[0], stay)
    del gradients
    other = threading.Thread(target=raise_in_backward)
    other.start()
    assert told.wait(30) and in_backward.happen is None
    train_step(pair.engine, 2, case.accumulation)
    may_go_on.set()
    other.join()
    assert names != [threading.main_thread().name]
    pair.train_plain(2)
    assert pair.last_error() < BOUND


@vary("how", ["unreduced", "bound"])
@on_ranks(2)
def test_a_call_of_the_engine_as_a_gradient_ends(how):
    """A call of the engine from within its own dropping of gradients would wait for a lock that it holds itself."""
    case = Case(bucket=50)
    pair = Beside(build(case), case)
    module, engine, called = pair.module, pair.engine, []

    def call():
        engine.zero_grad()
        called.append(gradient_counters(engine)["unreduced"])

    with engine.no_sync() if how == "unreduced" else contextlib.nullcontext():
        backward(engine, 0)
    kept = engine.optimizer.averaged_gradients[0] if how == "bound" else [p.grad for p in module.parameters()]
    # A user has tied a call of the engine to the end of a gradient that the engine drops.
    weakref.finalize(next(value for value in kept if value is not None), call)
    del kept
    # Not zero_grad(), which empties `parameter.grad` by torch's own function first.
    engine.optimizer._deepcompile.backward.drop_step()
    assert called, "the gradient was not dropped"
    pair.step(batch(1, 0, dist.get_rank(), 4))
    check([pair.end()])


ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="numpy has no memory of a GPU")


@vary("memory", ["torch", pytest.param("numpy", marks=ON_CPU)])
@on_ranks(2)
def test_a_call_of_the_engine_as_a_gradient_is_taken(memory):
    """A call of the engine from within its own taking of a gradient would wait for a lock that it holds itself."""
    case = Case(bucket=50, accumulation=2)
    pair = Beside(build(case), case)
    weight, called = pair.module.head.weight, []

    def call():
        # As each forward of the engine does first.
        pair.engine.optimizer._deepcompile.reducer.follow_stream()
        called.append(True)

    pair.micro_batch(batch(0, 0, dist.get_rank(), 4))
    # A user has tied a call of the engine to the end of a gradient, or of its memory. The next backward takes it.
    if memory == "numpy":
        array = weight.grad.numpy().copy()
        weight.grad = torch.from_numpy(array)
        weakref.finalize(array, call)
        del array
    else:
        weakref.finalize(weight.grad, call)
    pair.micro_batch(batch(0, 1, dist.get_rank(), 4))
    pair.step_plain()
    assert called, "the gradient was not dropped"
    check([pair.end()])


@pytest.mark.sanitized
@on_ranks(2)
# A backward that torch compiles at its first call knows that the graph is retained, and one that is loaded does not.
@compiled_anew()
def test_a_request_for_some_gradients_reduces_no_others():
    """Graphs that torch.autograd.grad() runs for some gradients would reduce theirs, and return none."""
    # As traced: torch does not let Inductor's backward run twice, which donates the buffers that it has saved.
    case = Case(model="SeveralGraphs", backend="eager")
    module, engine = start(case)
    plain = build(case)
    ids = batch(0, 0, dist.get_rank(), 4)
    seen = []
    hook = module.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    loss = engine(ids)
    hook.remove()
    # For an activation.
    torch.autograd.grad(loss, seen[0], retain_graph=True)
    engine.backward(loss, retain_graph=True)
    expected = torch.autograd.grad(plain(ids), [plain.head.weight, plain.blocks[0].up.weight])
    plain(ids).backward()
    average_gradients(plain)
    found = [safe_get_full_grad(parameter) for parameter in module.parameters()]
    error = relative_error(found, [parameter.grad for parameter in plain.parameters()])
    returned = torch.autograd.grad(loss, [module.head.weight, module.blocks[0].up.weight])
    again = [safe_get_full_grad(parameter) for parameter in module.parameters()]
    engine.destroy()
    assert error < BOUND
    assert relative_error(returned, expected) < BOUND
    # What the step holds is none of grad()'s.
    assert relative_error(again, found) < BOUND

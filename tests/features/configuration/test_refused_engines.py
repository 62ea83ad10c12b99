# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Engines that are refused for what they are, or for when ``engine.compile()`` is called."""

import dataclasses
import os
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.linear import zero3_linear_wrap

from support.ids import vary
from support.on_ranks import on_ranks
from support.options import SMALL, TWICE_ROUNDED, outcome, prepare, train_prepared
from support.training import BOUND, Case, batch, build, make_engine, make_optimizer, step_plain, total_error


@pytest.mark.follows("call it before the first backward or after engine.step()")
@vary("dtype, accumulated_in", [("fp32", "fp32"), ("fp16", "fp32")])
@vary("stage", [1, 2])
@on_ranks(2)
def test_refused_with_gradients_of_an_unfinished_step(stage, dtype, accumulated_in):
    """Gradients that an engine has accumulated before it is compiled would be lost."""
    case = Case(
        model=SMALL,
        stage=stage,
        dtype=dtype,
        accumulation=2,
        config={"data_types": {"grad_accum_dtype": accumulated_in}},
    )
    rank, raised = torch.distributed.get_rank(), []
    module, engine = prepare(case)
    # In training mode the engine would compile itself before the first of them.
    engine.eval()
    plain = build(case)
    plain_optimizer = make_optimizer(plain, case)
    for step in range(2):
        for micro_step in range(case.accumulation):
            ids = batch(step, micro_step, rank, 4)
            engine.backward(engine(ids))
            if step == 0:
                raised.append(outcome(engine.compile, backend="eager"))
            engine.step()
            (plain(ids) / case.accumulation).backward()
        raised.append(outcome(engine.compile, backend="eager"))
        step_plain(plain, plain_optimizer)
    error = total_error(module.parameters(), plain.parameters())
    assert engine.is_deepcompile_active()
    engine.destroy()
    refused = (
        f"ValueError: DeepCompile with ZeRO stage {stage}: gradients computed before engine.compile() would be "
        "lost; call it before the first backward or after engine.step() at the gradient accumulation boundary"
    )
    assert raised == [refused, refused, None, None]
    assert error < TWICE_ROUNDED[dtype]


@pytest.mark.follows("give deepspeed.initialize() an optimizer")
@pytest.mark.quick
@on_ranks(1)
def test_an_engine_without_an_optimizer():
    """The engine of a reference model with the configuration of the trained one would be refused without a remedy."""
    case = Case(model=SMALL, deepcompile=False)
    said = outcome(make_engine, build(case), case, optimizer=None)
    assert said == (
        "AssertionError: zero stage 1 requires an optimizer; give deepspeed.initialize() an optimizer, or, for an "
        "engine that does not train, set zero_optimization.stage to 0"
    )
    at_stage_0 = dataclasses.replace(case, stage=0, config={"compile": {"deepcompile": True}})
    engine = make_engine(build(case), at_stage_0, optimizer=None)
    with torch.no_grad():
        assert engine(batch(0, 0, 0, 4)) > 0


# By the name under which docs/reference/options.md has them.
REFUSED_ENGINES = {
    "optimizer": (
        "muon",
        "optimizer torch.optim.Muon needs whole matrices, which it does not get from ZeRO; use DeepSpeed's own, "
        '"optimizer": {"type": "Muon"}',
    ),
    "tensor_parallel": (
        "tensor",
        "tensor_parallel.autotp_size=2 is only supported with the pass 'autotp'; set compile.passes to ['autotp']",
    ),
    "sequence_parallel_size": (
        "sequence",
        "a mesh has 2 ranks for a sequence, over which DeepSpeed reduces no gradients; give deepspeed.initialize() an "
        "mpu in its place, such as UlyssesSPAttentionHF.register_with_transformers() returns, or set compile.passes "
        "to ['autosp'] and use stage 1",
    ),
    "expert_parallel": (
        "marked experts",
        "parameters are marked as those of experts, and no layer of DeepSpeed's makes process groups for them; set "
        "compile.deepcompile to false",
    ),
    "compile.shard_parameters": (
        "experts",
        "compile.shard_parameters cannot shard experts, which have process groups of their own; leave it out",
    ),
    "pipeline": ("pipeline", "pipeline parallelism is not supported; set compile.deepcompile to false"),
}


@pytest.mark.follows("cannot shard experts, which have process groups of their own; leave it out")
@pytest.mark.follows("makes process groups for them; set compile.deepcompile to false")
@pytest.mark.follows(
    "pipeline parallelism is not supported; set compile.deepcompile to false",
    "set compile.passes to ['autotp']",
    "set compile.passes to ['autosp'] and use stage 1",
)
# The mesh and process groups of experts last as long as the process.
@on_ranks(2, stop=True)
def test_refused_engines():
    """Parameters that ranks share otherwise than in data parallelism would be averaged over the wrong ranks."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.utils import groups

    def raised(module, parameters=None, optimizer=torch.optim.SGD, mesh=None, advised=None, **config):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "compile": {"deepcompile": True},
            **config,
        }
        optimizer = optimizer(parameters or module.parameters(), lr=0.1)
        before = held(module, optimizer)
        said = outcome(deepspeed.initialize, model=module, optimizer=optimizer, config=config, mesh_param=mesh)
        assert held(module, optimizer) == before
        if advised is not None:
            # The same module and optimizer, as the refusal advises.
            config["compile"] = advised
            deepspeed.initialize(model=module, optimizer=optimizer, config=config, mesh_param=mesh)[0].destroy()
        return said

    def held(module, optimizer):
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [
            (id(parameter), parameter.data_ptr(), parameter.shape, parameter.dtype)
            for parameter in [*module.parameters(), *given]
        ]

    off = {"deepcompile": False}
    said = {"muon": raised(torch.nn.Linear(4, 4, bias=False), optimizer=torch.optim.Muon)}
    # From here on, process groups stay behind; in this order they do not stand in each other's way.
    said["sequence"] = raised(torch.nn.Linear(4, 4), mesh=(1, 2), advised={"deepcompile": True, "passes": ["autosp"]})
    groups.mesh_device = None
    experts = torch.nn.Sequential(torch.nn.Linear(4, 4), MoE(4, torch.nn.Linear(4, 4), num_experts=2, ep_size=1))
    named = {"params": list(experts.parameters()), "name": "all"}
    sharded = {"deepcompile": True, "shard_parameters": "all"}
    groups_of_experts = split_params_into_different_moe_groups_for_optimizer(named)
    said["experts"] = raised(experts, groups_of_experts, compile=sharded, advised={"deepcompile": True})
    # Experts of one's own, marked as those of DeepSpeed's layers are.
    marked = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for parameter in marked[1].parameters():
        parameter.allreduce, parameter.group_name = False, "ep_size_1"
    named = {"params": list(marked.parameters()), "name": "all"}
    said["marked experts"] = raised(marked, split_params_into_different_moe_groups_for_optimizer(named), advised=off)
    sharded = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    specs = [
        {"patterns": [r".*0\.weight$"], "partition_type": "column"},
        {"patterns": [r".*1\.weight$"], "partition_type": "row"},
    ]
    partition = {"use_default_specs": False, "layer_specs": specs}
    said["tensor"] = raised(
        sharded,
        tensor_parallel={"autotp_size": 2, "partition_config": partition},
        advised={"deepcompile": True, "passes": ["autotp"]},
    )
    layers = [LayerSpec(torch.nn.Linear, 4, 4), LayerSpec(torch.nn.Linear, 4, 4)]
    pipeline = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    said["pipeline"] = raised(pipeline, advised=off)
    says = "ValueError: DeepCompile with ZeRO stage 1: "
    assert said == {kind: says + text for kind, text in REFUSED_ENGINES.values()}


def train_model_of_zero_init(enabled):
    """Returns what an engine raises, or the error of training it, whose model is made within zero.Init()."""
    case = Case(model=SMALL)
    with deepspeed.zero.Init(enabled=enabled):
        module = build(case)
    before = [(parameter.data_ptr(), parameter.shape) for parameter in module.parameters()]
    try:
        started = prepare(case, module)
    except ValueError as error:
        assert [(parameter.data_ptr(), parameter.shape) for parameter in module.parameters()] == before
        return str(error)
    started.engine.compile(backend="eager")
    return train_prepared(case, *started)


@pytest.mark.follows("which is for stage 3; make the model without it")
@on_ranks(2)
def test_a_model_of_zero_init():
    """Parameters of stage 3, which are empty between uses, would be stepped as what they are."""
    # zero.Init() replaces the function for the life of a process. A program without it has torch's own.
    with mock.patch.object(torch.nn.functional, "linear", torch.nn.functional.linear):
        said = train_model_of_zero_init(True)
    assert said.startswith("DeepCompile with ZeRO stage 1: parameter ")
    assert said.endswith("is partitioned by deepspeed.zero.Init(), which is for stage 3; make the model without it")
    # As advised.
    assert train_model_of_zero_init(False) < BOUND


def with_linear_of_zero_3(case, release, advised=False):
    """Compiles an engine where ZeRO-3 has replaced ``linear``; returns what it raises under this release of torch.

    If it raises nothing, returns the error of training. ``advised``: whether the caller puts ``linear`` back then.
    """
    assert torch.nn.functional.linear.__name__ == "linear", "the replacement of an earlier call stayed"
    torch.nn.functional.linear = zero3_linear_wrap
    started = prepare(case)
    with mock.patch.object(torch, "__version__", release):
        raised = outcome(started.engine.compile, backend="eager")
        if advised:
            assert raised
            torch.nn.functional.linear = torch._C._nn.linear
            raised = outcome(started.engine.compile, backend="eager")
    return raised or train_prepared(case, *started)


@pytest.mark.follows("or torch.nn.functional.linear to torch._C._nn.linear before this one compiles")
def test_linear_that_zero_3_has_replaced(ranks):
    """A torch that compiles ZeRO-3's linear wrongly would train on wrong gradients."""
    case = Case(model=SMALL)
    (raised,) = ranks(1).run(with_linear_of_zero_3, case, "2.11.0")
    assert "has replaced torch.nn.functional.linear" in raised and "memory_efficient_linear" in raised
    (error,) = ranks(1).run(with_linear_of_zero_3, case, "2.11.0", advised=True)
    assert error < BOUND
    if TorchVersion(torch.__version__) >= "2.13":
        (error,) = ranks(1).run(with_linear_of_zero_3, case, torch.__version__)
        assert error < BOUND


@on_ranks(1)
def test_ranks_compare_errors_on_their_own_devices():
    """NCCL refuses tensors of another device, so programs that leave their device to DeepSpeed would not start."""
    # An engine as of a program that sets no device, and the first call of each kind, in order.
    calls, accelerator = [], get_accelerator()

    def noted(function):
        def call(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(accelerator, "set_device", noted(accelerator.set_device)),
        mock.patch.object(torch.distributed, "all_gather_object", noted(torch.distributed.all_gather_object)),
    ):
        case = Case(model=SMALL)
        make_engine(build(case), case).destroy()
    assert list(dict.fromkeys(calls)) == ["set_device", "all_gather_object"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: ranks that share one have no other device")
@on_ranks(2)
def test_a_program_that_does_not_set_its_device():
    """Without ``torch.cuda.set_device()`` all ranks begin on the first GPU."""
    before = torch.cuda.current_device()
    torch.cuda.set_device(torch.distributed.get_world_size() - 1 - torch.distributed.get_rank())
    case = Case(model=SMALL)
    with mock.patch.dict(os.environ, LOCAL_RANK=str(before)):
        engine = make_engine(build(case).cuda(before), case)
    engine.destroy()
    assert torch.cuda.current_device() == before

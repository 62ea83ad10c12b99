# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How the compared systems train, behind the same few calls: DeepSpeed's ZeRO, and PyTorch's FSDP2 and DDP."""

import importlib
import importlib.util
import itertools
from collections.abc import Iterable
from typing import Protocol

import torch

from .recorder import data, record
from .settings import Settings

# The norm to which all systems clip gradients.
CLIPPING = 1.0
# This fork's module of gradient counters. The base has no such module.
COUNTERS_MODULE = "deepspeed.compile.zero_1_and_2"
_CHUNKED = {"on": True, "off": False, "size": None}


class System(Protocol):
    """A model with its optimizer. For every micro-batch: ``forward``, ``backward``, ``step``.

    ``boundary`` says whether the micro-batch is the last one before an optimizer step.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the loss, a tensor [], of predicting each next token of ``ids``, int64 [micro_batch, seq]."""

    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        """Adds the micro-batch's share of the gradients."""

    def step(self, boundary: bool) -> None:
        """At a boundary: clips the gradients, steps the optimizer, and drops the gradients."""

    def tensors(self) -> record.Tensors:
        """Returns the tensors that hold memory between steps, by category."""

    def counters(self) -> dict[str, int] | None:
        """Returns what the system itself counted of its gradients, mostly in bytes; None if it does not count."""

    def reset_counters(self) -> None:
        """Restarts the peaks among the counters from the current bytes."""


def make_system(settings: Settings, model: torch.nn.Module) -> System:
    """Returns the system that ``settings`` names. The caller must not use ``model`` by itself from then on."""
    if settings.is_fsdp2:
        return FSDP2(settings, model)
    return (DDP if settings.system == "ddp" else DeepSpeed)(settings, model)


def is_fork() -> bool:
    """Whether the installed DeepSpeed is this fork."""
    return importlib.util.find_spec(COUNTERS_MODULE) is not None


def _optimizer(settings: Settings, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if settings.states and settings.is_fsdp2:
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters, lr=settings.learning_rate)
    if settings.states and settings.system == "zero":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, lr=settings.learning_rate)
    if not settings.offload:
        return torch.optim.AdamW(parameters, lr=settings.learning_rate, **{settings.adam: True})
    if settings.is_fsdp2:
        return torch.optim.AdamW(parameters, lr=settings.learning_rate, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # Its default of the weight decay is another one.
    return DeepSpeedCPUAdam(parameters, lr=settings.learning_rate, weight_decay=0.01)


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return record.flattened([list(state.values()) for state in optimizer.state.values()])


class DeepSpeed:
    """Whichever DeepSpeed is installed, with DeepCompile or without."""

    def __init__(self, settings: Settings, model: torch.nn.Module):
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        budget = settings.activation_budget
        in_engine = settings.states is not None and settings.system == "deepcompile"
        muon = settings.optimizer == "muon"
        if settings.model_on != "device" and settings.system == "deepcompile":
            # Engines of models on the host may compile themselves.
            get_accelerator().set_compile_backend(settings.backend)
        params = {"muon_lr": settings.learning_rate, "adam_lr": settings.learning_rate}
        self._engine = deepspeed.initialize(
            model=model,
            model_parameters=_trained(model) if muon else None,
            optimizer=None if muon else _optimizer(settings, _trained(model)),
            config={
                "train_micro_batch_size_per_gpu": settings.micro_batch,
                "gradient_accumulation_steps": settings.accumulation,
                "gradient_clipping": 0.0 if muon else CLIPPING,
                **({"optimizer": {"type": "Muon", "params": params}} if muon else {}),
                "bf16": {"enabled": settings.dtype == "bf16"},
                "zero_optimization": {
                    "stage": settings.stage,
                    "reduce_bucket_size": settings.bucket,
                    "overlap_comm": True,
                    **({"offload_optimizer": {"device": "cpu"}} if settings.offload else {}),
                },
                "compile": {
                    "deepcompile": settings.system == "deepcompile",
                    # The base does not know these options, so they are there only where they are asked for.
                    **({"regional_compilation": False} if settings.one_graph else {}),
                    **({"shard_parameters": settings.shard} if settings.shard else {}),
                    **({"keep_gathered": settings.keep} if settings.keep is not None else {}),
                    **({} if settings.overlap_gather is None else {"overlap_param_gather": settings.overlap_gather}),
                    **({} if settings.copy_engines is None else {"copy_engines": settings.copy_engines}),
                    **({"chunked_loss": _CHUNKED[settings.chunked_loss]} if settings.chunked_loss else {}),
                    **({"activation_memory_budget": budget} if budget is not None else {}),
                    **({"optimizer_states": settings.states} if in_engine else {}),
                    **({"store_param_remainders": True} if settings.remainders else {}),
                },
                "zero_allow_untested_optimizer": True,
                "log_level": "warning",
            },
        )[0]
        self._counting = None  # the module of counters, if this engine counts
        if settings.system == "deepcompile":
            self._engine.compile(backend=settings.backend)
            if is_fork():
                self._counting = importlib.import_module(COUNTERS_MODULE)

    def forward(self, ids):
        return self._engine(input_ids=ids, labels=ids).loss

    def backward(self, loss, boundary):
        self._engine.backward(loss)

    def step(self, boundary):
        self._engine.step()

    def tensors(self):
        optimizer = self._engine.optimizer
        if self._engine.zero_optimization_stage() == 3:
            shards = [parameter.ds_tensor for parameter in self._engine.module.parameters()]
            masters = record.flattened(optimizer.fp32_partitioned_groups_flat)
            return {data.PARAMETERS: shards, data.OPTIMIZER_STATES: [*masters, *_states(optimizer.optimizer)]}
        gradients = [group for group in optimizer.averaged_gradients.values() if isinstance(group, (list, tuple))]
        parts = optimizer._deepcompile.features if self._counting else []
        # Partitions of parameters, and remainders, which are the other half of a parameter's master weight.
        shares = [*getattr(optimizer, "own_partitions", {}).values()]
        shares += [share for part in parts for share in getattr(part, "shares", ())]
        parameters = [*optimizer.bit16_groups_flat, *self._engine.module.parameters(), *shares]
        return {
            data.PARAMETERS: record.flattened(parameters),
            data.OPTIMIZER_STATES: [
                *record.flattened(optimizer.single_partition_of_fp32_groups),
                *_states(optimizer.optimizer),
            ],
            data.TARGETS: record.flattened(gradients),
        }

    def counters(self):
        return self._counting.gradient_counters(self._engine) if self._counting else None

    def reset_counters(self):
        if self._counting:
            self._counting.reset_gradient_counters(self._engine)


class FSDP2:
    """``fully_shard`` on every block, with every block compiled, as PyTorch's own training code does.

    "fsdp2-kept" keeps parameters from the first forward of a step to its last backward, so that each is gathered once
    a step, as ZeRO-1 and ZeRO-2 do. The others drop a block's parameters behind each forward and each backward, which
    is FSDP2's default. They keep norm and head, which the backward needs first, as torchtitan does.

    Gradients are reduced in ``settings.dtype``, and by "fsdp2-fp32-reduce" in fp32: once a step if ``settings.stage``
    is 1, and in every micro-batch if it is 2. With ``settings.float8_gather``, one all-reduce after each step computes
    the scales of all weights.
    """

    def __init__(self, settings: Settings, model: torch.nn.Module):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        self._model, self._accumulation = model, settings.accumulation
        self._reduces_always, self._gathers_float8 = settings.stage == 2, settings.float8_gather
        self._vocabulary = model.config.vocab_size
        self._reshards = settings.system != "fsdp2-kept"
        precision = MixedPrecisionPolicy()
        if settings.dtype == "bf16":
            reduced = torch.float32 if settings.system == "fsdp2-fp32-reduce" else torch.bfloat16
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        offload = CPUOffloadPolicy() if settings.offload else OffloadPolicy()
        device_type = next(model.parameters()).device.type
        mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))

        def shard(*modules, reshard=self._reshards):
            # The shards are the fp32 master weights. They start from the same bf16 values as ZeRO's master weights.
            for parameter in itertools.chain.from_iterable(module.parameters() for module in modules):
                # What was sharded before is fp32 already.
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    parameter.data = parameter.data.float()
            fully_shard(
                list(modules),
                mesh=mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshard,
            )

        backend = _torch_backend(settings.backend)
        for block in model.model.layers:
            block.compile(backend=backend)
            shard(block)
        if not model.config.tie_word_embeddings:
            shard(model.model.embed_tokens)
            # Tiles of the loss use the head's weight, and do not call the head, which would gather it.
            if not settings.loss_tiles:
                shard(model.model.norm, model.lm_head, reshard=False)
        # What no call above has sharded belongs to the root: tied embeddings and the norm.
        shard(model, reshard=False)
        self._loss = torch.compile(model.loss_function, backend=backend)
        self._tiles = settings.loss_tiles
        self._optimizer = _optimizer(settings, _trained(model))

    def forward(self, ids):
        if self._tiles:
            return self._model(input_ids=ids, labels=ids).loss
        return self._loss(logits=self._model(input_ids=ids).logits, labels=ids, vocab_size=self._vocabulary)

    def backward(self, loss, boundary):
        self._model.set_requires_gradient_sync(boundary or self._reduces_always)
        self._model.set_reshard_after_backward(boundary or self._reshards)
        (loss / self._accumulation).backward()

    def step(self, boundary):
        if boundary:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIPPING)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if self._gathers_float8:
                from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

                precompute_float8_dynamic_scale_for_fsdp(self._model)

    def tensors(self):
        # The sharded parameters are the master weights. A shard that is gathered in float8 wraps the tensor in memory.
        shards = [getattr(shard, "_tensor", shard) for shard in record.flattened(self._model.parameters())]
        return {data.OPTIMIZER_STATES: [*shards, *_states(self._optimizer)]}

    def counters(self):
        return None

    def reset_counters(self):
        pass


class DDP(FSDP2):
    """``DistributedDataParallel`` around a model of which every block is compiled. All ranks step all parameters."""

    def __init__(self, settings: Settings, model: torch.nn.Module):
        backend = _torch_backend(settings.backend)
        for block in model.model.layers:
            block.compile(backend=backend)
        self._vocabulary, self._gathers_float8, self._tiles = model.config.vocab_size, False, None
        self._model = torch.nn.parallel.DistributedDataParallel(model)
        self._loss = torch.compile(model.loss_function, backend=backend)
        self._optimizer = _optimizer(settings, model.parameters())

    def backward(self, loss, boundary):
        loss.backward()


def _torch_backend(backend: str) -> str:
    """Returns torch's name of a backend. DeepCompile's "eager" runs traced graphs, which torch calls "aot_eager"."""
    return "aot_eager" if backend == "eager" else backend

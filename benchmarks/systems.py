# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The systems under comparison, behind the same few calls: DeepSpeed's ZeRO and PyTorch's FSDP2.

    forward(ids) -> loss      backward(loss, boundary)      step(boundary)

``boundary``: whether this is the last micro-batch before an optimizer step. Each call is made for every micro-batch.
"""

import torch

SYSTEMS = ("deepcompile", "zero", "fsdp2")
CLIPPING = 1.0


def make_system(run, model):
    """Wraps ``model`` as ``run.system`` says; ``model`` is not to be used by itself from then on."""
    return FSDP2(run, model) if run.system == "fsdp2" else DeepSpeed(run, model)


def _optimizer(run, parameters):
    return torch.optim.AdamW(parameters, lr=run.learning_rate, **{run.adam: True})


class DeepSpeed:
    """Whichever DeepSpeed is installed, with DeepCompile or without."""

    def __init__(self, run, model):
        import deepspeed

        self._engine = deepspeed.initialize(
            model=model,
            optimizer=_optimizer(run, model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": run.micro_batch,
                "gradient_accumulation_steps": run.accumulation,
                "gradient_clipping": CLIPPING,
                "bf16": {"enabled": run.dtype == "bf16"},
                "zero_optimization": {"stage": run.stage, "reduce_bucket_size": run.bucket, "overlap_comm": True},
                "compile": {
                    "deepcompile": run.system == "deepcompile",
                    # The base does not know these.
                    **({"regional_compilation": False} if run.one_graph else {}),
                    **({"overlap_param_gather": True} if run.overlap_gather else {}),
                },
                "zero_allow_untested_optimizer": True,
                "log_level": "warning",
            },
        )[0]
        if run.system == "deepcompile":
            self._engine.compile(backend=run.backend)
        try:
            from deepspeed.compile import zero12
        except ImportError:
            # The base keeps no count of what it holds.
            zero12 = None
        self._counts = zero12 if run.system == "deepcompile" else None

    def forward(self, ids):
        return self._engine(input_ids=ids, labels=ids).loss

    def backward(self, loss, boundary):
        self._engine.backward(loss)

    def step(self, boundary):
        self._engine.step()

    def standing_gradients(self):
        """Lists tensors that hold gradients between steps."""
        groups = self._engine.optimizer.averaged_gradients.values()
        return [gradient for group in groups for gradient in group or () if torch.is_tensor(gradient)]

    def counters(self):
        """What the reducer says it holds and held, in bytes, or None if it does not say."""
        return self._counts.gradient_counters(self._engine) if self._counts else None

    def reset_counters(self):
        if self._counts:
            self._counts.reset_gradient_counters(self._engine)


class FSDP2:
    """``fully_shard`` on every block, with every block compiled, as PyTorch's own training code does.

    Parameters are kept from the first forward of a step to its last backward, so that each is gathered once a step, as
    ZeRO-1 and ZeRO-2 do. Gradients are reduced in bf16, and once a step too, unless ``run.stage`` is 2.
    """

    def __init__(self, run, model):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._model, self._accumulation = model, run.accumulation
        self._reduces_always = run.stage == 2
        self._vocabulary = model.config.vocab_size
        precision = MixedPrecisionPolicy()
        if run.dtype == "bf16":
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        device_type = next(model.parameters()).device.type
        mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))

        def shard(*modules):
            # The shards are the master weights, in fp32; they begin at the same values as ZeRO's.
            for module in modules:
                module.float()
            fully_shard(list(modules), mesh=mesh, mp_policy=precision, reshard_after_forward=False)

        backend = _torch_backend(run.backend)
        for block in model.model.layers:
            block.compile(backend=backend)
            shard(block)
        if not model.config.tie_word_embeddings:
            shard(model.model.embed_tokens)
            shard(model.model.norm, model.lm_head)
        # Tied, these belong to the root, with the norm.
        shard(model)
        self._loss = torch.compile(model.loss_function, backend=backend)
        self._optimizer = _optimizer(run, model.parameters())

    def forward(self, ids):
        return self._loss(logits=self._model(input_ids=ids).logits, labels=ids, vocab_size=self._vocabulary)

    def backward(self, loss, boundary):
        self._model.set_requires_gradient_sync(boundary or self._reduces_always)
        self._model.set_reshard_after_backward(boundary)
        (loss / self._accumulation).backward()

    def step(self, boundary):
        if boundary:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIPPING)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def standing_gradients(self):
        return []

    def counters(self):
        return None

    def reset_counters(self):
        """There are none."""


def _torch_backend(backend):
    """DeepCompile's "eager" runs traced graphs, for which torch's own name is "aot_eager"."""
    return "aot_eager" if backend == "eager" else backend

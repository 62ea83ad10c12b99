# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How many bytes of gradients a rank holds, with DeepCompile and without it."""

import sys

import torch

from deepspeed.accelerator import get_accelerator


def storage_bytes(tensors):
    """Bytes of the distinct storages behind tensors: views of one buffer keep all of it, and count once."""
    storages = {}
    for tensor in tensors:
        if torch.is_tensor(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def tensors_of_eager_zero(engine):
    """Lists every tensor in which the ZeRO-1/2 optimizer of the base keeps gradients."""
    optimizer = engine.optimizer
    tensors = []
    for parameter in engine.module.parameters():
        tensors += [parameter.grad, getattr(parameter, "grad_accum", None)]
    for bucket in optimizer.ipg_buckets.values():
        tensors += bucket.buffer + bucket.grads
    for groups in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in groups.values():
            tensors += group or []
    return tensors


class GradientWatch:
    """Notes a rank's gradient bytes at named moments.

    Eager ZeRO: counted from the tensors themselves. The peak is the highest count at the moments at which autograd has
    produced a gradient. It leaves out what lives only in between, so it is a lower bound.

    DeepCompile: what the reducer counts at every allocation, and gradients that lie elsewhere. The peaks of its
    counters need not fall together, and what is pending may lie in a bucket, so their sum is an upper bound. It leaves
    out what a compiled graph has not handed to the reducer yet; on a GPU the allocator's figures hold that too.

    Attributes:
        engine: the engine to watch; None until it exists.
        bytes: moment -> bytes.
    """

    def __init__(self, model, deepcompile):
        self.engine = None
        self.bytes = {}
        self._deepcompile = deepcompile
        self._peak = None
        if not deepcompile:
            # Registered before DeepSpeed's own hooks, these run while a gradient is both in `grad` and in no bucket.
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(self._sample)

    def _sample(self, _parameter):
        if self._peak is not None:
            self._peak = max(self._peak, self._held())

    def _counters(self):
        from deepspeed.compile.zero_1_and_2 import gradient_counters

        return gradient_counters(self.engine)

    def _held(self):
        if not self._deepcompile:
            return storage_bytes(tensors_of_eager_zero(self.engine))
        # Between backwards nothing is pending, so that no bucket's memory is counted twice.
        counters = self._counters()
        elsewhere = storage_bytes(parameter.grad for parameter in self.engine.module.parameters())
        return counters["bound"] + counters["bucket"] + counters["unreduced"] + counters["pending"] + elsewhere

    def start_peak(self):
        """Restarts the peak from the current bytes."""
        self._peak = 0
        if self._deepcompile:
            from deepspeed.compile.zero_1_and_2 import reset_gradient_counters

            reset_gradient_counters(self.engine)

    def note(self, moment):
        """Notes the current bytes."""
        self.bytes[moment] = self._held()

    def note_peak(self, moment):
        """Notes the most that was held since ``start_peak()``."""
        if not self._deepcompile:
            self.bytes[moment] = max(self._peak, self._held())
            return
        counters = self._counters()
        peaks = ("peak_bound", "peak_bucket", "peak_pending", "peak_unreduced")
        self.bytes[moment] = sum(counters[name] for name in peaks)


class MemoryWatch:
    """Notes a GPU's allocated bytes after each phase of a step, and the peak in it. Does nothing without a GPU."""

    def __init__(self):
        self.bytes = {}
        self._gpu = get_accelerator().device_name() == "cuda"

    def start(self):
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def note(self, phase):
        if self._gpu:
            torch.cuda.synchronize()
            # Torch's allocator does not count memory that DeepCompile's ranks map, such as that of parameters.
            deepcompile = sys.modules.get("deepspeed.compile.zero_1_and_2")
            uncounted = deepcompile.mapped_memory.nbytes if deepcompile else 0
            self.bytes[f"peak of the {phase}"] = torch.cuda.max_memory_allocated() + uncounted
            self.bytes[f"after the {phase}"] = torch.cuda.memory_allocated() + uncounted
            torch.cuda.reset_peak_memory_stats()

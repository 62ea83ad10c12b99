# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The section ``compile`` of ``ds_config``. ``docs/options.md`` says what each option does under ZeRO-1 and ZeRO-2."""

from typing import List, Literal, Optional, Union

from pydantic import model_validator

from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class CompileConfig(DeepSpeedConfigModel):
    """Settings of ``engine.compile()``. What only one ZeRO stage or pass reads is under its name."""

    deepcompile: bool = False
    """Whether DeepSpeed's passes rewrite the graphs; without them, ``engine.compile()`` is ``torch.compile``. With
    them and ZeRO-1 or ZeRO-2, an engine compiles itself before its first training forward."""

    passes: Optional[List[Literal["z1", "z3", "autosp", "autotp"]]] = None
    """Which passes; by default the one of the ZeRO stage."""

    debug_log: bool = False
    """Whether rewritten graphs are logged."""

    autoep_non_moe: bool = False
    """Without DeepCompile: whether to compile what surrounds automatic expert parallelism's layers, and not these."""

    # ZeRO-1 and ZeRO-2

    regional_compilation: Union[bool, List[str], None] = None
    """Whether each repeated block of the model becomes a graph of its own, compiled once for all its layers. A list
    names the blocks by their classes instead of finding them. By default so where blocks are found that are alike and
    that a module inside of the model calls, of whose parameters they have most, as in language models of
    transformers."""

    overlap_param_gather: bool = False
    """Off by default, because code that reads a parameter between a step and the next forward must first call
    ``deepspeed.compile.parameter_gather.wait_for_parameters(engine)``. Whether the next forward begins while updated
    parameters are still being gathered, each block waiting for its own. Needs regional compilation."""

    # ZeRO-1, ZeRO-2 and ZeRO-3

    double_buffer: bool = True
    """Whether gradients may be sent while others are computed."""

    sync_before_reduce: bool = False
    """Whether to wait for the device before gradients are sent, to find errors."""

    sync_after_reduce: bool = False
    """Whether to wait for the device after gradients were sent, to find errors."""

    # ZeRO-3

    sync_before_allgather: bool = False
    """Whether to wait for the device before parameters are gathered, to find errors."""

    sync_after_allgather: bool = False
    """Whether to wait for the device after parameters were gathered, to find errors."""

    symmetric_memory: bool = False
    """Whether parameters are gathered through symmetric memory."""

    free_activation: bool = False
    """Whether activations are freed in the backward as soon as they were used for the last time."""

    free_activation_threshold: int = 10 * 2**20
    """Bytes from which on an activation is freed so."""

    offload_activation: bool = False
    """Whether activations wait for the backward in host memory: those of fixed shape from 5 MB on, as many as the
    memory budget demands. Excludes ``offload_parameters`` and ``offload_opt_states``."""

    offload_activation_pin_memory: bool = True
    """Whether that memory is pinned, which transfers at full speed need and small limits of locked memory forbid."""

    offload_opt_states: bool = False
    """Whether the optimizer's states wait for the step in host memory, as far as the memory budget demands. They make
    the way there and back in every micro-batch, so it is meant for accumulation 1. Excludes ``offload_parameters``."""

    offload_parameters: bool = False
    """Whether parameters wait for their use in host memory."""

    keep_int_input_tensors: bool = True
    """Whether graphs are profiled with the integers that they were given rather than with made-up ones."""

    keep_all_input_tensors: bool = False
    """The same for all inputs."""

    @model_validator(mode="after")
    def _regions_belong_to_zero_1_and_2(self):
        if self.regional_compilation == []:
            raise ValueError("compile.regional_compilation names no classes; name some, or set it to true or false")
        for name in ("regional_compilation", "overlap_param_gather"):
            if getattr(self, name) and not self.deepcompile:
                raise ValueError(
                    f"compile.{name} belongs to DeepCompile; set compile.deepcompile to true or leave it out"
                )
            if getattr(self, name) and set(self.passes or ()) - {"z1"}:
                raise ValueError(
                    f"compile.{name} goes with ZeRO-1 and ZeRO-2 only, not with compile.passes={self.passes}; leave "
                    "one of them out"
                )
        if self.overlap_param_gather and self.regional_compilation is False:
            raise ValueError(
                "compile.overlap_param_gather needs blocks that wait for their parameters; set "
                "compile.regional_compilation to true, or leave one of them out"
            )
        return self

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Configurations that ``deepspeed.initialize()`` refuses, and arguments that ``engine.compile()`` refuses.

The former leaves the module and the optimizer as they were, the latter the engine.
"""

import dataclasses
from typing import Callable, List, NamedTuple, Optional, Tuple

import torch

from support.options import SMALL, TWICE_ROUNDED, outcome, prepare, train_prepared
from support.training import Case, build, make_optimizer


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A configuration with which deepspeed.initialize() raises ``says``, or arguments of engine.compile()."""

    says: str
    stage: int = 1
    dtype: str = "fp32"
    config: dict = dataclasses.field(default_factory=dict)
    arguments: dict = dataclasses.field(default_factory=dict)
    # Makes the optimizer of parameters; None: that of a case.
    optimizer: Optional[Callable[..., torch.optim.Optimizer]] = None
    # What of the section `compile` to change so that it works; None: something else helps.
    amends: Optional[dict] = None
    # Configurations, or arguments of engine.compile(), that ``says`` advises.
    instead: Tuple[dict, ...] = ()

    def amended(self):
        """Returns the first configuration that is not refused."""
        if self.amends is None:
            return self.instead[0]
        return {**self.config, "compile": {**self.config.get("compile", {}), **self.amends}}


def zero_options(**options):
    return {"zero_optimization": options}


def of_compile_kwargs(says, compile_kwargs, instead, backend="inductor"):
    """Without these arguments engine.compile() works, and with each of ``instead``."""
    refused, *advised = ({"backend": backend, "compile_kwargs": arguments} for arguments in (compile_kwargs, *instead))
    return Refusal(says, arguments=refused, amends={}, instead=tuple(advised))


class Refused(NamedTuple):
    raised: str
    changed: List[str]  # what of the state of the module and its optimizer, or of the engine
    error: Optional[float]  # of training thereafter; None without training


def refuse(refusal, trains=False):
    """Makes an engine of a module that is to be refused, then one as the refusal says, and trains if that is asked.

    The second engine has the module and the optimizer of the first. Where arguments of engine.compile() are refused,
    the engine is the same.
    """
    from deepspeed import comm

    case = Case(model=SMALL, stage=refusal.stage, dtype=refusal.dtype, config=refusal.config)
    advised = dataclasses.replace(case, config=refusal.amended())
    module, engine, error = build(case), None, None
    optimizer = refusal.optimizer(module.parameters()) if refusal.optimizer else make_optimizer(module, case)
    try:
        if refusal.arguments:
            engine = prepare(case, module).engine
        before = state_of(module, optimizer, engine)
        if engine is None:
            raised = outcome(prepare, case, module, optimizer=optimizer)
        else:
            raised = outcome(engine.compile, **{"backend": "eager", **refusal.arguments})
        changed = [name for name, value in state_of(module, optimizer, engine).items() if value != before[name]]
        # Where the refusal lists what is advised, follow() does it.
        if trains or engine is not None or not refusal.instead:
            if engine is None:
                engine = prepare(advised, module, optimizer=optimizer).engine
            for name, value in (refusal.amends or {}).items():
                setattr(engine._config.compile_config, name, value)
            engine.compile(backend="eager")
            assert engine.is_deepcompile_active()
        if trains:
            error = train_prepared(case, module, engine)
        elif engine is not None:
            engine.destroy()
        return Refused(raised or "nothing: it compiled", changed, error)
    finally:
        # DeepSpeed has one logger of communication for all engines.
        comm.comm.comms_logger.enabled = False


def state_of(module, optimizer, engine):
    """What deepspeed.initialize() or, if there is an engine, engine.compile() changes when it succeeds."""
    if engine is None:
        hooks = [(len(submodule._forward_pre_hooks), len(submodule._forward_hooks)) for submodule in module.modules()]
        held = [
            [(id(parameter), parameter.data_ptr(), parameter.dtype) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        values = [(name, value.data_ptr(), value.dtype) for name, value in module.state_dict().items()]
        states = len(optimizer.state)
        return {"hooks": hooks, "compiled": module._compiled_call_impl, "optimizer": (held, states), "values": values}
    return {
        "optimizer": type(engine.optimizer),
        "gradient hooks": len(getattr(engine.optimizer, "_grad_acc_hooks", [])),
        "contiguous_gradients": getattr(engine.optimizer, "contiguous_gradients", None),
        "active": engine.is_deepcompile_active(),
        "compiled": engine.is_compiled,
        "module compiled": engine.module._compiled_call_impl,
        "forward hooks": (len(engine.module._forward_pre_hooks), len(engine.module._forward_hooks)),
        "engine hooks": (len(engine._forward_pre_hooks), len(engine._forward_hooks)),
    }


def follow(refusals):
    """Makes engines anew as the refusals advise; returns the errors of training them, by the name of the refusal."""
    errors = {}
    for name, refusal in refusals.items():
        for number, advised in enumerate(refusal.instead):
            config, arguments = (refusal.config, advised) if refusal.arguments else (advised, {})
            case = Case(model=SMALL, stage=refusal.stage, dtype=refusal.dtype, config=config)
            module, engine = prepare(case)
            engine.compile(**{"backend": "eager", **arguments})
            assert engine.is_deepcompile_active()
            errors[name, number] = train_prepared(case, module, engine)
    return errors


def check_refused(ranks, refusal):
    """Asserts that what is asked for is refused in one sentence, and nothing is changed."""
    (refused,) = ranks(1).run(refuse, refusal)
    said = f"ValueError: DeepCompile with ZeRO stage {refusal.stage}: {refusal.says}"
    assert refused.raised == said if not said.endswith(" ") else refused.raised.startswith(said)
    assert "\n" not in refused.raised
    assert refused.changed == []


def check_advice(ranks, refusals):
    """Asserts that each refusal says what helps, and that what it advises trains."""
    assert all(refusal.instead or refusal.amends is not None for refusal in refusals.values())
    (errors,) = ranks(1).run(follow, refusals)
    assert all(error < TWICE_ROUNDED[refusals[name].dtype] for (name, _), error in errors.items()), errors

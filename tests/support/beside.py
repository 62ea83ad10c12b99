# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine and a plain loop that train one model on the same batches, and what the engine logs meanwhile."""

import contextlib
import copy
import dataclasses
import logging
from typing import List

import torch

from deepspeed.compile.zero_1_and_2 import gradient_counters, reset_gradient_counters, wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param

from support.training import BOUND, device, held, make_engine, make_optimizer, relative_error, step_plain, total_error


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of training beside a plain loop.

    In low precision the errors are those of the fp32 master parameters.

    Attributes:
        from_graphs: how many gradients graphs have reduced in each micro-batch. Empty without DeepCompile.
        error: the largest relative error of a parameter, against the plain loop's.
        total_error: the relative error of all parameters together.
        moved: how far training moved the parameters, all together.
        held: bytes of gradients at the end.
    """

    from_graphs: List[int]
    error: float
    total_error: float
    moved: float
    held: int


class Beside:
    """Trains a copy of ``module`` in a plain loop that averages gradients over ranks.

    Args:
        module: maps a micro-batch's inputs to its loss.
        case: how to train it; its ``model`` is not used.
        reset: whether torch forgets first what it has compiled.

    Attributes:
        from_graphs: how many gradients graphs have reduced in each micro-batch.
    """

    def __init__(self, module, case, reset=True):
        if reset:
            torch._dynamo.reset()
        self.case = case
        self.module = module.to(device())
        self.plain, self.before = copy.deepcopy(module), copy.deepcopy(module)
        self.engine = make_engine(module, case)
        self.optimizer = make_optimizer(self.plain, case)
        self.from_graphs = []

    def micro_batch(self, *inputs, direct=False):
        """A forward, a backward and a step of the engine, and a forward and a backward of the plain loop.

        ``direct``: whether the engine's backward is ``loss.backward()``.
        """
        if self.case.deepcompile:
            reset_gradient_counters(self.engine)
        loss = self.engine(*inputs)
        loss.backward() if direct else self.engine.backward(loss)
        if self.case.deepcompile:
            self.from_graphs.append(gradient_counters(self.engine)["from_graphs"])
        self.engine.step()
        (self.plain(*inputs) / self.case.accumulation).backward()

    def step_plain(self):
        step_plain(self.plain, self.optimizer)

    def step(self, *inputs):
        """A step of one micro-batch."""
        self.micro_batch(*inputs)
        self.step_plain()

    def evaluate(self, *inputs):
        """Calls the model as evaluation does, in eval mode and without gradients."""
        self.engine.eval()
        with torch.no_grad():
            self.engine(*inputs)
        self.engine.train()

    def end(self):
        """Destroys the engine; returns what came of it as :class:`Outcome`."""
        result = Outcome(
            from_graphs=self.from_graphs,
            error=self.error(),
            held=sum(held(gradient_counters(self.engine)).values()) if self.case.deepcompile else 0,
            total_error=total_error(self._trained(), self.plain.parameters()),
            moved=total_error(self._trained(), self.before.parameters()),
        )
        self.engine.destroy()
        return result

    def error(self):
        """The largest relative error of a parameter."""
        return relative_error(self._trained(), self.plain.parameters())

    def last_error(self):
        """Destroys the engine; returns the largest relative error of a parameter."""
        error = self.error()
        self.engine.destroy()
        return error

    def _trained(self):
        if self.case.deepcompile:
            wait_for_parameters(self.engine)
        parameters = list(self.module.parameters())
        if self.case.dtype == "fp32":
            return parameters
        return [safe_get_full_fp32_param(parameter) for parameter in parameters]


def check(results, bound=BOUND):
    """Asserts that every rank's engine trained as the plain loop; returns the results."""
    for result in results:
        assert result.error < bound, result
        assert result.moved > 1e-3, "the parameters hardly changed, so agreement shows nothing"
        assert result.held == 0
    return results


@contextlib.contextmanager
def logged(level, names=("DeepSpeed",), keep=lambda text: True):
    """Yields a list to which the texts to ``keep`` are added that these loggers log with this level or a higher one.

    What ``log_notice()`` logs counts as the information that it is, though DeepSpeed shows it as it shows warnings.
    """
    texts, handler = [], logging.Handler(level)
    handler.addFilter(lambda record: level <= logging.getLevelName(record.levelname) and keep(record.getMessage()))
    handler.emit = lambda record: texts.append(record.getMessage())
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger, before in levels.items():
        logger.addHandler(handler)
        logger.setLevel(min(level, before))
    try:
        yield texts
    finally:
        for logger, before in levels.items():
            logger.setLevel(before)
            logger.removeHandler(handler)


def warnings_logged():
    """Yields a list to which the texts of DeepSpeed's warnings are added."""
    return logged(logging.WARNING)

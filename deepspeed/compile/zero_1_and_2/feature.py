# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an optional part of an engine may do, and which parts there are.

The core calls the methods of :class:`Feature` at its own moments, and knows nothing else of a part. What a part may
offer another part stands here too. Other doors of a part, and the order of parts, are in ``parts.py``.

Parts are made and called in that order. So of several that do something around a call, the first is the outermost;
rules of later parts are asked before those of earlier ones, unless these take the others' place; and methods of an
earlier part's mixin override those of a later part's.
"""

import contextlib
import dataclasses
import itertools
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Collection,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    Type,
    TypeVar,
)

import torch
from torch.nn import Module

from ..parts import doors

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from .graph.backend import Backend, Frame
    from .parameter.gather import AllGather
    from .step.rule import Rule

Part = TypeVar("Part", bound="Feature")


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What the user asks for, before anything is changed. One object serves all parts while an engine is set up.

    Who asks earlier makes another one: until ``engine.compile()`` the caller may change the module, and only that call
    has arguments. So what a part has chosen for one, such as layers, it chooses anew for the next.
    """

    engine: "DeepSpeedEngine"
    backend: str  # "inductor" or "eager"
    compile_kwargs: Dict[str, Any]  # what engine.compile() passes on to module.compile()
    schedule: Optional[List] = None  # as in set_up()
    is_call: bool = False  # whether engine.compile() asks, with these arguments; otherwise it is to be called later

    @property
    def options(self) -> Any:
        """The section ``compile`` of the configuration."""
        return self.engine._config.compile_config

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The user's optimizer. None while an engine begins for which DeepSpeed or a function will make it."""
        made, given = self.engine.basic_optimizer, self.engine.client_optimizer
        return made or (given if isinstance(given, torch.optim.Optimizer) else None)

    @property
    def trained(self) -> List[torch.nn.Parameter]:
        """The parameters that the optimizer has. None of them while ``optimizer`` is None."""
        zero, optimizer = self.engine.optimizer, self.optimizer
        # The ZeRO-1/2 optimizer gives the user's optimizer its partitions in place of the parameters.
        groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        given = itertools.chain.from_iterable(groups if zero is None else zero.bit16_groups)
        return [parameter for parameter in given if parameter.requires_grad]

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled, or all runs as it is written."""
        # The second is the variable TORCH_COMPILE_DISABLE.
        return not (self.compile_kwargs.get("disable") or torch._dynamo.config.disable)


class SetUpContext(NamedTuple):
    """What a part is made of, while an engine is set up."""

    request: Request
    features: List["Feature"]  # those that stand before this part
    undo: contextlib.ExitStack  # whose functions revert what the set-up has changed
    backend: "Backend"  # of torch.compile, which reduces the engine's gradients; parts tell it what they do to graphs
    identity: int  # the engine's number, which no other engine has, the same on all ranks

    @property
    def engine(self) -> "DeepSpeedEngine":
        return self.request.engine

    @property
    def optimizer(self) -> "DeepSpeedZeroOptimizer":
        """The ZeRO-1/2 optimizer."""
        return self.request.engine.optimizer

    @property
    def module(self) -> Module:
        return self.request.engine.module

    def get(self, cls: Type[Part]) -> Part:
        """Returns the part of this class, which every engine with this part has, because this one needs it."""
        part = find(self.features, cls)
        assert part is not None, f"{cls.__name__} stands behind a part that needs it"
        return part


class Transform(Protocol):
    """What makes other gradients of the gradients of some parameter groups, in the gradients' memory.

    What it makes lacks the loss scale. The states of these groups need not have the shape of master weights.
    """

    @property
    def groups(self) -> Collection[int]:
        """Indices of the parameter groups."""

    def run(self, optimizer: "DeepSpeedZeroOptimizer") -> None:
        """Called on every rank when gradients have not overflowed, before they are clipped: ``averaged_gradients`` has
        them. What this changes is part of the step."""


class Feature:
    """An optional part of one engine. Here, its methods do nothing.

    Dynamo's caches may hold the methods that shape graphs after the engine is gone, and with them their part. Such a
    part must not hold the engine, its module or its parameters.
    """

    # Options, before anything is changed --------------------------------------------------------------------------

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        """Yields a sentence for each option of this part that cannot be honoured. ``engine.optimizer`` may be None."""
        return iter(())

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        """Yields a sentence for each option of this part that will have no effect."""
        return iter(())

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        """Whether to make this part for an engine."""
        return True

    @classmethod
    def needs_blocks(cls, request: Request) -> Optional[str]:
        """Returns what needs blocks, if the user asks for a part that works on these: the beginning of the sentence
        with which a model without blocks is refused. Blocks then become graphs also where a model calls its blocks
        itself."""
        return None

    # Set-up ---------------------------------------------------------------------------------------------------------

    def __init__(self, context: SetUpContext):
        """Prepares the engine. What this changes, a function that it adds to ``context.undo`` reverts.
        It has no collectives, because a rank on which the set-up has raised would not come to them."""

    def commit(self) -> None:
        """Called when all parts are made, and before the optimizer is changed: does what cannot be reverted."""

    # Graphs ---------------------------------------------------------------------------------------------------------

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        """Returns what runs a frame's graph. ``compiled()`` compiles the graph, with what later parts do around it."""
        return compiled()

    # Forwards -------------------------------------------------------------------------------------------------------

    def around_forward(self, training: bool) -> ContextManager:
        """Returns a context of each forward of the engine. ``training``: whether its module is in training mode."""
        return contextlib.nullcontext()

    # Steps ----------------------------------------------------------------------------------------------------------

    # Gathers the stepped parameters in place of the core's AllGather, if this part does it.
    gather: Optional["AllGather"] = None
    # Makes other gradients of some groups' gradients, if an update is not computed element by element.
    transform: Optional[Transform] = None
    # Classes whose methods override the base's optimizer's, of a backward, of states and of checkpoints. The core's
    # override them.
    optimizer_mixins: Tuple[type, ...] = ()

    @property
    def shares(self) -> Sequence[torch.Tensor]:
        """Parts of parameters that neither the module nor the flat tensors have, for pictures of memory."""
        return ()

    def rules(self, others: List["Rule"]) -> List["Rule"]:
        """Returns what steps partitions, in the order in which it is asked. Called once, before :meth:`commit`.

        ``others`` are the rules of the parts that stand before this one, and last the one by which the optimizer
        itself steps ranges. What none of them serves, the optimizer steps whole.
        """
        return others

    def link_states(self, optimizer: "DeepSpeedZeroOptimizer") -> None:
        """Called when parameters were linked with the states that have the shape of the master weights. Links states
        that this part keeps in a form of its own."""

    def attached(self, optimizer: "DeepSpeedZeroOptimizer") -> None:
        """Called when the optimizer has the methods of all parts, and each part has done its :meth:`commit`."""

    def after_step(self, engine: "DeepSpeedEngine") -> None:
        """Called on all ranks after an optimizer step."""


def classes() -> Tuple[Type[Feature], ...]:
    """Lists the classes of all parts that have one."""
    return doors("feature", "FEATURE")


def find(features: Iterable[Feature], cls: Type[Part]) -> Optional[Part]:
    """Returns the part of a class, or None if there is none."""
    return next((feature for feature in features if isinstance(feature, cls)), None)


def overriding(features: Iterable[Feature], method: str) -> List[Callable]:
    """Lists the methods of this name that do something, so that an engine without such parts calls nothing."""
    return [
        getattr(feature, method)
        for feature in features
        if getattr(type(feature), method) is not getattr(Feature, method)
    ]


def only(features: Iterable[Feature], role: str) -> Any:
    """Returns what the features have for a role, such as ``gather``, or None. One part alone may have something.

    Raises:
        ValueError: if two parts have something.
    """
    found = [feature for feature in features if getattr(feature, role) is not None]
    if len(found) > 1:
        raise ValueError(f"{type(found[0]).__name__} and {type(found[1]).__name__} do the same of an engine: {role}")
    return getattr(found[0], role) if found else None

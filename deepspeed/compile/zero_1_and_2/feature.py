# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an optional part of an engine may do, and which parts there are.

The core calls the methods of :class:`Feature` at its own moments, and knows nothing else of a part. Methods that parts
offer to other parts are here too. ``parts.py`` lists the other doors of a part, and the order of the parts.

The core makes and calls the parts in that order. The first part with a context around a call is the outermost. Later
parts put their rules before those of earlier parts. A mixin of an earlier part overrides the mixins of later parts.
"""

import contextlib
import dataclasses
import itertools
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Collection,
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

    from ..config import CompileConfig
    from .gradient.native import Reducer
    from .graph.backend import Backend, Frame
    from .layout import Layout
    from .parameter.gather import AllGather
    from .parameter.placement import Placement
    from .step.rule import Rule

Part = TypeVar("Part", bound="Feature")


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What the user asks for, before anything is changed. One object serves all parts while an engine is set up.

    A check before ``engine.compile()`` makes a request of its own: until that call the caller may change the module,
    and only that call has arguments. So a part makes its choices, such as blocks, once for each request.
    """

    engine: "DeepSpeedEngine"
    backend: str  # "inductor" or "eager"
    compile_kwargs: Dict[str, Any]  # what engine.compile() passes on to module.compile()
    schedule: Optional[List] = None  # as in set_up()
    is_call: bool = False  # whether engine.compile() makes this request; otherwise that call comes later

    @property
    def options(self) -> "CompileConfig":
        """The section ``compile`` of the configuration."""
        return self.engine._config.compile_config

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The user's optimizer, or None if DeepSpeed or the user's function has not made it yet."""
        made, given = self.engine.basic_optimizer, self.engine.client_optimizer
        return made or (given if isinstance(given, torch.optim.Optimizer) else None)

    @property
    def trained(self) -> List[torch.nn.Parameter]:
        """The parameters that the optimizer trains. Empty while ``optimizer`` is None."""
        zero, optimizer = self.engine.optimizer, self.optimizer
        # The ZeRO-1/2 optimizer gives the user's optimizer its partitions in place of the parameters.
        groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        given = itertools.chain.from_iterable(groups if zero is None else zero.bit16_groups)
        return [parameter for parameter in given if parameter.requires_grad]

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled."""
        # The environment variable TORCH_COMPILE_DISABLE sets torch's option.
        return not (self.compile_kwargs.get("disable") or torch._dynamo.config.disable)


class SetUpContext(NamedTuple):
    """The arguments of a part's constructor, while an engine is set up."""

    request: Request
    features: List["Feature"]  # the parts before this one
    undo: contextlib.ExitStack  # functions that revert the changes of the set-up
    backend: "Backend"  # the engine's backend of torch.compile, to which parts add their changes of graphs
    identity: int  # the engine's number, unique to it and the same on all ranks
    layouts: List["Layout"]  # where the parameters of each group lie

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
        """Returns the part of class ``cls``, which the calling part needs and which stands before it."""
        part = find(self.features, cls)
        assert part is not None, f"{cls.__name__} stands behind a part that needs it"
        return part


class Transform(Protocol):
    """Replaces the gradients of some parameter groups before the step, in the gradients' memory.

    The new gradients lack the loss scale. The states of these groups need not have the shape of master weights.
    """

    @property
    def groups(self) -> Collection[int]:
        """Indices of the parameter groups."""

    def run(self, optimizer: "DeepSpeedZeroOptimizer") -> None:
        """Called on every rank, after the check for overflow and before clipping: replaces the gradients in
        ``averaged_gradients``. All its changes are part of the step."""


class Feature:
    """An optional part of one engine. The methods of this base class do nothing.

    Dynamo's caches may keep the methods that change graphs, and through them their part, after the engine is gone.
    Such a part must not hold the engine, its module or its parameters.
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

    # Set-up ---------------------------------------------------------------------------------------------------------

    def __init__(self, context: SetUpContext):
        """Prepares the engine, and adds a function to ``context.undo`` that reverts each change.
        It must not call a collective, which a rank would miss whose set-up has raised."""

    def carry(self, optimizer: "DeepSpeedZeroOptimizer", reducer: "Reducer") -> None:
        """Called on every rank when all ranks have made their parts, before parameters move to our flat tensors. May
        call collectives. Here a part puts a process group's carrier in place of its collectives: of gradients by
        ``set_carrier()`` of the reducer, of parameters into ``carriers_of()`` the optimizer."""

    def commit(self) -> None:
        """Called on every rank when all ranks have made their parts and the optimizer has their methods. Makes changes
        that stay. Where it may raise on one rank, ranks compare errors (``every_rank_raises``), at the latest before
        its first collective."""

    # Graphs ---------------------------------------------------------------------------------------------------------

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        """Returns a function that runs a frame's graph. ``compiled()`` compiles the graph, around which later parts
        have put their own code."""
        return compiled()

    # Steps ----------------------------------------------------------------------------------------------------------

    # Gathers the stepped parameters in place of the core's AllGather.
    gather: Optional["AllGather"] = None
    # Where gradients and new parameters lie, in place of the core's Placement.
    placement: Optional["Placement"] = None
    # Replaces the gradients of some groups before the step, if an update is not computed element by element.
    transform: Optional[Transform] = None
    # The optimizer keeps the methods of this class for good, once elements are in our order.
    in_our_order: Optional[type] = None
    # Classes whose methods override those of the base's optimizer. The core's own methods override them.
    optimizer_mixins: Tuple[type, ...] = ()

    @property
    def shares(self) -> Sequence[torch.Tensor]:
        """Shards of parameters that neither the module nor the flat tensors hold, for pictures of memory."""
        return ()

    def rules(self, others: List["Rule"]) -> List["Rule"]:
        """Returns the rules that step partitions, in the order in which they are asked. Called once, before
        :meth:`commit`.

        ``others`` are the rules of the parts before this one. If no rule serves a partition, the optimizer steps the
        whole partition.
        """
        return others

    def after_step(self, engine: "DeepSpeedEngine") -> None:
        """Called on all ranks after an optimizer step."""


def classes() -> Tuple[Type[Feature], ...]:
    """Lists the classes of all parts that have one."""
    return doors("feature", "FEATURE")


def find(features: Iterable[Feature], cls: Type[Part]) -> Optional[Part]:
    """Returns the part of a class, or None if there is none."""
    return next((feature for feature in features if isinstance(feature, cls)), None)


def overriding(features: Iterable[Feature], method: str) -> List[Callable]:
    """Lists the methods of this name that a part overrides, so that an engine without such parts calls nothing."""
    return [
        getattr(feature, method)
        for feature in features
        if getattr(type(feature), method) is not getattr(Feature, method)
    ]


def only(features: Iterable[Feature], role: str) -> Any:
    """Returns the object of the one part with a role, such as ``gather``, or None.

    Raises:
        ValueError: if two parts have the role.
    """
    found = [feature for feature in features if getattr(feature, role) is not None]
    if len(found) > 1:
        raise ValueError(f"{type(found[0]).__name__} and {type(found[1]).__name__} do the same of an engine: {role}")
    return getattr(found[0], role) if found else None

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Calls of an engine's module, of its blocks and of the modules that call blocks, while the engine compiles them.

If an instance has a ``_compiled_call_impl``, ``nn.Module`` calls it in place of hooks and forward, and leaves it out
of copies and pickles. Class, forward and hooks of the instance stay as they are.
"""

import functools
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterable, List, Optional, Type

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ...zero_1_and_2.hooks import no_hook
from ...zero_1_and_2.messages import warn

if TYPE_CHECKING:
    from .compilation_limit import CompilationLimit

# Wraps a call. Takes the module, the blocks that the module calls (None if the module is a block) and the inner call,
# and returns the outer call. A call takes the module and the inputs.
Around = Callable[[Module, Optional[List[Module]], Callable], Callable]

# The function with which a layer of transformers checkpoints its forward in training, an attribute of the layer.
CHECKPOINT = "_gradient_checkpointing_func"


def forward_of(kind: Type[Module]) -> Any:
    """Returns the ``forward`` of a class of modules, without running it if it is a descriptor."""
    for base in kind.__mro__:
        if "forward" in base.__dict__:
            return base.__dict__["forward"]
    raise AttributeError(f"{kind.__name__} has no forward")


class Call:
    """The ``_compiled_call_impl`` of a module between :meth:`put_in` and :meth:`take_out`.

    A copied or pickled call becomes None, so the copy runs its own forward. A call is copied if the module's class has
    a ``__getstate__`` that does not leave ``_compiled_call_impl`` out.
    """

    def __init__(self, module: Module, run: Callable):
        # A strong reference would keep an unused model alive until Python looks for cycles.
        self._module = weakref.ref(module)
        self._run = run  # takes the module and the inputs
        # The module's former attribute: None, the result of its own compile(), or the call of an earlier engine.
        self._before: Optional[Callable] = None
        self._hook: Optional[RemovableHandle] = None

    def __reduce__(self):
        return type(None), ()

    # Keep the call out of graphs of other code, such as a caller's own torch.compile, which reduce nothing. That code
    # may also call a block whose hooks keep the block out of its graph.
    @torch.compiler.disable
    def __call__(self, *args, **kwargs):
        return self._run(self._module(), *args, **kwargs)

    def put_in(self) -> None:
        """Makes the module's calls run this call."""
        # Do not call the module's own __setattr__.
        own = vars(self._module())
        self._before = own.get("_compiled_call_impl")
        own["_compiled_call_impl"] = self

    def break_graphs(self) -> None:
        """Makes other code's graph end where it calls the module. Called after :meth:`put_in`.

        If a module has no hooks, Dynamo traces its forward at once. If it has one, Dynamo traces
        ``nn.Module.__call__()`` and finds this call, so the module gets a hook.
        """
        if self._hook is None:
            self._hook = self._module().register_forward_pre_hook(no_hook, prepend=True)

    def take_out(self) -> None:
        """Restores the module's former attribute, unless the caller has compiled the module since."""
        if self._hook is not None:
            self._hook.remove()
        module = self._module()
        if module is None:
            return
        own = vars(module)
        now = own.get("_compiled_call_impl")
        if now is self:
            del own["_compiled_call_impl"]
            if self._before is not None:
                own["_compiled_call_impl"] = self._before
        # A later engine has compiled the module since: when that engine ends, it must not restore this call.
        while isinstance(now, Call):
            if now._before is self:
                now._before = self._before
            now = now._before


def is_compiled(module: Module) -> bool:
    """Whether the caller has compiled a module. Blocks of an earlier engine are compiled by that engine instead."""
    return not isinstance(module._compiled_call_impl, (Call, type(None)))


def take_over_compiled(modules: Iterable[Module]) -> None:
    """Makes ``modules`` run as if their ``compile()`` had never been called: their graphs would reduce nothing.

    Modules that another engine has compiled stay as they are.
    """
    compiled = [submodule for submodule in modules if is_compiled(submodule)]
    if compiled:
        names = sorted({type(submodule).__name__ for submodule in compiled})
        warn(
            f"DeepCompile compiles {len(compiled)} modules of {names} itself that were compiled before; the arguments "
            "of their compile() have no effect, so give them to engine.compile()"
        )
    for submodule in compiled:
        submodule._compiled_call_impl = None


class ModuleCall(Call):
    """Calls an engine's module compiled, within the engine's ``CompilationLimit``.

    Args:
        compiled: the compiled function, which takes the inputs.
    """

    def __init__(self, module: Module, compiled: Callable, limit: "CompilationLimit"):
        super().__init__(module, functools.partial(_call_module, limit, compiled))

    def wrap(self, around: Callable[[Callable], Callable]) -> None:
        """Puts another call around this one. ``around`` takes the inner call and returns the outer one."""
        self._run = around(self._run)


def _call_module(limit, compiled, module, /, *args, **kwargs):
    return limit.call_module(module, compiled, args, kwargs)


class BlockParentCall(Call):
    """Calls a module that calls blocks. The module runs uncompiled.

    If the compiler traced the module, it would trace into each block again. Also, some models ask whether they are
    traced, and then give attention a mask in memory instead of a causal flag.
    """

    def __init__(self, module: Module, limit: "CompilationLimit"):
        super().__init__(module, functools.partial(_call_module, limit, None))

    def put_in(self) -> None:
        super().put_in()
        self.break_graphs()

    def wrap(self, around: Around, blocks: List[Module]) -> None:
        """Puts another call around this one. ``blocks``: the blocks that the module calls."""
        self._run = around(self._module(), blocks, self._run)


class BlockCall(Call):
    """Calls a block: its forward compiled, its hooks uncompiled.

    Args:
        compiled: takes a class of blocks and returns the class's compiled forward. Given a function too, returns that
            function compiled. The result takes the block and the inputs.
    """

    def __init__(self, block: Module, compiled: Callable[..., Callable], limit: "CompilationLimit"):
        self._inner = _BlockForward(compiled, limit)
        super().__init__(block, self._inner.call)

    def wrap(self, around: Around, always: bool = False) -> None:
        """Puts another call around this one.

        Args:
            around: takes the module, None and the inner call, and returns the outer one.
            always: whether the outer call also runs where checkpointing computes the block again, and where the caller
                compiles the code around the block.
        """
        # Outside of the hooks, which may read parameters too.
        self._run = around(self._module(), None, self._run)
        if always:
            self._inner.always.append(around)
            self.break_graphs()

    def break_graphs(self) -> None:
        super().break_graphs()
        self._inner.own_hooks = 1


class _BlockForward:
    """Runs a block's forward compiled, and its hooks uncompiled. Does not hold the block.

    Attributes:
        own_hooks: how many pre-hooks a block has for DeepCompile.
        always: the wrappers of each computation of the block, the innermost first.
    """

    def __init__(self, compiled: Callable[..., Callable], limit: "CompilationLimit"):
        self._compiled = compiled
        self._limit = limit
        self.own_hooks = 0
        self.always: List[Around] = []

    def call(self, block: Module, /, *args: Any, **kwargs: Any) -> Any:
        own = vars(block)
        # The caller may have replaced this block's forward since.
        if self._limit.runs_eager() or "forward" in own:
            return block._call_impl(*args, **kwargs)
        if not _has_hooks(own, but=self.own_hooks):
            # Dynamo checks its guards faster while nothing has changed the block's attributes.
            return self._run(block, *args, **kwargs)

        def clean(*_):
            first.remove()
            if own.get("forward") is forward:
                del own["forward"]

        # `_call_impl` first reads `forward`, and then lists the hooks. This first hook removes itself and the compiled
        # forward, so the block's own hooks and forward find the block unchanged.
        own["forward"] = forward = functools.partial(self._run, block)
        first = block.register_forward_pre_hook(clean, prepend=True)
        try:
            return block._call_impl(*args, **kwargs)
        finally:
            clean()

    def _run(self, block, /, *args, **kwargs):
        """Runs the forward that the block's class has now."""
        if block.training and vars(block).get(CHECKPOINT) is not None and block.gradient_checkpointing:
            decorated = forward_of(type(block))
            if checkpoints_what_it_decorates(decorated):
                return self._run_checkpointed(block, decorated.__wrapped__, args, kwargs)
        return self._limit.call_block(block, self._compiled(type(block)), run_forward, args, kwargs)

    def _run_checkpointed(self, block, forward, args, kwargs):
        # The decorator runs uncompiled, and the forward that it has checkpointed runs compiled. If the decorator were
        # compiled, the checkpointed forward would be a graph within the graph.
        compiled, own = self._compiled(type(block), forward), vars(block)
        checkpoint = own[CHECKPOINT]

        def run(layer, /, *inputs, **keywords):
            return self._limit.call_block(layer, compiled, forward, inputs, keywords)

        # The backward calls this again.
        for around in self.always:
            run = around(block, None, run)

        @functools.wraps(forward)
        def call(layer, /, *inputs, **keywords):
            return run(layer, *inputs, **keywords)

        def checkpoint_compiled(function, *inputs):
            if isinstance(function, functools.partial) and function.func is forward:
                function = functools.partial(call, *function.args, **function.keywords)
            return checkpoint(function, *inputs)

        own[CHECKPOINT] = checkpoint_compiled
        try:
            return block.forward(*args, **kwargs)
        finally:
            own[CHECKPOINT] = checkpoint


def _has_hooks(own, but):
    """Whether a module has hooks. ``but``: how many pre-hooks do not count."""
    if len(own["_forward_pre_hooks"]) > but:
        return True
    return own["_forward_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]


def checkpoints_what_it_decorates(forward: Any) -> bool:
    """Whether a forward is a decorator of transformers that checkpoints the forward of a layer."""
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return CHECKPOINT in names and hasattr(forward, "__wrapped__")


def run_forward(block: Module, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the forward of the block's class, whatever kind of callable that is. This function is compiled."""
    return block.forward(*args, **kwargs)


def runs(function: Callable) -> Callable:
    """Returns a function to compile that calls ``function`` with a block and the inputs."""

    def run(block, /, *args, **kwargs):
        return function(block, *args, **kwargs)

    return run

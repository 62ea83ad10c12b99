# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Runs a forward and a backward of a model on tensors without memory, and counts the memory that they would have.

The model runs as its own code says, with all that checkpointing and tied weights do to it. Only what training compiles
is traced, once for each class of blocks and for the module around them, and stands there with the memory of its graphs
(``liveness.py``). The rest runs as it is, and each tensor counts from when it is made until nobody refers to it.
"""

import contextlib
import functools
import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch.nn import Module
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...features.blocks.block_calls import CHECKPOINT, checkpoints_what_it_decorates, forward_of
from ...features.blocks.choose_blocks import parents_of
from ...features.blocks.parameters import modules_outside
from .graphs import trace
from .head import Form, form_of, with_form
from .liveness import Moment, bytes_of
from .long_sequences import InputsOnHost, Unsuitable, in_tiles, loss_in_tiles, mlp_of, split_at
from .modes import Question


class Activations(NamedTuple):
    """The memory of a micro-batch: bytes that the model's code and graphs hold, without parameters and gradients."""

    # forward, backward: their moments.
    forward: List[Moment]
    backward: List[Moment]
    inputs: int  # bytes of the batch
    on_host: int = 0  # bytes of the host's memory for inputs of layers


# Stands for a tensor among other leaves of a tree.
_TENSOR = object()


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors that are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self._most = 0
        self.moments: List[Moment] = []
        self._known: Dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage):
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known() is storage:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, functools.partial(self._forget, key, size))
        self.live += size
        self.note(0)

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Does not count these tensors, which existed before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

    def _forget(self, key, size, _):
        self._known.pop(key, None)
        self.live -= size

    @contextlib.contextmanager
    def without(self, size: int) -> Iterator[None]:
        """Context in which so many bytes do not count."""
        self.live -= size
        yield
        self.live += size

    def note(self, more: int) -> None:
        """Notes ``more`` bytes beyond those of all tensors."""
        self._most = max(self._most, self.live + more)

    def end_moment(self, gradient: Optional[str], more: int = 0, block: Optional[int] = None) -> None:
        """Ends a moment with ``more`` bytes beyond those of all tensors."""
        self.moments.append(Moment(self._most, self.live + more, gradient, block))
        self._most = self.live + more

    def take_moments(self) -> List[Moment]:
        """Ends a moment, and returns the moments since the last call."""
        self.end_moment(None)
        moments, self.moments = self.moments, []
        return moments


class _Compiled(torch.autograd.Function):
    """Stands for a compiled graph: makes the graph's results and saved tensors, and notes its temporaries."""

    @staticmethod
    def forward(ctx, memory, graphs, names, block, *tensors):
        count = len(names)
        memory.end_moment(None)
        for moment in graphs.forward:
            memory.note(moment.most)
        results = tuple(map(_like, graphs.outputs))
        made: Dict[int, torch.Tensor] = {}
        kept = []
        for saved in graphs.saved:
            if saved.input is not None:
                # A parameter, in any shape, exists anyway.
                kept += [tensors[saved.input]] if saved.input >= count else []
            elif saved.output is not None:
                kept.append(results[saved.output])
            elif saved.value is not None and saved.memory not in made:
                # Inductor may keep a tensor in memory that holds more than the tensor.
                made[saved.memory] = torch.empty(saved.bytes, dtype=torch.uint8)
        ctx.save_for_backward(*kept, *made.values())
        ctx.memory, ctx.graphs, ctx.names, ctx.block = memory, graphs, names, block
        memory.end_moment(None, block=block)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx, *_):
        # Makes checkpointing compute the block again.
        tensors = ctx.saved_tensors
        memory, graphs, count = ctx.memory, ctx.graphs, len(ctx.names)
        memory.end_moment(None)
        for moment in graphs.backward:
            memory.note(moment.most)
            name = None if moment.gradient is None else ctx.names[moment.gradient]
            memory.end_moment(name, moment.after, ctx.block)
        del tensors
        # The graph has dropped its saved tensors, but autograd drops their stand-ins only after this function.
        with memory.without(sum(saved.bytes for saved in graphs.saved)):
            gradients = [gradient if gradient is None else _like(gradient) for gradient in graphs.gradients[count:]]
        return None, None, None, None, *[None] * count, *gradients


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


class Run:
    """Runs a model whose parameters are fake tensors."""

    def __init__(self, model: Module, blocks: List[Module], say: Callable[[str], None], question: Question):
        self._model, self.blocks, self._say, self._question = model, blocks, say, question
        self._on_host = InputsOnHost()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._graphs: Dict[Any, Any] = {}
        self._memory = Memory()
        self._budget: Optional[float] = None

    def run(
        self,
        batch: Dict[str, torch.Tensor],
        loss_of: Callable[[Any], torch.Tensor],
        checkpoint: bool = False,
        budget: Optional[float] = None,
        chunked_loss: Optional[bool] = None,
        own_loss: bool = False,
    ) -> Activations:
        """Runs a forward and a backward on a batch.

        Args:
            checkpoint: whether each block is computed again in the backward.
            own_loss: whether the loss is computed of logits outside of the model, in a graph of its own.
        """
        self._budget = budget
        if self._question.mlp_tiles and not self.blocks:
            raise Unsuitable("the model is one graph, which tiles would cut apart; ask without tiles of MLPs")
        model, memory = self._model, Memory()
        self._memory = memory
        self._on_host = InputsOnHost()
        memory.ignore([*model.parameters(), *model.buffers(), *batch.values()])
        handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient_of_autograd)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        try:
            with contextlib.ExitStack() as stack:
                for number, block in enumerate(self.blocks):
                    stack.enter_context(patch.object(block, "forward", self._stand_in(number, block, checkpoint)))
                with memory:
                    with _Attention():
                        loss = self._around(batch, loss_of, chunked_loss, own_loss)
                    forward = memory.take_moments()
                    loss.backward()
                    del loss
                    backward = memory.take_moments()
        finally:
            for handle in handles:
                handle.remove()
        return Activations(forward, backward, sum(map(bytes_of, batch.values())), self._on_host.pinned())

    def _gradient_of_autograd(self, parameter):
        # A graph gives its gradients to the reducer, and autograd gets none. Tiles add up theirs, and then say so.
        if parameter.grad is not None and getattr(parameter, "ds_grad_is_ready", True):
            self._memory.end_moment(self._names[id(parameter)], -bytes_of(parameter.grad))
            parameter.grad = None

    def _stand_in(self, number, block, checkpoint):
        forward = block.forward
        held = _held([block])
        # If a layer's forward checkpoints, the checkpointed function is compiled, and not the forward around it.
        checkpoints = getattr(block, CHECKPOINT, None) is not None and checkpoints_what_it_decorates(
            forward_of(type(block))
        )

        def run(*args, **kwargs):
            with self._on_host.hooks() if self._question.inputs_on_host else _NOTHING:
                if checkpoint:
                    # Transformers also keeps the generator's state by default.
                    run_again = functools.partial(run_compiled, **kwargs)
                    return torch.utils.checkpoint.checkpoint(run_again, *args, use_reentrant=False)
                if checkpoints and block.gradient_checkpointing and block.training:
                    return getattr(block, CHECKPOINT)(functools.partial(run_compiled, **kwargs), *args)
            return run_compiled(*args, **kwargs)

        def run_compiled(*args, **kwargs):
            tensors, others, call_of = _split((args, kwargs))
            made: List[Any] = []

            def function(*tensors):
                args, kwargs = call_of(tensors[len(held) :])
                plain = patch.object(block, "gradient_checkpointing", False) if checkpoints else _NOTHING
                with patch.object(block, "forward", forward), _holding(block, held, tensors), plain, _Attention():
                    returned, _, result_of = _split(block.forward(*args, **kwargs))
                made.append(result_of)
                return returned

            key = _key(block, held, tensors, others, self._budget)
            if key not in self._graphs:
                self._say(f"tracing a {type(block).__name__}")
                traced = self._trace_block(function, mlp, held, tensors)
                self._graphs[key] = traced, made[-1]
            graphs, result_of = self._graphs[key]
            results = self._apply(graphs[0], held, tensors, number)
            if tiles:
                x, *passed = results
                results = self._apply(graphs[1], held, [*tensors, *passed, in_tiles(mlp, x, tiles)], number)
            return result_of(results)

        tiles = self._question.mlp_tiles
        mlp = mlp_of(block) if tiles else None
        return run

    def _trace_block(self, function, mlp, held, tensors):
        """Returns a block's graph, or both of a block whose graph ends at its MLP."""
        if mlp is None:
            return [self._trace(function, held, tensors, False)]
        with _uncounted(held):
            parts = split_at(function, mlp, held, tensors)
            before = self._trace(parts.before, held, tensors, False)
            x, *passed = [_like(value).requires_grad_(value.is_floating_point()) for value in before.outputs]
            return [before, self._trace(parts.behind, held, [*tensors, *passed, x], False)]

    def _trace(self, function, parameters, tensors, is_cut):
        with _uncounted(parameters):
            # Values on both sides of a cut are kept, whatever the budget is.
            return trace(function, parameters, tensors, None if is_cut else self._budget)

    def _apply(self, graphs, parameters, tensors, block=None):
        names = [self._names.get(id(parameter), "") for parameter in parameters]
        return _Compiled.apply(self._memory, graphs, names, block, *parameters, *tensors)

    def _around(self, batch, loss_of, chunked_loss, own_loss):
        """Runs the model: the modules that call blocks uncompiled, and the code around them as a graph. Returns the
        loss."""
        model = self._model
        parents = parents_of(model, self.blocks)
        calls_blocks = any(parent is model for parent in parents)
        outputs: List[Any] = []
        if parents:
            with contextlib.ExitStack() as stack, contextlib.suppress(_Enough):
                for parent in parents:
                    noted = _noted(parent.forward, outputs, len(parents))
                    stack.enter_context(patch.object(parent, "forward", noted))
                model(**batch)
            if calls_blocks and not self._question.loss_tiles:
                # All code around the blocks runs uncompiled.
                return loss_of(outputs.pop())
        if self._question.loss_tiles:
            # The user's code calls what calls the blocks, and computes head and loss of what this returns.
            leaves = [] if calls_blocks else pytree.tree_leaves(outputs)
            hidden = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
            outputs.clear()
            del leaves
            return loss_in_tiles(model, hidden, self._question.loss_tiles)
        held = _held(modules_outside(model, self.blocks), recurse=False)
        tensors, _, outputs_and_batch_of = _split((outputs, batch))
        outputs.clear()

        def call(*tensors):
            outputs, batch = outputs_and_batch_of(tensors[len(held) :])
            upcoming = iter(outputs)

            def run_again(*args, **kwargs):
                for output in upcoming:
                    return output
                raise Untraceable("it calls a module with blocks more than once")

            with contextlib.ExitStack() as stack:
                for parent in parents:
                    stack.enter_context(patch.object(parent, "forward", run_again))
                stack.enter_context(_holding(model, held, tensors))
                return model(**batch)

        def loss_alone(*tensors):
            with _Attention():
                return [loss_of(call(*tensors))]

        form = Form(is_cut=True)
        if not own_loss:
            with _uncounted(held):
                form = form_of(call, loss_of, held, tensors, chunked_loss)
        key = _key(model, held, tensors, form.is_cut, self._budget)
        if key not in self._graphs:
            self._say(f"tracing {'what is around the blocks of ' if parents else ''}{type(model).__name__}")
            self._graphs[key] = self._trace(loss_alone, held, tensors, form.is_cut)
        (loss,) = self._apply(with_form(self._graphs[key], form), held, tensors)
        return loss


class Untraceable(Exception):
    """The reason why a model cannot be traced."""


class _Enough(Exception):
    """All modules that call blocks have run."""


class _Attention(TorchFunctionMode):
    """Turns dropout of torch's attention off, because a CPU has no flash attention with dropout. With dropout, a GPU's
    attention keeps two more numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:]), {**kwargs}
            if len(args) < 5:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_NOTHING = contextlib.nullcontext()


def _split(tree):
    """Returns the tensors of a tree, its leaves without them, and a function that makes the tree of other tensors."""
    leaves, spec = pytree.tree_flatten(tree)
    others = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def tree_of(tensors):
        upcoming = iter(tensors)
        return pytree.tree_unflatten([next(upcoming) if leaf is _TENSOR else leaf for leaf in others], spec)

    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], others, tree_of


def _noted(forward, outputs, number):
    def run(*args, **kwargs):
        outputs.append(forward(*args, **kwargs))
        if len(outputs) == number:
            raise _Enough
        return outputs[-1]

    return run


@contextlib.contextmanager
def _uncounted(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context of code that makes tensors which a training would not make."""
    from torch.utils._python_dispatch import _disable_current_modes

    mode = next(tensor.fake_mode for tensor in tensors if hasattr(tensor, "fake_mode"))
    with _disable_current_modes(), mode, torch.enable_grad():
        yield


def _held(modules, recurse=True):
    """Lists the parameters and the buffers of modules, each once, because some are tied."""
    tensors = [parameter for module in modules for parameter in module.parameters(recurse)]
    tensors += [buffer for module in modules for buffer in module.buffers(recurse)]
    return [*{id(tensor): tensor for tensor in tensors}.values()]


def _holding(module: Module, held: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
    """Returns a context in which the first of ``tensors`` replace the module's parameters and buffers."""
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    given = {id(holder): tensor for holder, tensor in zip(held, tensors)}
    return _reparametrize_module(module, {name: given[id(tensor)] for name, tensor in every if id(tensor) in given})


def _key(module, parameters, tensors, others, budget):
    """Returns a key that is equal for modules that share a graph."""
    shapes = [
        (parameter.shape, parameter.stride(), parameter.dtype, parameter.requires_grad)
        for parameter in (*parameters, *tensors)
    ]
    return type(module), str(shapes), str(others), budget

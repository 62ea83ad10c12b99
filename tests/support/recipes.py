# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Random small models and how they are trained, described by data."""

import dataclasses
from typing import Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from support.faults import strike
from support.models import VOCABULARY, Block, double
from support.training import device

# How it is said which micro-batches belong to a step.
STEPS = ("counted", "boundary", "no_sync", "coalesce_grad_reduction")
EVALUATIONS = (None, "no_grad", "inference_mode", "in training mode", "with gradients", "for a gradient of its output")
KINDS = (
    *("linear", "block", "norm", "gain", "empty", "scalar", "sum of two"),
    *("token", "positions", "convolution", "max norm", "dropout", "noise", "unseen", "in place"),
    *("clamped", "shift", "shifting", "kept view", "transposed", "channels last"),
)
# Those whose forwards change parameters.
CHANGING = ("max norm", "clamped")
# Those whose buffers other code changes, which no checkpoint may compute again.
BUFFERED = ("shift", "shifting")
# Which parameters of a piece do not train: the first of its first module, all but the last of each, or all.
FREEZES = {
    "first": lambda modules: list(modules.parameters())[:1],
    "most": lambda modules: [parameter for module in modules for parameter in list(module.parameters())[:-1]],
    "all": lambda modules: modules.parameters(),
}
# In which order a body calls the modules of a piece, given how many there are.
ORDERS = {
    "twice": lambda number: [index // 2 for index in range(2 * number)],
    "reversed": lambda number: [*range(number)][::-1],
    "back": lambda number: [*range(number - 2), number - 1, *range(max(number - 2, 0), number)],
    "first between": lambda number: [place for index in range(1, number) for place in (index, 0)] or [0],
}
LONGEST = 8
# The label of tokens that do not count.
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a model's body; it maps [batch, length, width] to the same.

    Attributes:
        kind: one of ``KINDS``.
        repeats: how many modules of the kind, in a ModuleList, one after the other.
        like: None, or which of the pieces before lends its modules, counted from 0 and modulo their number.
        order: None, or in which order its modules are called: one of ``ORDERS``.
        between: None, or which of the pieces before lends its first module, which is called behind each of these.
        compiled: whether the compiler may look into it.
        breaks: whether the graph breaks behind each module.
        checkpointed: None, or whether activations are checkpointed reentrantly.
        skipped: whether it is left out in odd steps.
        frozen: None, or which of its parameters do not train: one of ``FREEZES``.
        hooked: None, or from which step on a hook doubles its last parameter's gradient; -1: since before the engine.
        hooked_alone: whether on rank 0 alone.
        changed: None, or from which step on, and to before which, a hook changes what its last module inside returns.
        changed_backward: whether that hook changes the gradients of the module's inputs instead.
        by_forward: whether the forwards of its modules are called, past the modules' own calls.
        reads_part: whether a part of its last module is used before its modules are called.
    """

    kind: str = "linear"
    repeats: int = 1
    like: Optional[int] = None
    order: Optional[str] = None
    between: Optional[int] = None
    compiled: bool = True
    breaks: bool = False
    checkpointed: Optional[bool] = None
    skipped: bool = False
    frozen: Optional[str] = None
    hooked: Optional[int] = None
    hooked_alone: bool = False
    changed: Optional[Tuple[int, int]] = None
    changed_backward: bool = False
    by_forward: bool = False
    reads_part: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model and how it is trained; ``docs/reference/options.md`` has the options.

    Attributes:
        lengths: of the sequences, in turn.
        uneven: whether rank 0 has a micro-batch of one sequence in odd steps.
        evaluates: how the model is called between micro-batches: one of ``EVALUATIONS``.
        alone: whether only rank 0 does that, and before the first step as well.
        losses: how many a micro-batch has, with a backward each.
        together: whether they have one backward.
        twice: whether each backward is run two times.
        says: who says which micro-batches belong to a step: DeepSpeed ("counted"), or its caller by one of ``STEPS``.
        raises: whether the second step's last micro-batch raises in its backward, and the step begins anew.
        drops: None, or how what the last step's first micro-batch left is dropped (one of ``DROPS``), and the step
            begins anew.
        clips: whether the rank's own gradients are clipped between micro-batches.
        each_rank_skips: whether ranks leave pieces out in different micro-batches, and not all in the same steps.
        one_pass: whether AdamW steps in one pass, as in a large partition.
        chunked_loss: whether the loss is computed in chunks, as that of many logits is.
        activation_budget: None, or how much of their activations graphs may keep, from 0 to 1.
        adam: whether the optimizer is AdamW instead of SGD.
        eight_bits: whether the optimizer's states are in 8 bits.
        remainders: whether master weights are kept as remainders of the parameters.
        rests: whether the learning rate of the second step is zero, as where a warm-up begins or a decay ends.
        penalized: whether a penalty on parameters has a backward of its own before that of each micro-batch.
        freezes: whether the first parameter is frozen between forward and backward in odd steps.
        moves: whether trained parameters get other memory in the second step's first backward.
        reads: None, or which trained parameter is read behind each step, when one rank sends parameters late.
        changes_parameters: whether a trained and a frozen parameter are changed by ``.data`` before the second step.
        changes_buffers: whether buffers are changed by ``.data`` before each step, and are others in a backward.
        ignores: None, or how the loss is reduced where rank 0 has no token that counts in odd steps: "mean", or "sum",
            which is divided by the number of tokens that count, also by 0.
        loss_scale: what losses are multiplied by.
        embedding_frozen: whether the embedding does not train, so that a gradient may end above the first block.
        shards: whether each rank keeps a part of the blocks' frozen parameters.
        shards_trained: whether also of the trained ones.
    """

    pieces: Tuple[Piece, ...] = (Piece(),)
    width: int = 4
    tied: bool = False
    unused: bool = False
    body_within: bool = False
    stage: int = 1
    accumulation: int = 1
    backend: str = "eager"
    bucket: int = 150
    groups: int = 1
    clipping: float = 0.0
    round_robin: bool = False
    overlap_comm: bool = True
    regional: Optional[bool] = None
    overlap_gather: Optional[bool] = None
    reads: Optional[int] = None
    offloaded: bool = False
    lengths: Tuple[int, ...] = (4,)
    uneven: bool = False
    evaluates: Optional[str] = None
    alone: bool = False
    direct: bool = False
    losses: int = 1
    together: bool = False
    twice: bool = False
    dtype: str = "fp32"
    says: str = "counted"
    raises: bool = False
    drops: Optional[str] = None
    clips: bool = False
    each_rank_skips: bool = False
    one_pass: bool = False
    chunked_loss: bool = False
    activation_budget: Optional[float] = None
    adam: bool = False
    eight_bits: bool = False
    remainders: bool = False
    rests: bool = False
    penalized: bool = False
    freezes: bool = False
    moves: bool = False
    changes_parameters: bool = False
    changes_buffers: bool = False
    ignores: Optional[str] = None
    loss_scale: float = 1.0
    embedding_frozen: bool = False
    shards: bool = False
    shards_trained: bool = False
    steps: int = 3


class Gain(nn.Module):
    """Multiplies by a parameter of the given shape and adds the sum of its elements."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return x * self.weight if self.weight.numel() else x + self.weight.sum()


class Itself(Block):
    """A block that asks what it is."""

    def forward(self, x):
        return super().forward(x) * (0.5 if type(self) is Itself else 2)


class SumOfTwo(nn.Module):
    """Two parameters with one gradient between them."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x + (self.first + self.second)


class Positions(nn.Module):
    """Adds a vector to each place of a sequence, the same in the whole batch."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, LONGEST * width).view(1, LONGEST, width))

    def forward(self, x):
        return x + self.weight[:, : x.shape[1]]


class Convolution(nn.Module):
    """A convolution along the sequence."""

    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class MaxNorm(nn.Module):
    """Adds vectors of an embedding, which are scaled down where they are looked up."""

    def __init__(self, width):
        super().__init__()
        self.codes = nn.Embedding(5, width, max_norm=0.5)

    def forward(self, x):
        return x + self.codes(torch.arange(5, device=x.device)).sum(0)


class Clamped(Gain):
    """The product with a parameter that uncompiled code has changed by ``.data``."""

    def forward(self, x):
        self.clamp()
        return super().forward(x)

    @torch.compiler.disable
    def clamp(self):
        self.weight.data.clamp_(-0.9, 0.9)


class Shift(Gain):
    """Adds a buffer. No operator saves the buffer for its backward, so it may change before."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, x):
        return super().forward(x) + self.shift.to(x.dtype)


class Shifting(Shift):
    """Adds a buffer that uncompiled code has changed by ``.data``."""

    def forward(self, x):
        self.change(x)
        return super().forward(x)

    @torch.compiler.disable
    def change(self, x):
        self.shift.data.copy_(x.detach().mean((0, 1)))


class Noise(Gain):
    """The product with a parameter, of which a fourth is dropped, also in evaluation mode."""

    def forward(self, x):
        return super().forward(x) * (torch.rand(x.shape, device=x.device) < 0.75)


class Dropout(Gain):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.25, self.training)


class Hidden:
    """Neither torch nor ``vars()`` finds the tensor in it."""

    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Unseen(nn.Module):
    """A linear layer that returns an object; :meth:`through` returns what is in it."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return Hidden(self.linear(x))

    def through(self, x):
        return self(x).x


class InPlace(Unseen):
    """Adds to its input in place, and returns nothing."""

    def forward(self, x):
        x.add_(self.linear(x.clone()))

    def through(self, x):
        x = x.clone()
        self(x)
        return x


class KeptView(Unseen):
    """Keeps a view of a parameter, which code behind its forward uses."""

    def forward(self, x):
        self.view = self.linear.weight[0]
        return self.linear(x)

    def through(self, x):
        return self(x) * self.view


def transposed(width):
    linear = nn.Linear(width, width)
    linear.weight = nn.Parameter(linear.weight.detach().t())
    return linear


class ChannelsLast(nn.Module):
    """A convolution along the sequence whose weight is not contiguous."""

    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv2d(width, width, (3, 1), padding=(1, 0)).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.convolution(x.transpose(1, 2).unsqueeze(3)).squeeze(3).transpose(1, 2)


MAKE = {
    "linear": lambda width: nn.Linear(width, width),
    "block": Itself,
    "norm": nn.LayerNorm,
    "gain": Gain,
    "empty": lambda width: Gain(0, 3),
    "scalar": lambda width: Gain(1),
    "sum of two": SumOfTwo,
    "token": lambda width: Gain(1, 1, width),
    "positions": Positions,
    "convolution": Convolution,
    "max norm": MaxNorm,
    "dropout": Dropout,
    "noise": Noise,
    "unseen": Unseen,
    "in place": InPlace,
    "clamped": Clamped,
    "shift": Shift,
    "shifting": Shifting,
    "kept view": KeptView,
    "transposed": transposed,
    "channels last": ChannelsLast,
}


class Body(nn.Module):
    """The embedding and the pieces of a recipe.

    ``as_compiled``: whether reentrant checkpoints train modules whose input needs no gradient. They do where
    torch.compile traces them, and elsewhere they give such modules no gradients.
    """

    def __init__(self, recipe):
        super().__init__()
        self.recipe = recipe
        self.as_compiled = False
        self.embedding = nn.Embedding(VOCABULARY, recipe.width)
        self.embedding.weight.requires_grad_(not recipe.embedding_frozen)
        # Aliases are pieces too, so that their parameters are registered once.
        self.lists = nn.ModuleList()
        for index, piece in enumerate(recipe.pieces):
            if piece.like is not None and index > 0:
                self.lists.append(self.lists[piece.like % index])
                continue
            modules = nn.ModuleList(MAKE[piece.kind](recipe.width) for _ in range(piece.repeats))
            for parameter in FREEZES[piece.frozen](modules) if piece.frozen is not None else ():
                parameter.requires_grad_(False)
            self.lists.append(modules)

    def forward(self, ids, skip=False):
        x = self.embedding(ids)
        for index, piece in enumerate(self.recipe.pieces):
            if skip and piece.skipped:
                continue
            run = self.in_graph if piece.compiled else self.eagerly
            if piece.reads_part:
                x = (self.through_part if piece.compiled else self.through_part_eagerly)(self.lists[index][-1], x)
            for module in self.called(index, piece):
                x = run(piece, module, x)
                if piece.breaks:
                    torch._dynamo.graph_break()
        return self.strike(x) if self.recipe.raises or self.recipe.moves else x

    def called(self, index, piece):
        """Lists the modules of a piece, and what is called between them, in the order of their calls."""
        modules = list(self.lists[index])
        if piece.order is not None:
            modules = [modules[number] for number in ORDERS[piece.order](len(modules))]
        if piece.between is None or index == 0:
            return modules
        lent = self.lists[piece.between % index][0]
        return [holder for module in modules for holder in (module, lent)]

    @torch.compiler.disable
    def strike(self, x):
        return strike(x)

    def in_graph(self, piece, module, x):
        if isinstance(module, Unseen):
            module = module.through
        elif piece.by_forward:
            module = module.forward
        if piece.checkpointed is None:
            return torch.tanh(x + module(x))
        reentrant = piece.checkpointed
        if self.as_compiled and piece.compiled and not x.requires_grad:
            reentrant = False
        return torch.tanh(x + checkpoint(module, x, use_reentrant=reentrant))

    def through_part(self, module, x):
        """Uses a module inside, if there is one that does not change what has rows of that width, and a parameter."""
        inside = getattr(module, "norm", None)
        x = x if inside is None else x + 0.1 * inside(x)
        return x + 0.1 * sum(parameter.mean() for parameter in module.parameters() if parameter.numel())

    @torch.compiler.disable
    def through_part_eagerly(self, module, x):
        return self.through_part(module, x)

    @torch.compiler.disable
    def eagerly(self, piece, module, x):
        return self.in_graph(piece, module, x)


class FromRecipe(nn.Module):
    """``forward(ids, skip, labels)`` returns the loss of predicting the labels."""

    def __init__(self, recipe):
        super().__init__()
        self.body = Body(recipe)
        self.head = nn.Linear(recipe.width, VOCABULARY, bias=False)
        if recipe.tied:
            self.head.weight = self.body.embedding.weight
        if recipe.unused:
            self.unused = nn.Parameter(torch.ones(5))

    def forward(self, ids, skip, labels):
        return self.loss(self.body(ids, skip), labels)

    def loss(self, x, labels):
        reduction = self.body.recipe.ignores or "mean"
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction=reduction)
        return loss / labels.ne(IGNORED).sum() if reduction == "sum" else loss


class OneModule(FromRecipe):
    """The same, but the pieces are called by the model itself."""

    def forward(self, ids, skip, labels):
        return self.loss(Body.forward(self.body, ids, skip), labels)


def build(recipe):
    torch.manual_seed(0)
    return (FromRecipe if recipe.body_within else OneModule)(recipe).to(device())


def halve(module, inputs, output):
    return output * 0.5


def halve_backward(module, of_inputs, of_outputs):
    return tuple(gradient if gradient is None else gradient * 0.5 for gradient in of_inputs)


def change_hooks(module, step, handles):
    """Adds and removes hooks before a step. ``handles``: {piece: handle}, of this model's modules.

    Step -1 is before the engine is made. Tensor hooks are not copied with a module.
    """
    for number, (piece, modules) in enumerate(zip(module.body.recipe.pieces, module.body.lists)):
        if piece.like is not None:
            continue
        last = [parameter for parameter in modules.parameters() if parameter.requires_grad][-1:]
        if step == piece.hooked and last and not (piece.hooked_alone and dist.get_rank() > 0):
            last[0].register_hook(double)
        if piece.changed is None:
            continue
        if step == piece.changed[1]:
            handles.pop(number).remove()
        if step == piece.changed[0]:
            inner = list(modules.modules())[-1]
            backward = piece.changed_backward
            handles[number] = (
                inner.register_full_backward_hook(halve_backward) if backward else inner.register_forward_hook(halve)
            )

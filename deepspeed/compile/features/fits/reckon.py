# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Adds up what a rank holds at the peak of each phase, for each mode."""

import itertools
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import Module, Parameter

from ..blocks.parameters import by_block
from ..eight_bit.blockwise import SIGNED, count_of_blocks
from ..one_pass_adam.dynamic_map import BLOCK
from . import fsdp2, sources
from .activations import Activations, Run
from .gradients import BUCKET, Sent, gathered_in_step, layout_of, send
from .modes import Mode, configured, modes_for

GIB = 2**30
_FP32, _REMAINDER = 4, 2  # bytes of a master weight, and of what is kept of one beside a bf16 parameter
# cuBLAS's and cuBLASLt's on an H100 or H200, which torch's allocator gives out: docs/performance.md has them at rest.
WORKSPACES = 2**26
# What is left out, and what was measured of it: the allocator reserved so much more than it had given out at the peak,
# from the least to the most of docs/performance.md's tables of the fork. NCCL and the CUDA context come on top.
RESERVED = (1.2, 9.1)
# A mode fits if so much is left, in GiB: what the allocator reserved beside the peak of Qwen3-8B on 2 GPUs.
MARGIN = 2.5


class Row(NamedTuple):
    """What a mode needs on the rank that needs the most, in bytes.

    Attributes:
        mode: the mode.
        at_rest: between two steps.
        forward, backward, step: the peaks of the phases; None where the model could not be traced.
        peak, phase: the highest of them, and which one it is.
        rank: the rank with the highest peak.
        parts: what the peak is made of.
    """

    mode: Mode
    at_rest: int
    forward: Optional[int]
    backward: Optional[int]
    step: int
    peak: int
    phase: str
    rank: int
    parts: Dict[str, int]


class Answer(NamedTuple):
    """Whether a model fits.

    Attributes:
        model: its class.
        elements, trained: of its parameters, and of those that are trained.
        gpus, memory: how many, and the GiB of each.
        sequence, micro_batch, accumulation: of a step.
        rows: the modes, the fastest first, and of those that are alike the one with the smallest peak.
        notes: what could not be reckoned, and why.
    """

    model: str
    elements: int
    trained: int
    gpus: int
    memory: float
    sequence: int
    micro_batch: int
    accumulation: int
    rows: List[Row]
    notes: List[str]

    def spare(self, row: Row) -> float:
        """Returns how many GiB a mode leaves, or lacks, beside the peak and ``MARGIN``."""
        return self.memory - MARGIN - row.peak / GIB


class Subject:
    """A model as tensors without memory, and what is known of it.

    Args:
        make_model: makes it.
        dtype: in which it trains.
        lora: the rank of adapters at the linear layers of its blocks, or None.
        say: is told what is being done.

    Attributes:
        untraceable: why the model cannot be traced, or None.
    """

    def __init__(
        self, make_model: Callable[[], Module], dtype: torch.dtype, lora: Optional[int], say: Callable[[str], None]
    ):
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        say("making the model without memory")
        try:
            with torch.device("meta"):
                try:
                    model = make_model()
                except (NotImplementedError, RuntimeError) as error:
                    raise sources.Unusable(
                        f"the model cannot be made without memory ({error}); leave its weights and its device to "
                        "the program that trains it"
                    ) from error
                if lora is not None:
                    sources.adapt(model, Run(model, say).blocks or [model], lora)
        finally:
            torch.set_default_dtype(before)
        with self.fake:
            sources.without_memory(model, dtype)
        self.model = model.train()
        self.run = Run(self.model, say)
        self._say = say
        named = dict(self.model.named_parameters())
        self.trained = {name: each for name, each in named.items() if each.requires_grad}
        self.names = list(self.trained)
        self.flat = [Parameter(torch.empty(each.shape, dtype=dtype, device="meta")) for each in self.trained.values()]
        frozen = [each for each in named.values() if not each.requires_grad]
        self.frozen = sum(each.numel() * each.element_size() for each in frozen)
        self.elements = sum(each.numel() for each in named.values())
        self.buffers = sum(each.numel() * each.element_size() for each in self.model.buffers())
        _, *of_blocks = by_block(frozen, self.model, self.run.blocks)
        self.frozen_of_blocks = [sum(each.numel() * each.element_size() for each in block) for block in of_blocks]
        self.untraceable: Optional[str] = None
        self.sent: Dict[Tuple, Sent] = {}
        self._activations: Dict[Tuple, Activations] = {}

    def activations(self, mode: Mode, make_batch: Callable[[Module], Dict[str, Any]]) -> Optional[Activations]:
        """Returns those of a mode, which are reckoned once, or None if the model cannot be traced."""
        key = mode.of_activations
        if key not in self._activations and self.untraceable is None:
            try:
                with self.fake, sources.whole_rows():
                    batch = make_batch(self.model)
                    self._say(f"running a forward and a backward without memory: {mode.name}")
                    self._activations[key] = self.run.run(batch, sources.loss_of, *key)
            except Exception as error:  # noqa: BLE001  whatever the model's code raises without values
                self.untraceable = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return self._activations.get(key)

    def units(self) -> List[fsdp2.Unit]:
        """Returns what FSDP2 gathers together, in the order of the forward.

        That is what is before the blocks, each block, and what is behind them. Tied weights are used before and
        behind, so then both are one unit, the root's, which is whole from the forward to the end of the backward.
        """
        every = [*self.model.named_parameters(remove_duplicate=False)]
        is_tied = len({id(each) for _, each in every}) < len(every)
        names = {id(each): name for name, each in reversed(every)}
        places = {id(each): place for place, (_, each) in reversed([*enumerate(every)])}
        outside, *blocks = by_block(self.model.parameters(), self.model, self.run.blocks)
        first = min((places[id(each)] for block in blocks for each in block), default=0)
        after = [each for each in outside if places[id(each)] > first and not is_tied]
        before = [each for each in outside if places[id(each)] < first or is_tied]
        return [
            fsdp2.Unit(
                [names[id(each)] for each in unit if each.requires_grad],
                sum(each.numel() for each in unit),
                is_tied and unit is before,
            )
            for unit in (before, *blocks, after)
            if unit
        ]


def fits_of(
    make_model: Callable[[], Module],
    gpus: int,
    memory: float,
    sequence: int,
    micro_batch: int,
    accumulation: int,
    lora: Optional[int],
    make_batch: Optional[sources.MakeBatch],
    config: Optional[Dict[str, Any]],
    checkpoint: bool,
    dtype: torch.dtype,
    modes: Optional[Sequence[Mode]],
    say: Callable[[str], None],
) -> Answer:
    """Returns what :func:`deepspeed.compile.features.fits.fits` returns."""
    subject, notes = Subject(make_model, dtype, lora, say), []
    if not subject.trained:
        raise sources.Unusable("no parameter of the model is trained; set requires_grad of some")
    if modes is None:
        has_blocks = bool(subject.run.blocks)
        modes = modes_for(lora is None and not subject.frozen, gpus, has_blocks)
        if not has_blocks:
            notes.append(f"The model is one graph, because {subject.run.why_whole}: no mode by blocks.")
    bucket = BUCKET
    if config is not None:
        modes = [configured(config, checkpoint), *modes]
        bucket = int(config.get("zero_optimization", {}).get("reduce_bucket_size", BUCKET))

    rows: List[Row] = []
    for mode in modes:
        row = row_of(subject, mode, gpus, sequence, micro_batch, accumulation, make_batch, bucket)
        rows += [] if row is None else [row]
    if subject.untraceable is not None:
        notes.append(
            f"{type(subject.model).__name__} could not be traced ({subject.untraceable}), so the table "
            "lacks activations."
        )
    rows.sort(key=lambda row: (row.mode.pace, row.peak))
    trained = sum(each.numel() for each in subject.trained.values())
    name = type(subject.model).__name__
    return Answer(name, subject.elements, trained, gpus, memory, sequence, micro_batch, accumulation, rows, notes)


def row_of(
    subject: Subject,
    mode: Mode,
    gpus: int,
    sequence: int,
    micro_batch: int = 1,
    accumulation: int = 1,
    make_batch: Optional[sources.MakeBatch] = None,
    bucket: int = BUCKET,
) -> Optional[Row]:
    """Returns what a mode needs, or None of FSDP2 where the model cannot be traced. Arguments: as of ``fits()``."""

    def batch_of(model: Module) -> Dict[str, torch.Tensor]:
        if make_batch is not None:
            return make_batch(micro_batch, sequence)
        return sources.batch_for(model, micro_batch, sequence)

    activations = subject.activations(mode, batch_of)
    if mode.system == "fsdp2":
        return None if activations is None else _of_fsdp2(subject, mode, activations, gpus, accumulation)

    def sent(arrivals: Tuple[int, ...], rank: int) -> Sent:
        key = arrivals, gpus, rank, mode.stage, accumulation, bucket, mode.offload
        if key not in subject.sent:
            subject.sent[key] = send(subject.flat, *key)
        return subject.sent[key]

    ranks = sorted({0, gpus // 2, max(gpus - 2, 0), gpus - 1})
    rows = [_of_fork(subject, mode, activations, gpus, rank, sent) for rank in ranks]
    highest = max(rows, key=lambda row: row.peak)
    if activations is None:
        return highest
    phases = {phase: max(getattr(row, phase) for row in rows) for phase in ("at_rest", "forward", "backward", "step")}
    return highest._replace(**phases)


def states(flat: Sequence[torch.Tensor], ranks: int, rank: int, mode: Mode) -> Dict[str, int]:
    """Returns the bytes of a rank's masters and moments."""
    numel = layout_of(flat, ranks).partition_size[0]
    if mode.offload:
        return {"masters": 0, "moments": 0}
    moments = 2 * _FP32 * numel
    if mode.eight_bit:
        moments = len(SIGNED) * count_of_blocks(rank * numel, numel) * (BLOCK + _FP32)
    return {"masters": (_REMAINDER if mode.remainders else _FP32) * numel, "moments": moments}


def _of_fork(subject, mode, activations, ranks, rank, sent):
    flat = subject.flat
    whole = layout_of(flat, ranks).partition_size[0] * ranks * flat[0].element_size()
    in_blocks = sum(subject.frozen_of_blocks) if mode.shard_frozen else 0
    parts = {
        "parameters": whole + subject.frozen - in_blocks + in_blocks // ranks + subject.buffers,
        **states(flat, ranks, rank, mode),
        "workspaces of cuBLAS": WORKSPACES,
    }
    at_rest = sum(parts.values())
    # A block in use, and one on its way.
    gathered = 2 * max(subject.frozen_of_blocks) if in_blocks else 0
    if activations is None:
        bound = 0 if mode.offload else layout_of(flat, ranks).partition_size[0] * flat[0].element_size()
        step = at_rest + bound
        return Row(mode, at_rest, None, None, step, step, "step", rank, {**parts, "gradients": bound})
    place = {name: index for index, name in enumerate(subject.names)}
    arrivals = tuple(place[moment.gradient] for moment in activations.backward if moment.gradient is not None)
    gradients = sent(arrivals, rank)
    held, arrived = gradients.before, iter(gradients.arrived)
    found = []  # (phase, bytes, parts)
    for phase, moments in (("forward", activations.forward), ("backward", activations.backward)):
        before = 0 if phase == "forward" else activations.forward[-1].after
        for moment in moments:
            kept = max(min(before, moment.most), 0)
            more = {
                "gradients": held,
                "activations": kept,
                "what graphs work with": moment.most - kept,
                "gathered blocks": gathered if moment.in_block else 0,
                "batch": activations.inputs,
            }
            found.append((phase, at_rest + sum(more.values()), {**parts, **more}))
            before = moment.after
            if moment.gradient is not None:
                held = next(arrived)
    more = {"gradients": gradients.bound, "small gradients together": gathered_in_step(flat, ranks, rank)}
    found.append(("step", at_rest + sum(more.values()), {**parts, **more}))
    peaks = {
        phase: max(each[1] for each in of_phase) for phase, of_phase in itertools.groupby(found, lambda each: each[0])
    }
    phase, peak, parts = max(found, key=lambda each: each[1])
    parts = {name: count for name, count in parts.items() if count}
    return Row(mode, at_rest, peaks["forward"], peaks["backward"], peaks["step"], peak, phase, rank, parts)


def _of_fsdp2(subject, mode, activations, ranks, accumulation):
    sizes = {name: each.numel() for name, each in subject.trained.items()}
    size = subject.flat[0].element_size()
    found = fsdp2.peaks_of(activations, subject.units(), sizes, ranks, mode.reshard, size)
    # Until the last micro-batch, as benchmarks/systems.py sets it up, gradients are whole and not reduced.
    waiting = size * sum(sizes.values()) if accumulation > 1 else 0
    more = (0, waiting, waiting, 0)
    at_rest, *peaks = (each + WORKSPACES + subject.buffers + held for each, held in zip(found, more))
    forward, backward, step = peaks
    phase, peak = max(zip(("forward", "backward", "step"), peaks), key=lambda each: each[1])
    parts = {"at rest": at_rest, "beside it": peak - at_rest}
    return Row(mode, at_rest, forward, backward, step, peak, phase, ranks - 1, parts)

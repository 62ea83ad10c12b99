# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Adds up a rank's memory at the peak of each phase, for each mode."""

import contextlib
import dataclasses
import itertools
import logging
import os
import time
import traceback
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import Module, Parameter

from ...features.blocks.choose_blocks import choose_blocks
from ...features.blocks.parameters import by_block
from ...features.copy_engines.carrier import device_bytes
from ...features.shard_parameters.feature import frozen_of_blocks
from ...features.shard_parameters.keep import LEFT_FREE, kept_by_default
from ...features.shard_parameters.outside import large_outside, read_times
from ...features.shard_parameters.whole_units import MOST_GATHERED
from ...features.update.blockwise import SIGNED
from ...features.update.dynamic_map import BLOCK
from . import configuration, fsdp2, sources
from .activations import Activations, Run, Untraceable
from .gradients import Sent, gathered_in_step, layout_of, send
from .liveness import bytes_of
from .long_sequences import Unsuitable
from .modes import CHECKPOINTED, SHARDED, Mode, Question, modes_for
from .time_limit import OutOfTime, within

GIB = 2**30
_FP32, _REMAINDER = 4, 2  # bytes of a master weight, and of its remainder
# Workspaces of cuBLAS and cuBLASLt on an H100 or H200, in torch's allocator: benchmarks/fits.py has runs at rest.
WORKSPACES = 2**26
# So many GPUs are taken to be in one host, where copy engines carry gradients.
GPUS_OF_A_HOST = 8
# The part of a GPU's nominal memory in GB that torch shows in GiB: 79.1 of an H100's 80, 39.4 of an A100's 40.
SHOWN = 0.985
# GiB of a GPU that a process takes outside of torch's allocator, the most that was measured on H200s (2026-11-27):
# 1.30 to 1.81 alone, by `benchmarks.fits_here`, and 2.05 to 2.52 with NCCL between 2 GPUs, by `benchmarks.compare`.
# NCCL between more GPUs may take more.
CONTEXT, NCCL = 1.81, 0.71
# The memory that the allocator reserved beyond the peak, as a part of the peak: the most that benchmarks.measure and
# benchmarks.lengths have seen, on GPUs with memory to spare. Short of memory it may reserve less: not measured.
RESERVED = {"fork": 0.23, "fork in tiles": 0.41, "fsdp2": 0.36}
_PHASES = ("forward", "backward", "step")
# Where no mode fits, up to so many GPUs are tried, and at least up to eight times those that are asked for.
MOST_GPUS = 256


class Row(NamedTuple):
    """The memory of a mode on the rank that needs the most, in bytes."""

    mode: Mode
    lines: List[str]
    at_rest: int  # bytes between two steps
    # forward, backward, step: the peaks of the phases; None if the model could not be traced.
    forward: Optional[int]
    backward: Optional[int]
    step: int
    # peak, phase: the highest peak, and its phase.
    peak: int
    phase: str
    rank: int  # the rank with the highest peak
    parts: Dict[str, int]  # the parts of the peak: name -> bytes
    on_host: int = 0  # bytes of the host's memory for inputs of checkpointed layers


class Answer(NamedTuple):
    """Whether a model fits."""

    model: str  # the model's class
    # elements, trained: elements of all parameters, and of the trained parameters.
    elements: int
    trained: int
    question: Question
    rows: List[Row]  # the rows of the modes: the configuration's first, then by pace, then by peak
    first: Row  # the row of the configuration, or of the first mode
    notes: List[str]  # sentences that say what could not be estimated, and why
    has_config: bool  # whether the question has a configuration
    # Where no mode fits, a number of GPUs on which one does, and its row. None if so many as are tried are too few.
    enough: Optional[Tuple[int, Row]] = None

    @property
    def left_out(self) -> Dict[str, float]:
        """The GiB of a GPU that torch's allocator never has."""
        return _left_out(self.question)

    def spare(self, row: Row) -> float:
        """Returns the GiB that the peak of a mode leaves, negative if it does not fit."""
        return _room(self.question) - row.peak / GIB

    def verdict(self, row: Row) -> str:
        """Returns "yes", "tight", "no" or "unknown".

        A mode is tight if it leaves less than the allocator has been seen to reserve beyond the peak.
        """
        if self.spare(row) < 0:
            return "no"
        if row.forward is None:
            return "unknown"
        return "yes" if self.spare(row) >= self.reserved(row.mode) * row.peak / GIB else "tight"

    def reserved(self, mode: Mode) -> float:
        """Returns what the allocator has been seen to reserve beyond the peak, as a part of it."""
        has_tiles = self.question.mlp_tiles or self.question.loss_tiles
        return RESERVED["fork in tiles" if has_tiles and mode.system == "fork" else mode.system]


def _left_out(question):
    shown = {"not shown by the GPU": (1 - SHOWN) * question.memory, "CUDA context": CONTEXT}
    return {**shown, "NCCL": NCCL} if question.gpus > 1 else shown


def _room(question):
    """Returns the GiB of a GPU that torch's allocator can have."""
    return question.memory - sum(_left_out(question).values())


class Subject:
    """A model as tensors without memory, and its properties.

    Args:
        make_model: makes the model.
        question: the user's question. Its dtype is not None.

    Attributes:
        blocks: the blocks that have graphs of their own.
        why_whole: the reason why there are none, or "".
        repeated: the blocks for modes that need blocks.
        untraceable: the reasons why the model could not be traced.
        is_late: whether tracing took more time than it may.
        without_adapters: the classes of modules with matrices that have no adapter.
    """

    def __init__(self, make_model: Callable[[], Module], question: Question, say: Callable[[str], None]):
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        dtype: Any = question.dtype
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        say("making the model without memory")
        self.without_adapters = set()
        try:
            with torch.device("meta"):
                try:
                    model = make_model()
                except sources.Unusable:
                    raise
                except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the caller's code raises
                    raise sources.Unusable(
                        f"the model cannot be made without memory ({sources.reason(error)}); name a function without "
                        "arguments, and leave its weights and its device to the program that trains it"
                    ) from error
                if not isinstance(model, Module):
                    raise sources.Unusable(
                        f"what makes the model returned {type(model).__name__}, and no "
                        "torch.nn.Module; name a function that returns a model"
                    )
                if question.lora is not None:
                    blocks, _ = choose_blocks(model, question.regional, {}, needed=True)
                    self.without_adapters = sources.adapt(model, blocks or [model], question.lora)
        finally:
            torch.set_default_dtype(before)
        with self.fake:
            sources.without_memory(model, dtype)
        self.model = model.train()
        self._say = say
        self.blocks, self.why_whole = choose_blocks(model, question.regional, {})
        self.repeated = self.blocks or choose_blocks(model, question.regional, {}, needed=True)[0]
        # By whether a mode needs blocks.
        self._runs = {False: Run(model, self.blocks, say, question), True: Run(model, self.repeated, say, question)}
        named = dict(self.model.named_parameters())
        self.trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.names = list(self.trained)
        self.flat = [
            Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta")) for parameter in self.trained.values()
        ]
        self.frozen = sum(bytes_of(parameter) for parameter in named.values() if not parameter.requires_grad)
        self.elements = sum(parameter.numel() for parameter in named.values())
        self.buffers = sum(map(bytes_of, self.model.buffers()))
        frozen = frozen_of_blocks(self.model, self.repeated, list(self.trained.values()))
        self.frozen_of_blocks = [sum(map(bytes_of, block)) for block in frozen]
        place = {id(parameter): index for index, parameter in enumerate(self.trained.values())}
        outside, *trained = by_block(self.trained.values(), self.model, self.repeated)
        large = large_outside(outside, self.model, self.repeated) if self.repeated else []
        first, after = read_times(large, self.model, self.repeated)
        last = {*after, *large}.difference({*first}.difference(after))
        # Parameters that are read before the blocks, those of each block, and those that are read after the blocks.
        units = [first, *trained, last]
        self.trained_of_units = [[self.flat[place[id(parameter)]] for parameter in unit] for unit in units]
        self.untraceable: Dict[Tuple, str] = {}
        self._seconds, self.is_late = question.seconds, False
        self.sent: Dict[Tuple, Sent] = {}
        self._activations: Dict[Tuple, Activations] = {}

    def activations(self, mode: Mode, question: Question) -> Optional[Activations]:
        """Returns the activations of a mode, computed once, or None if the model cannot be traced, or not in time."""
        by_blocks = mode.by_blocks and not self.blocks
        key = by_blocks, question.sequence, question.sequence_ranks, question.micro_batch, *mode.of_activations
        if key in self._activations or key in self.untraceable:
            return self._activations.get(key)
        if self._seconds <= 0:
            self.is_late = True
            return None
        began = time.monotonic()
        make_batch = question.batch or (lambda *sizes: sources.batch_for(self.model, *sizes))
        tokens = -(-(question.sequence or 1) // question.sequence_ranks)

        def run():
            with self.fake, sources.whole_rows():
                batch = make_batch(question.micro_batch or 1, tokens)
                self._say(f"estimating activations: {mode.name}")
                return self._runs[by_blocks].run(batch, sources.loss_of, *mode.of_activations)

        try:
            with _without_logs():
                self._activations[key] = within(self._seconds, run)
        except OutOfTime:
            self.is_late = True
        except Unsuitable:
            raise
        except Exception as error:  # noqa: BLE001  whatever the model's code raises without values
            if _is_own(error):
                raise
            self.untraceable[key] = sources.reason(error)
        self._seconds -= time.monotonic() - began
        return self._activations.get(key)

    def units(self, ranks: int) -> List[fsdp2.Unit]:
        """Returns FSDP2's units in the order of the forward: parameters before the blocks, each block, and parameters
        after the blocks.

        Tied weights are used before and after, so then both are one unit, the root's, which is unsharded from the
        forward to the end of the backward.
        """
        every = [*self.model.named_parameters(remove_duplicate=False)]
        is_tied = len({id(parameter) for _, parameter in every}) < len(every)
        names = {id(parameter): name for name, parameter in reversed(every)}
        places = {id(parameter): place for place, (_, parameter) in reversed([*enumerate(every)])}
        outside, *blocks = by_block(self.model.parameters(), self.model, self.repeated)
        first = min((places[id(parameter)] for block in blocks for parameter in block), default=0)
        after = [parameter for parameter in outside if places[id(parameter)] > first and not is_tied]
        before = [parameter for parameter in outside if places[id(parameter)] < first or is_tied]
        return [
            fsdp2.Unit(
                [names[id(parameter)] for parameter in unit if parameter.requires_grad],
                sum(parameter.numel() for parameter in unit),
                sum(fsdp2.share_of(parameter.shape, ranks) for parameter in unit if not parameter.requires_grad),
                sum(fsdp2.share_of(parameter.shape, ranks) for parameter in unit if parameter.requires_grad),
                is_tied and unit is before,
            )
            for unit in (before, *blocks, after)
            if unit
        ]


def _is_own(error):
    """Whether an error is a mistake of this folder, and not an error of the model's code or the compiler."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    says = isinstance(error, (sources.Unusable, Untraceable)) or frame.name == "__torch_dispatch__"
    return os.path.dirname(frame.filename) == os.path.dirname(__file__) and not says


@contextlib.contextmanager
def _without_logs():
    """Context in which torch does not tell the errors of a model that it cannot trace: the answer has them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def fits(
    make_model: Callable[[], Module],
    config: Optional[Dict[str, Any]] = None,
    checkpoint: bool = False,
    modes: Optional[Sequence[Mode]] = None,
    say: Callable[[str], None] = lambda sentence: None,
    **asked: Any,
) -> Answer:
    """Estimates the memory that a model needs in each mode.

    Args:
        make_model: makes the model, as tensors without memory.
        config: a DeepSpeed configuration, which becomes a mode of its own.
        checkpoint: whether the configuration's mode computes each block again in the backward.
        modes: the modes to estimate, by default all that have a meaning.
        say: a function that gets a sentence about each step of the work.
        asked: the fields of ``modes.Question``: ``gpus``, ``memory``, ``sequence`` and others.

    Raises:
        ValueError: if the model cannot be made, or if the question has an option that is not estimated.
    """
    question, given, notes = Question(**asked), [], []
    if config is not None:
        mode, question, notes = configuration.apply(config, question, checkpoint)
        given = [mode]
    question = dataclasses.replace(
        question,
        dtype=question.dtype or torch.bfloat16,
        micro_batch=question.micro_batch or 1,
        accumulation=question.accumulation or 1,
    )
    subject = Subject(make_model, question, say)
    if question.batch is None and sources.takes_images(subject.model):
        if question.sequence is not None:
            raise sources.Unusable(
                f"{type(subject.model).__name__} takes images, whose size its configuration has; name no sequence"
            )
    else:
        question = dataclasses.replace(question, sequence=sources.tokens_for(subject.model, question.sequence))
    if not subject.trained:
        raise sources.Unusable("no parameter of the model is trained; set requires_grad of some")
    if modes is None:
        modes = modes_for(question, any(subject.frozen_of_blocks), bool(subject.repeated))
    if not subject.blocks:
        by_blocks = "; lines with regional_compilation make blocks" if subject.repeated else ": no mode by blocks"
        notes.append(f"The model is one graph, because {subject.why_whole}{by_blocks}.")
    if question.batch is None and (unread := sources.unread(subject.model)):
        notes.append(
            f"{' and '.join(unread).capitalize()} are not counted: what reads them has activations and gradients "
            "beyond these figures."
        )
    if getattr(getattr(subject.model, "config", None), "quantization_config", None):
        notes.append("The quantization of the configuration is not counted: these are the figures of dense weights.")
    if subject.without_adapters:
        notes.append(f"Without adapters are {', '.join(sorted(subject.without_adapters))}.")
    found = [row_of(subject, mode, question) for mode in (*given, *modes)]
    # Leave out a mode that keeps no block, or whose option of activations lowers no peak: the mode without the option
    # has the same numbers.
    plain = {_without_options(row.mode): row.peak for row in found if row is not None and _is_plain(row.mode)}
    if subject.is_late:
        notes.append(
            f"Tracing took more than {question.seconds:g} s: rows that say unknown have weights, gradients and states "
            "without activations, and FSDP2 may have none; give it more time with --seconds."
        )
    rows = [
        row for row in found if row is not None and (row is found[0] or (row.mode.keep != 0 and _gains(row, plain)))
    ]
    if not rows:
        raise sources.Unusable(f"nothing can be estimated ({', '.join(subject.untraceable.values()) or notes[-1]})")
    for why in dict.fromkeys(subject.untraceable.values()):
        notes.append(
            f"{type(subject.model).__name__} could not be traced ({why}): rows that lack activations say unknown, and "
            "FSDP2 has none. If it takes other arguments, call fits(..., batch=...) with a function that makes them."
        )
    first, others = rows[0], rows[len(given) :]
    others.sort(key=lambda row: (row.mode.pace, row.peak))
    trained = sum(parameter.numel() for parameter in subject.trained.values())
    ordered = [*rows[: len(given)], *others]
    name = type(subject.model).__name__
    answer = Answer(name, subject.elements, trained, question, ordered, first, notes, bool(given))
    if all(answer.verdict(row) == "no" for row in ordered if row.mode.system == "fork"):
        answer = answer._replace(enough=_enough_gpus(subject, question))
    return answer


def most_gpus(question: Question) -> int:
    """Returns up to how many GPUs are tried where no mode fits."""
    return max(MOST_GPUS, 8 * question.gpus)


def _enough_gpus(subject, question):
    """Returns the first of twice, four times ... as many GPUs on which a mode of the fork fits, and the mode's row."""
    modes = None
    most = most_gpus(question)
    while question.gpus * 2 <= most:
        question = dataclasses.replace(question, gpus=question.gpus * 2)
        if modes is None:
            modes = modes_for(question, any(subject.frozen_of_blocks), bool(subject.repeated))
            modes = [mode for mode in modes if mode.system == "fork" and mode.keep is None]
            # With more GPUs, these need less and less.
            modes = [mode for mode in modes if mode.shard_parameters == "all"] or modes
        lowest = min((row_of(subject, mode, question) for mode in modes), key=lambda row: row.peak)
        if lowest.forward is None:
            # What is known is less than the peak.
            return None
        if lowest.peak / GIB <= _room(question):
            return question.gpus, lowest
        modes = [lowest.mode]
    return None


def _is_plain(mode):
    return mode.budget is None and mode.chunked_loss is None


def _without_options(mode):
    return dataclasses.replace(mode, name="", pace=0, budget=None, chunked_loss=None)


def _gains(row, plain):
    """Whether a mode has no option of activations, or a lower peak than the mode without it in ``plain``."""
    return _is_plain(row.mode) or row.peak < plain.get(_without_options(row.mode), row.peak + 1)


def row_of(subject: Subject, mode: Mode, question: Question) -> Optional[Row]:
    """Returns the row of a mode, or None for FSDP2 if the model cannot be traced."""
    activations = subject.activations(mode, question)
    if mode.system == "fsdp2":
        return None if activations is None else _of_fsdp2(subject, mode, activations, question)
    if mode.keep == "fit":
        return _with_what_fits(subject, mode, question)
    # Each rank has as much as the first: parts of parameters are equal, and the last ones have padding.
    return _of_fork(subject, mode, activations, question)


def _with_what_fits(subject, mode, question):
    """Returns the row of ``"keep_gathered": "fit"``, which keeps as many blocks as a GPU's memory has room for."""
    every = len(subject.repeated)
    free = LEFT_FREE * SHOWN * question.memory

    def row_with(kept):
        name = f"{mode.name}: {kept} of {every} blocks" if kept else mode.name
        # Blocks that are not kept are gathered again.
        pace = mode.pace if kept == every else max(mode.pace, SHARDED + CHECKPOINTED * mode.checkpoint)
        numbered = dataclasses.replace(mode, name=name, pace=pace, keep=kept)
        return row_of(subject, numbered, question)._replace(lines=_lines_of(subject, mode))

    rows = map(row_with, range(every, 0, -1))
    return next((row for row in rows if row.peak / GIB <= _room(question) - free), None) or row_with(0)


def states(flat: Sequence[torch.Tensor], ranks: int, mode: Mode) -> Dict[str, int]:
    """Returns the bytes of a rank's masters and moments."""
    numel = layout_of(flat, ranks).partition_numel
    if mode.offload:
        return {"masters": 0, "moments": 0}
    moments = 2 * _FP32 * numel
    if mode.eight_bit:
        moments = len(SIGNED) * numel // BLOCK * (BLOCK + _FP32)
    return {"masters": (_REMAINDER if mode.remainders else _FP32) * numel, "moments": moments}


def _lines_of(subject, mode):
    # All models of transformers have the method, and those that do not support it raise in it.
    has_method = hasattr(subject.model, "gradient_checkpointing_enable")
    return mode.lines(getattr(subject.model, "supports_gradient_checkpointing", has_method), not subject.blocks)


def _parameters(subject, mode, ranks):
    """Returns the bytes of parameters that are always on a rank, and a list of bytes that must be gathered.

    The list has parameters that are read before the blocks, those of each block, and those read after the blocks.
    """
    layout, size = layout_of(subject.flat, ranks), subject.flat[0].element_size()
    whole, frozen = layout.flat_numel * size, sum(subject.frozen_of_blocks)
    if mode.shard_parameters is None or ranks == 1:
        return whole + subject.frozen, []
    always = subject.frozen - frozen + frozen // ranks
    if mode.shard_parameters == "frozen":
        return whole + always, [0, *subject.frozen_of_blocks, 0]
    gathered_bytes = {id(place.parameter): ranks * place.shard * size for place in layout.places}
    away = [
        sum(gathered_bytes[id(parameter)] for parameter in unit) + of_frozen
        for unit, of_frozen in zip(subject.trained_of_units, (0, *subject.frozen_of_blocks, 0), strict=True)
    ]
    # Other parameters are whole too, beside a rank's part of them. Tied weights are read before blocks and after them.
    gathered = {id(parameter) for unit in subject.trained_of_units for parameter in unit}
    others = sum(nbytes for identity, nbytes in gathered_bytes.items() if identity not in gathered)
    return layout.partition_numel * size + others + always, away


def _gathered(away, kept, blocks, is_backward):
    """Yields the gathered bytes in each moment.

    Args:
        away: the bytes to gather, from :func:`_parameters`; [] if none.
        kept: the number of blocks, the last ones, that stay unsharded from their forward to their backward.
        blocks: the numbers of the blocks that run in the moments, or None.
        is_backward: whether the blocks are in reverse order. The backward of an embedding reads no weight.
    """
    last, direction = len(away) - 1, -1 if is_backward else 1
    place = last if is_backward else 0
    for block in blocks:
        if block is not None:
            place = block + 1
        elif place == (1 if is_backward else last - 1):
            place += direction
        # A forward reshards all blocks at its end.
        ahead = 1 if is_backward and place == last else MOST_GATHERED
        upcoming = set(range(place, place + direction * ahead, direction))
        upcoming.update(range(max(last - kept, 1), min(place, last)))
        yield sum(away[unit] for unit in upcoming if (1 if is_backward else 0) <= unit <= last)


def _of_fork(subject, mode, activations, question):
    flat, ranks = subject.flat, question.gpus
    parameters, away = _parameters(subject, mode, ranks)
    parts = {
        "parameters": parameters + subject.buffers,
        **states(flat, ranks, mode),
        "workspaces of cuBLAS": WORKSPACES,
    }
    if question.copy_engines is not False and 1 < ranks <= GPUS_OF_A_HOST:
        parts["copy engines"] = device_bytes(ranks)
    lines, at_rest = _lines_of(subject, mode), sum(parts.values())
    if activations is None:
        bound = 0 if mode.offload else layout_of(flat, ranks).partition_numel * flat[0].element_size()
        step = at_rest + bound
        return Row(mode, lines, at_rest, None, None, step, step, "step", 0, {**parts, "gradients": bound})
    place = {name: index for index, name in enumerate(subject.names)}
    arrivals = tuple(place[moment.gradient] for moment in activations.backward if moment.gradient is not None)
    # DeepSpeed's default where several ranks share a sequence.
    sent = torch.float32 if question.sequence_ranks > 1 else None
    key = arrivals, ranks, mode.stage, question.accumulation, question.bucket, question.overlap, mode.offload, sent
    if key not in subject.sent:
        subject.sent[key] = send(flat, *key)
    gradients = subject.sent[key]
    held, arrived = gradients.before, iter(gradients.arrived)
    kept = mode.keep
    if kept is None:
        kept = kept_by_default(ranks) if mode.shard_parameters == "all" else 0
    found = []  # (phase, bytes of gradients, of activations, of graphs' temporaries, of gathered blocks)
    for phase, moments in (("forward", activations.forward), ("backward", activations.backward)):
        before = 0 if phase == "forward" else activations.forward[-1].after
        sums = _gathered(away, kept, [moment.block for moment in moments], phase == "backward")
        for moment, gathered in zip(moments, sums, strict=True):
            saved = max(min(before, moment.most), 0)
            found.append((phase, held, saved, moment.most - saved, gathered))
            before = moment.after
            if moment.gradient is not None:
                held = next(arrived)
    names = ("gradients", "activations", "what graphs work with", "gathered blocks")
    highest = {
        phase: max(phase_moments, key=lambda at_moment: sum(at_moment[1:]))
        for phase, phase_moments in itertools.groupby(found, lambda at_moment: at_moment[0])
    }
    more = {
        phase: {**dict(zip(names, at_moment[1:])), "batch": activations.inputs} for phase, at_moment in highest.items()
    }
    more["step"] = {"gradients": gradients.bound, "small gradients together": gathered_in_step(flat, ranks)}
    forward, backward, step = (at_rest + sum(more[phase].values()) for phase in _PHASES)
    peak, phase = max(zip((forward, backward, step), _PHASES), key=lambda peak_of_phase: peak_of_phase[0])
    parts = {name: count for name, count in {**parts, **more[phase]}.items() if count}
    return Row(mode, lines, at_rest, forward, backward, step, peak, phase, 0, parts, activations.on_host)


def _of_fsdp2(subject, mode, activations, question):
    sizes = {name: parameter.numel() for name, parameter in subject.trained.items()}
    size = subject.flat[0].element_size()
    several, reduces = question.accumulation > 1, mode.stage == 2
    found = fsdp2.peaks_of(
        activations, subject.units(question.gpus), sizes, mode.reshard, size, adds=several and reduces
    )
    # As benchmarks/systems.py sets it up for ZeRO-1, gradients are whole and not reduced until the last micro-batch.
    waiting = size * sum(sizes.values()) if several and not reduces else 0
    more = (0, waiting, waiting, 0)
    at_rest, forward, backward, step = (part + WORKSPACES + subject.buffers + held for part, held in zip(found, more))
    peak, phase = max(zip((forward, backward, step), _PHASES), key=lambda peak_of_phase: peak_of_phase[0])
    parts = {"at rest": at_rest, "beside it": peak - at_rest}
    lines = _lines_of(subject, mode)
    return Row(mode, lines, at_rest, forward, backward, step, peak, phase, question.gpus - 1, parts)

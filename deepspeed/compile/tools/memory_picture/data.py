# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of one step, its JSON file, and what draws its picture."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

PARAMETERS = "parameters"
OPTIMIZER_STATES = "optimizer states"
ACTIVATIONS = "activations"
TARGETS = "gradient targets"
ON_THEIR_WAY = "gradients on their way"
WAITING = "gradients waiting"
COPIES = "gradient copies"
REST = "the rest"
# The categories in stacking order.
CATEGORIES = (PARAMETERS, OPTIMIZER_STATES, ACTIVATIONS, TARGETS, ON_THEIR_WAY, WAITING, COPIES, REST)
# The colours of Okabe and Ito, which people with any kind of colour vision can distinguish, and grey.
COLOURS = dict(
    zip(CATEGORIES, ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#F0E442", "#CC79A7", "#BBBBBB"))
)
# The colours of two steps that are drawn over each other.
COLOURS_OF_TWO = ("#0072B2", "#D55E00")
INK = "#333333"  # the colour of text and lines
# The most phases with names: more names would cover each other.
NAMED_PHASES = 12
OF_GRADIENTS = (TARGETS, ON_THEIR_WAY, WAITING, COPIES)
# The gather is the last part of the step.
PHASES = ("forward", "backward", "step", "gather")

FORMAT, VERSION = "memory of one training step", 1
# A file has about this many points in time: more than a screen has pixels.
POINTS = 2000
# Training does not need matplotlib, so it is no requirement of DeepSpeed.
WITHOUT_LIBRARY = "matplotlib cannot be imported; pip install matplotlib"


class Peak(NamedTuple):
    """The most memory within some time."""

    second: float  # the time at which the peak was first reached
    bytes: int
    phase: str  # the phase, one of ``PHASES``, or "" between phases
    held: Dict[str, int]  # category -> bytes, in the order of ``CATEGORIES``. They add up to ``bytes``


@dataclasses.dataclass
class StepMemory:
    """Memory at points in time, in the order in which the host reached them."""

    seconds: List[float]  # times since the step began. Memory is constant from each point to the next
    held: Dict[str, List[int]]  # category of ``CATEGORIES`` -> bytes at each point, a list as long as ``seconds``
    # Phase of ``PHASES`` -> (begin, end) in seconds, one for each time that the phase ran.
    phases: Dict[str, List[Tuple[float, float]]]
    # Category -> bytes in host memory during the step, if the picture is of a GPU.
    on_host: Dict[str, int] = dataclasses.field(default_factory=dict)
    raised: str = ""  # the error that ended the step, or ""
    # Description of the recording for titles: "model", "rank", "device" and more.
    about: Dict[str, Any] = dataclasses.field(default_factory=dict)

    def sums(self, categories: Iterable[str] = CATEGORIES) -> List[int]:
        """Returns the bytes of some categories together, at each point."""
        return [sum(values) for values in zip(*(self.held[name] for name in categories))]

    def phase_at(self, second: float) -> str:
        """Returns the phase at a time, or "" between phases. The gather counts as "gather", not as "step"."""
        names = [name for name in PHASES for begin, end in self.phases.get(name, ()) if begin <= second <= end]
        return names[-1] if names else ""

    def peak(self, begin: float = float("-inf"), end: float = float("inf")) -> Peak:
        """Returns the peak in [begin, end], including the memory that was held at the beginning."""
        within = [index for index, second in enumerate(self.seconds) if begin <= second <= end]
        # Memory holds its value from a point to the next one, so the last point before `begin` counts.
        first = within[0] if within else sum(second <= end for second in self.seconds)
        within = ([first - 1] if first else []) + within
        sums = self.sums()
        index = max(within, key=lambda index: sums[index])
        second = max(self.seconds[index], begin)
        held = {name: self.held[name][index] for name in CATEGORIES}
        return Peak(second, sums[index], self.phase_at(second), held)

    def peaks(self) -> Dict[str, Peak]:
        """Returns the peak of each phase that ran; with several micro-batches, the highest of all."""
        ran = {name: spans for name, spans in self.phases.items() if spans}
        phase_peaks = {name: [self.peak(*span) for span in spans] for name, spans in ran.items()}
        return {name: max(peaks, key=lambda peak: peak.bytes) for name, peaks in phase_peaks.items()}

    def thinned(self, points: int) -> "StepMemory":
        """Returns the step with at most about ``points`` points.

        The time is divided into equal stretches. Each keeps the highest point of the sum and of each category, so
        peaks are exact, and an even course keeps few points.
        """
        if len(self.seconds) <= points:
            return self
        lines = [self.sums(), *self.held.values()]
        width = (self.seconds[-1] - self.seconds[0]) / max(1, points // 4) or 1.0
        highest: Dict[Tuple[int, int], int] = {}
        for index, second in enumerate(self.seconds):
            for number, line in enumerate(lines):
                slot = (int(second / width), number)
                if slot not in highest or line[index] > line[highest[slot]]:
                    highest[slot] = index
        kept = sorted({0, len(self.seconds) - 1, *highest.values()})
        held = {name: [line[index] for index in kept] for name, line in self.held.items()}
        return dataclasses.replace(self, seconds=[self.seconds[index] for index in kept], held=held)

    def write(self, file: Path) -> None:
        """Writes the step as JSON. The peaks follow from the rest, and are written for other readers."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            **dataclasses.asdict(self),
            "total": self.sums(),
            "peak": self.peak()._asdict(),
            "peak_of_phase": {name: peak._asdict() for name, peak in self.peaks().items()},
        }
        file.write_text(json.dumps(content) + "\n")


def read(file: Path) -> StepMemory:
    """Returns the step that a file holds.

    Raises:
        ValueError: if the file cannot be read, or holds something else. The message names the file.
    """
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{file} is no JSON; give a file that compile.memory_picture has written") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{file} holds no step's memory; give a file that compile.memory_picture has written")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{file} has version {content.get('version')} of the format, but this DeepSpeed reads version {VERSION}; "
            "draw it with the DeepSpeed that wrote it"
        )
    fields: Any = {field.name: content.get(field.name) for field in dataclasses.fields(StepMemory)}
    step = StepMemory(**fields)
    if not step.seconds or any(len((step.held or {}).get(name, ())) != len(step.seconds) for name in CATEGORIES):
        raise ValueError(f"{file} is damaged: its lists are of different lengths; record the step again")
    return step


def unit_for(most: float) -> Tuple[int, str]:
    """Returns a unit for figures of up to ``most`` bytes: its number of bytes, and its name."""
    return (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")


def written(bytes: float, unit: Optional[Tuple[int, str]] = None) -> str:
    """Returns a number of bytes as people read it, for example "1.25 GiB"."""
    size, name = unit or unit_for(bytes)
    if bytes < size / 200:
        return f"{bytes / 2**10:.1f} KiB" if bytes else "0"
    return f"{bytes / size:.2f} {name}"


def categories_of(*steps: StepMemory) -> List[str]:
    """Returns the categories that hold memory in any of the steps, in the order of ``CATEGORIES``."""
    return [name for name in CATEGORIES if any(any(step.held[name]) for step in steps)]


def headline(step: StepMemory) -> str:
    """Returns one line for a title: model, rank, and the peak."""
    about, peak = step.about, step.peak()
    where = f" in the {peak.phase}" if peak.phase else " between phases"
    rank = f", rank {about['rank']} of {about['world']}" if "rank" in about else ""
    return f"{about.get('model', 'A step')}{rank}: peak {written(peak.bytes)}{where}"


def subtitle(step: StepMemory) -> str:
    """Returns one line about the recording, and the memory on the host."""
    parts = [step.about["what"]] if step.about.get("what") else []
    if step.on_host:
        parts.append("on the host: " + ", ".join(f"{written(of)} {name}" for name, of in step.on_host.items()))
    if step.raised:
        parts.append(f"the step raised {step.raised}")
    return "; ".join(parts)


def drawer() -> Optional[Any]:
    """Returns the module that draws, or None if matplotlib cannot be imported."""
    try:
        return importlib.import_module(".draw_png", __package__)
    except Exception:
        # A missing library raises ImportError. One that does not fit the installed NumPy may raise any error.
        return None


def write_step(step: StepMemory, folder: Path, name: str) -> Path:
    """Writes the data of a step under a name that is free in the folder; returns the file.

    Raises:
        OSError: if the file cannot be written.
    """
    number = 1
    while True:
        file = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            file.touch(exist_ok=False)
            break
        except FileExistsError:
            # An earlier run, or another engine of this process, has recorded there.
            number += 1
    step.write(file)
    return file

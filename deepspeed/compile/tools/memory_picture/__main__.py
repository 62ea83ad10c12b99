# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Draws a step that ``compile.memory_picture`` has recorded, or lays two over each other.

::

    python -m deepspeed.compile.memory_picture A.json           draws A.png again
    python -m deepspeed.compile.memory_picture A.json B.json    draws both together, as A-B.png
"""

import argparse
import os
import sys
from pathlib import Path
from typing import List, Optional

from . import data
from .data import headline, read


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed.compile.memory_picture", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="+", metavar="FILE.json", type=Path, help="one or two recorded steps")
    parser.add_argument("-o", "--out", type=Path, help="the picture's name. Default: beside the first file")
    options = parser.parse_args(arguments)
    if len(options.files) > 2:
        parser.error(f"give one or two files, not {len(options.files)}")
    try:
        steps = [read(file) for file in options.files]
    except ValueError as error:
        parser.error(str(error))
    draws = data.drawer()
    if draws is None:
        parser.error(data.WITHOUT_LIBRARY)
    first, last = options.files[0], options.files[-1]
    out = options.out or (first if len(steps) == 1 else first.with_name(f"{first.stem}-{last.stem}"))
    # Replace only the suffix of a picture or of data: a name may contain another dot.
    out = out.with_suffix(".png") if out.suffix in (".json", ".png") else out.with_name(f"{out.name}.png")
    try:
        if len(steps) == 1:
            draws.draw(steps[0], out)
        else:
            # Files of two runs often have one name in different folders.
            places = [file.resolve().with_suffix("") for file in options.files]
            common = os.path.commonpath([place.parent for place in places])
            names = [str(place.relative_to(common)) for place in places]
            draws.draw_two(steps[0], steps[1], names, out)
    except OSError as error:
        parser.error(f"{error.filename or out} cannot be written: {error.strerror}; name another place with --out")
    for file, step in zip(options.files, steps):
        print(f"{file}: {headline(step)}")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

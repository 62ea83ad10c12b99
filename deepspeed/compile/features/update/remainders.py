# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An fp32 master weight as the bf16 parameter and 16 more bits.

    bits of the master weight = bits of the parameter * 2**16 + remainder

The remainder is signed, from -2**15 to 2**15 - 1, so the parameter is the bf16 number nearest to the master weight.
Each master weight has one pair of parameter and remainder, because ties round away from zero. Torch rounds ties to the
number with an even last bit, so one of 131,072 master weights has another parameter than torch would give it, by one
unit in the last place. Every NaN becomes 0x7FC00000, because the upper half of a NaN can be that of an infinity.

Transformer Engine (``store_param_remainders``) and MindSpeed keep master weights like this.
"""

from typing import Tuple

import torch

_INFINITY, _NAN = 0x7F80, 0x7FC0  # of bf16


def split(master: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns the parameters, bf16, and the remainders, int16, of master weights in fp32. All have one shape."""
    bits, is_number = master.view(torch.int32), master == master
    # The sum exceeds the largest int32 only for a NaN.
    parameter = torch.where(is_number, (bits + 0x8000) >> 16, _NAN)
    remainder = torch.where(is_number, bits - (parameter << 16), 0)
    return parameter.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Returns the master weights, fp32, of parameters, bf16, and remainders, int16. All have one shape.

    If a parameter was changed after :func:`split`, the result rounds to the new parameter. Zero and infinity with a
    remainder of the wrong sign would give NaN, so the remainder is ignored there.
    """
    bits, remainder = parameter.view(torch.int16).to(torch.int32), remainder.to(torch.int32)
    magnitude = bits & 0x7FFF
    is_changed = ((magnitude == 0) & (remainder < 0)) | ((magnitude == _INFINITY) & (remainder > 0))
    return ((bits << 16) + torch.where(is_changed, 0, remainder)).view(torch.float32)

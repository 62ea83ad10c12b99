# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

EDITS = (
    # Otherwise the parameters are linked in the order of the model, and they lie in another order.
    (
        "deepspeed/runtime/zero/stage_1_and_2.py",
        "places of parameters in round robin order",
        "            if any(self.round_robin_bit16_padding[i]):\n",
        "            if self.round_robin_gradients or any(self.round_robin_bit16_padding[i]):\n",
    ),
)

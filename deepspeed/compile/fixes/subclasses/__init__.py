# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes DeepSpeed handle parameters that are tensor subclasses, such as torchao's quantized weights.

To DeepSpeed: the engine broadcasts ``parameter.data`` at its beginning, keeps weak references to parameters for its
debug names, and loads checkpoints through ``map_location`` functions. None of these works for a tensor that wraps
other tensors. Please broadcast the inner tensors, and name parameters without references.
"""

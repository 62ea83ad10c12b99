# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Has DeepSpeed handle parameters that are tensor subclasses, such as torchao's quantized weights."""

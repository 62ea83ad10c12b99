# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes Dynamo trace peft's DoRA.

To peft: ``dequantize_module_weight()`` reads ``type(weight).__module__``, which ends a graph in every adapted layer
under ``torch.compile``, even if no weight is quantized. Please return a plain ``Parameter`` before that read.
"""

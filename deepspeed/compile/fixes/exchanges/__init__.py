# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps DeepSpeed's exchanges of tokens out of graphs that would lose their gradients.

To DeepSpeed: ``MOELayer`` and ``DistributedAttention`` send tokens, and ``_GatherSequenceLoss`` losses, in autograd
functions that fill a tensor by a collective. Dynamo traces into them, and the graph's gradient is zero (functions of
sequences: before torch 2.13). ``deepspeed::dim_zero_all_to_all`` of ``sequence/layer.py`` says how to make them
operators. What the gate decides is read on the host too, which breaks a graph anyway.
"""

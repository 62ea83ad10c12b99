// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

// The only file that is compiled. Torch's headers take most of the time, and so they are read once for all files.

#include "reducer.cpp"

#include "order.cpp"

#include "bucket.cpp"

#include "targets.cpp"

#include "autograd.cpp"

#include "memory.cpp"

#include "agreement.cpp"

#include "registry.cpp"

#include "ops.cpp"

#include "bindings.cpp"

// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

// The only file that is compiled. Torch's headers take most of the time, and so they are read once for all files.

#include "autograd.cpp"
#include "bindings.cpp"
#include "bucket.cpp"
#include "carrier.cpp"
#include "copy_engines.cpp"
#include "driver.cpp"
#include "memory.cpp"
#include "order.cpp"
#include "reducer.cpp"
#include "schedule.cpp"
#include "signals.cpp"

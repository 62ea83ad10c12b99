// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <ATen/Functions.h>
#include <torch/library.h>

// The two operators that a compiled backward calls.

namespace deepcompile {

namespace {

at::Tensor done(const at::Tensor& gradient)
{
    return at::empty({0}, gradient.options());
}

at::Tensor reduce_grad(const at::Tensor& gradient,
                       const at::Tensor& parameter,
                       const std::optional<at::Tensor>&,
                       bool may_keep)
{
    if (parameter.numel() > 0) {
        const auto registration = find_registration(parameter.const_data_ptr());
        TORCH_CHECK(registration.has_value(),
                    "DeepCompile got a gradient of shape " + shape_of(gradient) +
                        " for a parameter that no engine has registered: the engine was destroyed, or the parameter " +
                        "was moved between forward and backward (for example by saved_tensors_hooks that copy it)");
        // Unless the graph has given the memory away, the compiler may use it again as soon as this returns.
        // Even then, an operator may have produced several tensors in one piece of memory.
        const bool sole_user = may_keep && gradient.storage().use_count() == 1;
        registration->reducer->reduce(registration->index, gradient, Route::graph, sole_user);
    }
    return done(gradient);
}

at::Tensor reduce_grad_meta(const at::Tensor& gradient, const at::Tensor&, const std::optional<at::Tensor>&, bool)
{
    return done(gradient);
}

void end_backward(at::TensorList reductions_and_parameter, int64_t graph_id, bool release_reduce_buckets)
{
    if (!release_reduce_buckets || reductions_and_parameter.empty()) { return; }
    const auto& parameter = reductions_and_parameter.back();
    if (parameter.numel() == 0) { return; }
    if (const auto registration = find_registration(parameter.const_data_ptr())) {
        registration->reducer->end_backward();
    }
}

void end_backward_meta(at::TensorList, int64_t, bool) {}

}  // namespace

}  // namespace deepcompile

// `after` is the result of the reduction that comes before this one in the graph. It carries no data: it
// keeps every rank's reductions in one order, which the process group requires, however each rank's
// compiler schedules the rest of the graph. `may_keep` says that nothing in the graph reads the gradient or
// uses its memory afterwards.
TORCH_LIBRARY(deepcompile, m)
{
    m.def("reduce_grad(Tensor grad, Tensor param, Tensor? after=None, bool may_keep=False) -> Tensor");
    m.def("end_backward(Tensor[] reductions_and_param, int graph_id, bool release_reduce_buckets) -> ()");
}

TORCH_LIBRARY_IMPL(deepcompile, CompositeExplicitAutograd, m)
{
    m.impl("reduce_grad", &deepcompile::reduce_grad);
    m.impl("end_backward", &deepcompile::end_backward);
}

TORCH_LIBRARY_IMPL(deepcompile, Meta, m)
{
    m.impl("reduce_grad", &deepcompile::reduce_grad_meta);
    m.impl("end_backward", &deepcompile::end_backward_meta);
}

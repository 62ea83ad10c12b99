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

/// Returns `registrations` as a tensor on the host: the engine's number, and then the indices that parameters have in
/// the engine's reducer. `Registrations` in graph/frames.py makes that tensor.
at::Tensor readable(const at::Tensor& registrations)
{
    // A user's saved_tensors_hooks may have moved the tensor to a GPU while the graph kept it for its backward.
    return registrations.is_cpu() ? registrations : registrations.cpu();
}

at::Tensor reduce_grad(const at::Tensor& gradient, const at::Tensor& registrations, int64_t slot, bool donated)
{
    if (gradient.numel() == 0) { return done(gradient); }
    const auto numbers = readable(registrations);
    const auto* number = numbers.const_data_ptr<int64_t>();
    const auto reducer = find_reducer(number[0]);
    TORCH_CHECK(
        reducer,
        "DeepCompile got a gradient of shape " + shape_of(gradient) +
            " that belongs to no engine: the engine was destroyed, or gave its parameters to a later one; run " +
            "the forward again with an engine that is alive");
    // A gradient that the graph has not donated is copied, because the compiler may use its memory again as soon as
    // this operator returns. The graph knows tensors, not storages: an operator may have produced several tensors in
    // one storage, and then one of them cannot be donated alone.
    donated = donated && gradient.storage().use_count() == 1;
    reducer->reduce(static_cast<size_t>(number[slot]), gradient, Route::graph, donated);
    return done(gradient);
}

void end_backward(at::TensorList reductions_and_registrations, int64_t graph_id, bool release_reduce_buckets)
{
    if (!release_reduce_buckets || reductions_and_registrations.empty()) { return; }
    const auto numbers = readable(reductions_and_registrations.back());
    if (const auto reducer = find_reducer(numbers.const_data_ptr<int64_t>()[0])) { reducer->end_backward(); }
}

}  // namespace

}  // namespace deepcompile

// `registrations[slot]` says whose gradient it is. `registrations` is an input of the graph and is made anew for each
// call, so one graph serves many layers. A gradient finds its parameter whatever the compiler does to the parameter
// itself: another layout, padding, a copy, a change in place.
//
// `donated` says that nothing in the graph reads the gradient or uses its memory afterwards.
//
// native.py says what the operators return while a graph is traced.
TORCH_LIBRARY(deepcompile, m)
{
    m.def("reduce_grad(Tensor grad, Tensor registrations, int slot, bool donated=False) -> Tensor");
    m.def("end_backward(Tensor[] reductions_and_registrations, int graph_id, bool release_reduce_buckets) -> ()");
}

TORCH_LIBRARY_IMPL(deepcompile, CompositeExplicitAutograd, m)
{
    m.impl("reduce_grad", &deepcompile::reduce_grad);
    m.impl("end_backward", &deepcompile::end_backward);
}

// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"
#include "deepcompile_copy_engines.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_numbers.h>
#include <torch/library.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

// The interface to other code: the two operators that a compiled backward calls, and the functions that Python calls.

namespace py = pybind11;

namespace deepcompile {

namespace {

/// Returns `registrations` as a tensor on the host: the engine's number, and then the indices that parameters have in
/// the engine's reducer. `ParameterNumbers` in graph/parameter_numbers.py makes that tensor.
at::Tensor readable(const at::Tensor& registrations)
{
    // A user's saved_tensors_hooks may have moved the tensor to a GPU while the graph kept it for its backward.
    return registrations.is_cpu() ? registrations : registrations.cpu();
}

void reduce(const at::Tensor& gradient, const at::Tensor& registrations, int64_t position, bool donated)
{
    const auto numbers = readable(registrations);
    const auto* number = numbers.const_data_ptr<int64_t>();
    const auto reducer = Reducer::find(number[0]);
    TORCH_CHECK(
        reducer,
        "DeepCompile got a gradient of shape " + shape_of(gradient) +
            " that belongs to no engine: the engine was destroyed, or gave its parameters to a later one; run " +
            "the forward again with an engine that is alive");
    // A gradient that the graph has not donated is copied, because the compiler may use its memory again as soon as
    // this operator returns. The graph knows tensors, not storages: an operator may have produced several tensors in
    // one storage, and then one of them cannot be donated alone.
    donated = donated && gradient.storage().use_count() == 1;
    reducer->reduce(static_cast<size_t>(number[position]), gradient, Route::graph, donated);
}

at::Tensor reduce_grad(const at::Tensor& gradient, const at::Tensor& registrations, int64_t position, bool donated)
{
    reduce(gradient, registrations, position, donated);
    return at::empty({0}, gradient.options());
}

/// The operator for generated code, with all four arguments. It avoids torch's dispatcher and pybind11, which take
/// longer than the rest of a small gradient's reduction. A profiler sees it as the operator. Nothing reads its result.
PyObject* reduce_grad_directly(PyObject*, PyObject* const* arguments, Py_ssize_t)
{
    HANDLE_TH_ERRORS
    const auto& gradient = THPVariable_Unpack(arguments[0]);
    const auto& registrations = THPVariable_Unpack(arguments[1]);
    const int64_t position = THPUtils_unpackLong(arguments[2]);
    const bool donated = arguments[3] == Py_True;
    {
        const py::gil_scoped_release unlocked;
        RECORD_FUNCTION("deepcompile::reduce_grad",
                        std::vector<c10::IValue>({gradient, registrations, position, donated}));
        reduce(gradient, registrations, position, donated);
    }
    return Py_NewRef(arguments[1]);
    END_HANDLE_TH_ERRORS
}

PyMethodDef functions_of_generated_code[] = {
    {"reduce_grad",
     reinterpret_cast<PyCFunction>(reduce_grad_directly),
     METH_FASTCALL,
     "reduce_grad(arg0: torch.Tensor, arg1: torch.Tensor, arg2: int, arg3: bool) -> torch.Tensor"},
    {}};

void end_backward(at::TensorList reductions_and_registrations, bool release_reduce_buckets)
{
    if (!release_reduce_buckets || reductions_and_registrations.empty()) { return; }
    const auto numbers = readable(reductions_and_registrations.back());
    if (const auto reducer = Reducer::find(numbers.const_data_ptr<int64_t>()[0])) { reducer->end_backward(); }
}

/// Defines the carrier of copy engines in a module of its own. Its parts are bound too, because each can be tested
/// without a GPU.
void bind_copy_engines(py::module m)
{
    // A call may wait for other ranks' signals.
    using unlocked = py::call_guard<py::gil_scoped_release>;

    m.attr("CHANNELS") = channels;
    m.attr("NUMBERS_OF_A_WORD") = numbers_of_a_word;
    py::class_<Signals, std::shared_ptr<Signals>>(m, "Signals")
        .def(py::init<at::Tensor, int64_t, double>(),
             py::kw_only(),
             py::arg("words"),
             py::arg("rank"),
             py::arg("timeout"))
        .def("expect",
             [](Signals& signals, int64_t channel, uint32_t number) {
                 signals.expect(static_cast<Channel>(channel), number);
             })
        .def("set_timeout", &Signals::set_timeout)
        .def("check", &Signals::check, unlocked())
        .def("wait_for_all", &Signals::await, unlocked())
        .def("exchange", &Signals::exchange, unlocked())
        .def("give_up", &Signals::give_up);

    m.def("cut", [](const std::vector<int64_t>& shard_bytes, int64_t row_bytes) {
        std::vector<std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>> portions;
        for (const auto& portion : cut(shard_bytes, row_bytes)) {
            auto& spans = portions.emplace_back();
            for (const auto& span : portion) { spans.emplace_back(span.message, span.first, span.bytes, span.offset); }
        }
        return portions;
    });
    m.def("schedule", [](int64_t world, int64_t rank, int64_t slots, int64_t pulls, int64_t first, int64_t portions) {
        static constexpr const char* acts[] = {"mark", "follow", "wait", "post", "stage", "pull", "add"};
        py::list steps;
        for (const auto& step : schedule({world, rank, slots, pulls}, first, portions)) {
            py::dict named;
            named["act"] = acts[step.act];
            named["stream"] = step.stream;
            named["event"] = step.event;
            named["peer"] = step.peer;
            named["channel"] = static_cast<int64_t>(step.channel);
            named["number"] = step.number;
            named["portion"] = step.portion;
            named["slot"] = step.slot;
            steps.append(named);
        }
        return steps;
    });
    m.def("add_rows", &add_rows);

    using Addresses = std::vector<uint64_t>;
    py::class_<CopyEngines, Carrier, std::shared_ptr<CopyEngines>>(m, "CopyEngines")
        .def(
            "reduce",
            [](CopyEngines& engines, const std::vector<std::pair<at::Tensor, at::Tensor>>& tensors, double divisor) {
                std::vector<Message> messages;
                for (const auto& [contribution, shard] : tensors) { messages.push_back({contribution, shard}); }
                Works works;
                try {
                    engines.reduce(messages, divisor, works);
                } catch (...) {
                    // Streams may still write to the tensors, which Python drops.
                    for (auto& work : works) { work->synchronize(); }
                    throw;
                }
                return works;
            },
            unlocked())
        .def(py::init([](std::shared_ptr<Signals> signals,
                         int64_t rank,
                         const std::vector<std::tuple<int64_t, int64_t, uint64_t>>& streams,
                         at::Device device,
                         Addresses staging,
                         int64_t staging_bytes,
                         int64_t slots,
                         int64_t row_bytes) {
                 std::vector<OwnStream> own;
                 for (const auto& [id, type, handle] : streams) {
                     own.push_back({c10::Stream::unpack3(id, device.index(), static_cast<c10::DeviceType>(type)),
                                    reinterpret_cast<void*>(handle)});
                 }
                 return std::make_shared<CopyEngines>(std::move(signals),
                                                      rank,
                                                      std::move(own),
                                                      MappedMemory{std::move(staging), staging_bytes},
                                                      slots,
                                                      row_bytes,
                                                      device);
             }),
             py::kw_only(),
             py::arg("signals"),
             py::arg("rank"),
             py::arg("streams"),
             py::arg("device"),
             py::arg("staging"),
             py::arg("staging_bytes"),
             py::arg("slots"),
             py::arg("row_bytes"))
        .def(
            "add_flat",
            [](CopyEngines& engines, Addresses addresses, int64_t bytes) {
                engines.add_flat({std::move(addresses), bytes});
            },
            unlocked())
        .def("forget_flats", &CopyEngines::forget_flats, unlocked())
        .def(
            "gather", &CopyEngines::gather, py::arg("runs"), py::arg("shards") = std::vector<at::Tensor>(), unlocked())
        .def("before_write", &CopyEngines::before_write, unlocked())
        .def("wait_for_signals", &CopyEngines::await_others, unlocked())
        .def("close", &CopyEngines::close, unlocked());
}

}  // namespace

}  // namespace deepcompile

// `registrations` is an input of the graph, for which each call of the graph gives the tensor of the parameters that it
// was called with, so one graph serves many layers. `registrations[0]` is the engine's number, and
// `registrations[position]` the index that the gradient's parameter has in the engine's reducer. So the gradient finds
// its parameter whatever the compiler does to the parameter itself: another layout, padding, a copy, a change in place.
//
// `donated` says that nothing in the graph reads the gradient or uses its memory after the call.
//
// native.py has the results of the operators while a graph is traced.
TORCH_LIBRARY(deepcompile, m)
{
    m.def("reduce_grad(Tensor grad, Tensor registrations, int position, bool donated=False) -> Tensor");
    m.def("end_backward(Tensor[] reductions_and_registrations, bool release_reduce_buckets) -> ()");
}

TORCH_LIBRARY_IMPL(deepcompile, CompositeExplicitAutograd, m)
{
    m.impl("reduce_grad", &deepcompile::reduce_grad);
    m.impl("end_backward", &deepcompile::end_backward);
}

// The base's native module has functions that change the state of the process. This one has none: the state of an
// engine is in the engine's Reducer.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    using deepcompile::Reducer;
    // Calls release the interpreter's lock: a call may wait for a process group, or for another thread's call, and that
    // thread may need the interpreter's lock to go on.
    using unlocked = py::call_guard<py::gil_scoped_release>;

    if (PyModule_AddFunctions(m.ptr(), deepcompile::functions_of_generated_code) != 0) {
        throw py::error_already_set();
    }
    m.def("leads_to_compiled_code", &deepcompile::leads_to_compiled_code);
    m.def("could_not", &deepcompile::could_not);
    py::class_<deepcompile::Carrier, std::shared_ptr<deepcompile::Carrier>>(m, "Carrier");
    deepcompile::bind_copy_engines(m.def_submodule("copy_engines"));
    // No public function of torch in Python tells how many tensors, NumPy arrays and others have a storage.
    m.def("users_of_storage", [](const at::Storage& storage) { return storage.use_count(); });

    using deepcompile::HandedOver;
    py::class_<HandedOver, std::shared_ptr<HandedOver>>(m, "HandedOver")
        .def_property_readonly("flat_partition", &HandedOver::flat_partition)
        .def("targets", &HandedOver::targets)
        .def("are_views", &HandedOver::are_views);

    py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
        .def(py::init([](int64_t identity,
                         int64_t bucket_numel,
                         int64_t send_numel,
                         bool overlap,
                         bool hold_on_cpu,
                         bool synchronize_before,
                         bool synchronize_after) {
                 return Reducer::make(deepcompile::Options{
                     identity, bucket_numel, send_numel, overlap, hold_on_cpu, synchronize_before, synchronize_after});
             }),
             py::kw_only(),
             py::arg("identity"),
             py::arg("bucket_numel"),
             py::arg("send_numel"),
             py::arg("overlap"),
             py::arg("hold_on_cpu") = false,
             py::arg("synchronize_before"),
             py::arg("synchronize_after"))
        .def_static("some_want_to_hold", &Reducer::some_want_to_hold)
        .def_static("hold_on_cpu", &Reducer::hold_on_cpu)
        .def("add_group", &Reducer::add_group, unlocked())
        .def("set_carrier", &Reducer::set_carrier, unlocked())
        .def_property_readonly("identity", &Reducer::identity)
        .def("register_parameter", &Reducer::register_parameter, unlocked())
        .def("begin_backward", &Reducer::begin_backward, unlocked())
        .def("listen", &Reducer::listen, unlocked())
        .def("abandon_unfinished", &Reducer::abandon_unfinished, unlocked())
        .def("abandoned", &Reducer::abandoned, unlocked())
        .def_property_readonly("in_backward", &Reducer::in_backward)
        .def("leads_to_parameters", &Reducer::leads_to_parameters, unlocked())
        .def("follow_stream", &Reducer::follow_stream, unlocked())
        .def("finish_backward", &Reducer::finish_backward, unlocked())
        .def("abandon_backward", &Reducer::abandon_backward, unlocked())
        .def("release", &Reducer::release, unlocked())
        .def("close", &Reducer::close, unlocked())
        .def("counters", &Reducer::counters, unlocked())
        .def("reset_counters", &Reducer::reset_counters, unlocked())
        .def("replace_gradients", &Reducer::replace_gradients, unlocked())
        .def("compare_and_await_targets", &Reducer::compare_and_await_targets, unlocked())
        .def("await_others", &Reducer::await_others, unlocked());
}

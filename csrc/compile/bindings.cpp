// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

namespace py = pybind11;

// The base's native module has functions that change the state of the process. This one has none: the state of an
// engine is in the engine's Reducer.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    using deepcompile::Reducer;
    // Calls release the interpreter's lock: a call may wait for a process group, or for another thread's call, and that
    // thread may need the interpreter's lock to go on.
    using unlocked = py::call_guard<py::gil_scoped_release>;

    m.def("leads_to_compiled_code", &deepcompile::leads_to_compiled_code);
    m.def("could_not", &deepcompile::could_not);
    m.def("cut_at_partitions", [](int64_t offset, int64_t numel, int64_t partition_numel) {
        std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>> pieces;
        for (const auto& piece : deepcompile::cut_at_partitions(offset, numel, partition_numel)) {
            pieces.emplace_back(piece.owner, piece.source_offset, piece.target_offset, piece.numel);
        }
        return pieces;
    });

    py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
        .def(py::init([](int64_t identity,
                         int64_t bucket_numel,
                         int64_t send_numel,
                         bool overlap,
                         bool synchronize_before,
                         bool synchronize_after) {
                 return Reducer::make(deepcompile::Options{
                     identity, bucket_numel, send_numel, overlap, synchronize_before, synchronize_after});
             }),
             py::kw_only(),
             py::arg("identity"),
             py::arg("bucket_numel"),
             py::arg("send_numel"),
             py::arg("overlap"),
             py::arg("synchronize_before"),
             py::arg("synchronize_after"))
        .def("add_group", &Reducer::add_group, unlocked())
        .def_property_readonly("identity", &Reducer::identity)
        .def("register_parameter", &Reducer::register_parameter, unlocked())
        .def("begin_backward", &Reducer::begin_backward, unlocked())
        .def("listen", &Reducer::listen, unlocked())
        .def("abandon_unfinished", &Reducer::abandon_unfinished, unlocked())
        .def("take_abandoned", &Reducer::take_abandoned, unlocked())
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
        .def("begin_step", &Reducer::begin_step, unlocked());
}

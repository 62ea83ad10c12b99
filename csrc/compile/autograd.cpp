// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>

// What the reducer has to do with autograd: the nodes that accumulate gradients of code that was not compiled, which
// gradients a running task wants and which it cannot compute, and the sums that lie in `parameter.grad` between
// backwards.

namespace deepcompile {

using torch::autograd::variable_list;

namespace {

/// Autograd's node that accumulates into `parameter.grad`, or null. A record's `accumulation_node` is the node of the
/// last backward: the parameter may have got another one since.
AccumulationNode current_node(const at::Tensor& parameter)
{
    return torch::autograd::impl::try_get_grad_accumulator(parameter);
}

}  // namespace

// Accumulation nodes and their hooks.

void Reducer::look_at_parameters()
{
    // The optimizer gives parameters new memory when it offloads and reloads states. If that changed the device,
    // autograd makes a new accumulation node.
    for (auto& record : records_) {
        if (record.parameter.numel() == 0) { continue; }
        record.data = record.parameter.const_data_ptr();
        watch_accumulation(record);
    }
}

void Reducer::watch_accumulation(ParameterRecord& record)
{
    if (!record.parameter.requires_grad()) { return; }
    auto node = torch::autograd::impl::grad_accumulator(record.parameter);
    if (node == record.accumulation_node) { return; }
    // Nobody takes the hook out again: a graph may keep the node for longer than the reducer lives, and one of
    // autograd's threads may be going through the node's hooks when the reducer is closed. The hook holds the reducer
    // weakly and does nothing without it.
    node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [reducer = weak_from_this(), index = static_cast<size_t>(record.index)](const variable_list& outputs,
                                                                                const variable_list& inputs) {
            if (const auto alive = reducer.lock()) { alive->on_accumulated(index, inputs); }
            return outputs;
        }));
    record.accumulation_node = std::move(node);
}

void Reducer::follow_stream()
{
    std::lock_guard lock(mutex_);
    if (groups_.empty() || streams_.on_cpu()) { return; }
    const auto stream = streams_.current();
    if (watched_from_ == stream) { return; }
    bool all = true;
    for (auto& record : records_) {
        if (!record.accumulation_node) { continue; }
        const bool in_use = current_node(record.parameter) == record.accumulation_node;
        record.accumulation_node = nullptr;
        // If a graph that is still alive has kept the node, the node is still there, with the hook.
        if (in_use) { record.accumulation_node = current_node(record.parameter); }
        all = all && !record.accumulation_node;
        if (!record.accumulation_node) { watch_accumulation(record); }
    }
    // If some nodes were kept, the next forward tries again.
    if (all) { watched_from_ = stream; }
}

void Reducer::on_accumulated(size_t index, const variable_list& inputs)
{
    at::Tensor parameter;
    {
        std::lock_guard lock(mutex_);
        if (index >= records_.size()) { return; }
        parameter = records_[index].parameter;
        // Another engine may have taken the parameters over, although this reducer's engine was not destroyed. But while
        // this engine's backward runs, it was the caller who gave the parameter other memory.
        const bool moved = parameter.numel() > 0 && parameter.const_data_ptr() != records_[index].data;
        if (moved && !in_backward()) { return; }
    }
    // Autograd also runs the node of a parameter whose gradient a compiled graph has reduced, and passes no gradient.
    auto& slot = parameter.mutable_grad();
    if (!slot.defined()) { return; }
    at::Tensor gradient = std::exchange(slot, {});
    // Autograd may have put into the slot a view of memory that another gradient still uses. For this hook, autograd
    // has also kept the node's input. If nothing else refers to the input, the input is a second name of the gradient's
    // memory and counts as one more reference to the storage.
    const bool kept_for_hook = inputs.size() == 1 && inputs[0].defined() && inputs[0].use_count() == 1 &&
                               inputs[0].layout() == at::kStrided && gradient.is_alias_of(inputs[0]);
    // A user's hook that ran earlier may hold the gradient. The gradient is then not donated.
    const bool donated = gradient.layout() == at::kStrided && gradient.use_count() == 1 &&
                         gradient.storage().use_count() == (kept_for_hook ? 2 : 1);
    reduce(index, gradient, Route::autograd, donated);
}

// The end of a graph task.

void Reducer::watch_graph_task()
{
    // Autograd calls the callback when it has run the graph, or drops it uncalled because the backward raised.
    struct Watch {
        std::weak_ptr<Reducer> reducer;
        int64_t serial;

        ~Watch()
        {
            if (const auto alive = reducer.lock()) { alive->graph_dropped(serial); }
        }
    };
    ++serial_;
    graph_task_ = torch::autograd::get_current_graph_task_id();
    if (graph_task_ == -1) { return; }
    const std::shared_ptr<Watch> watch(new Watch{weak_from_this(), serial_});
    torch::autograd::Engine::get_default_engine().queue_callback([watch] {
        if (const auto alive = std::exchange(watch->reducer, {}).lock()) { alive->graph_ended(watch->serial); }
    });
}

void Reducer::graph_ended(int64_t serial)
{
    std::lock_guard lock(mutex_);
    if (serial == serial_ && state_ == BackwardState::running) { state_ = BackwardState::ended; }
}

void Reducer::graph_dropped(int64_t serial) noexcept
try {
    std::shared_ptr<const Listener> listener;
    {
        // Whoever drops the task may hold the interpreter's lock, and the thread that holds mutex_ may wait for it.
        std::optional<pybind11::gil_scoped_release> unlocked;
        if (PyGILState_Check()) { unlocked.emplace(); }
        Dropped dropped;
        std::lock_guard lock(mutex_);
        if (serial != serial_ || !in_backward()) { return; }
        abandon(BackwardState::raised, dropped);
        listener = listener_;
    }
    // Otherwise engine.is_gradient_accumulation_boundary() would be outdated until the next call of the engine.
    if (listener && Py_IsInitialized()) { listener->settle(); }
} catch (const std::exception& error) {
    TORCH_WARN(std::string("DeepCompile could not drop the gradients of a backward that raised: ") + error.what());
}

void Reducer::abandon_unfinished(bool may_enclose)
{
    Dropped dropped;
    std::lock_guard lock(mutex_);
    // A backward whose graph has ended cannot enclose another. On CPU, a backward that raised is abandoned by now, so one
    // that is still running encloses. On a GPU, a thread of autograd's may still hold the graph task of a backward that
    // raised, so the backward encloses only if this thread runs in its task.
    const bool encloses = may_enclose && state_ == BackwardState::running &&
                          (streams_.on_cpu() || graph_task_ == torch::autograd::get_current_graph_task_id());
    if (in_backward() && !encloses) { abandon(BackwardState::unfinished, dropped); }
}

std::optional<std::string> Reducer::abandoned() const
{
    const BackwardState state = state_;
    if (state == BackwardState::raised) { return "raised"; }
    if (state == BackwardState::unfinished) { return "unfinished"; }
    return std::nullopt;
}

void Reducer::settled()
{
    std::lock_guard lock(mutex_);
    if (is_abandoned()) { state_ = BackwardState::none; }
}

// What autograd's running task computes.

namespace {

/// What the task does with each node that it was asked for, or null if it runs all nodes of its graph.
/// torch.autograd.grad() and backward(inputs=...) ask for some gradients only.
auto* asked_for()
{
    const auto* asked = torch::autograd::get_current_graph_task_exec_info();
    return asked && !asked->empty() ? asked : nullptr;
}

/// Whether the task runs a node of its graph.
bool runs(torch::autograd::Node* node)
{
    const auto* asked = asked_for();
    if (!asked) { return true; }
    const auto found = asked->find(node);
    return found != asked->end() && found->second.needed_;
}

/// Whether the running task runs a function of Python for which `is_it(name)` is true. Takes the interpreter's lock.
template <typename IsIt>
bool runs_function(const IsIt& is_it)
{
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (!nodes) { return false; }
    return std::any_of(nodes->begin(), nodes->end(), [&is_it](torch::autograd::Node* node) {
        // Autograd's own nodes are many, and to ask each for its name takes long.
        return std::strstr(typeid(*node).name(), "PyNode") != nullptr && runs(node) && is_it(node->name());
    });
}

constexpr auto compiled_function = "CompiledFunctionBackward";

}  // namespace

bool ParameterRecord::autograd_wants() const
{
    const auto* asked = asked_for();
    if (!asked) { return true; }
    const auto found = asked->find(current_node(parameter).get());
    if (found == asked->end()) { return false; }
    TORCH_CHECK(!found->second.captures_ || found->second.captures_->empty(),
                describe() + " is reduced by its compiled graph, so torch.autograd.grad() cannot return its " +
                    "gradient; use safe_get_full_grad() after engine.backward()");
    return found->second.needed_;
}

bool leads_to_checkpoints()
{
    return runs_function([](const std::string& name) { return name == "CheckpointFunctionBackward"; });
}

bool leads_to_compiled_code()
{
    return runs_function([](const std::string& name) { return name == compiled_function; });
}

bool Reducer::leads_to_parameters() const
{
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (!nodes) { return true; }
    bool some_trained = false;
    {
        std::lock_guard lock(mutex_);
        for (const auto& record : records_) {
            if (!record.parameter.requires_grad()) { continue; }
            some_trained = true;
            const auto node = current_node(record.parameter);
            if (node && nodes->count(node.get()) && runs(node.get())) { return true; }
        }
    }
    // A function may run a backward of its own, as reentrant checkpointing does, which this graph does not show.
    return some_trained && !asked_for() &&
           runs_function([](const std::string& name) { return name != compiled_function; });
}

bool Reducer::find_absent(bool is_first)
{
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (!nodes) { return false; }
    bool some = false;
    for (auto& record : records_) {
        const bool reached = record.parameter.requires_grad() && nodes->count(record.accumulation_node.get()) > 0;
        // A parameter that was absent is hidden if a later graph of the same backward leads to it.
        record.hidden = record.hidden || (record.absent && reached);
        record.absent = !reached && !record.hidden && (is_first || record.absent);
        some = some || record.absent;
    }
    return some;
}

// Sums of gradients that stay on this rank.

void UnreducedSum::add(const at::Tensor& gradient, bool donated)
{
    if (sum_.defined()) {
        sum_.add_(gradient);
        // The stream that has just added to the sum may not be the one whose pool the sum's memory comes from.
        streams_.record_on_last(sum_);
        return;
    }
    sum_ = keep_or_copy(gradient.detach(), dtype_, donated);
    counters_.unreduced.add(bytes_of(sum_));
    mark_stage("deepcompile::waiting", sum_);
}

at::Tensor UnreducedSum::take()
{
    at::Tensor sum = std::exchange(sum_, {});
    counters_.unreduced.remove(bytes_of(sum));
    // An earlier backward may have allocated the sum on another stream. The pool of that stream must not hand the
    // memory out while the current stream uses it.
    record_on_current_stream(sum);
    return sum;
}

void UnreducedSum::drop(Dropped& dropped)
{
    if (!sum_.defined()) { return; }
    counters_.unreduced.remove(bytes_of(sum_));
    dropped.push_back(std::exchange(sum_, {}));
}

void UnreducedSum::leave_in_grad(const at::Tensor& parameter)
{
    if (!sum_.defined() || sum_.scalar_type() != parameter.scalar_type()) { return; }
    parameter.mutable_grad() = take();
}

void UnreducedSum::take_from_grad(const at::Tensor& parameter)
{
    auto& slot = parameter.mutable_grad();
    if (!slot.defined() || slot.layout() != at::kStrided) { return; }
    streams_.order_after_last_use();
    at::Tensor kept = std::exchange(slot, {});
    // A gradient that somebody else refers to as well is copied below, on the current stream, and dropped at once. The
    // pool of the stream that allocated the gradient must not hand its memory out before the copy is done.
    record_on_current_stream(kept);
    add(kept, /*donated=*/kept.use_count() == 1 && kept.storage().use_count() == 1);
}

}  // namespace deepcompile

// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>

// The reducer's connection to autograd: accumulation nodes, which take gradients of uncompiled code and gradients that
// a hook or the caller wants to see; the gradients that a running task wants or cannot compute; and the sums that lie
// in `parameter.grad` between backwards.

namespace deepcompile {

using torch::autograd::variable_list;

namespace {

/// Autograd's node that accumulates into `parameter.grad`, or null. A record's `accumulation_node` is the node of the
/// last backward: the parameter may have got another one since.
AccumulationNode current_node(const at::Tensor& parameter)
{
    return torch::autograd::impl::try_get_grad_accumulator(parameter);
}

StorageLocation storage_location_of(const at::Tensor& parameter)
{
    return {parameter.storage().unsafeGetStorageImpl(), parameter.storage_offset()};
}

}  // namespace

// Accumulation nodes and their hooks.

/// Hands an accumulated gradient from its accumulation node to the reducer.
class Accumulated : public torch::autograd::FunctionPostHook {
public:
    explicit Accumulated(std::function<void(const variable_list&)> function) : function_(std::move(function)) {}

    variable_list operator()(const variable_list& outputs, const variable_list& inputs) override
    {
        function_(inputs);
        return outputs;
    }

private:
    const std::function<void(const variable_list&)> function_;
};

/// Delivers the graphs' gradients to an accumulation node. The first of the parameter's hooks.
class Delivery : public torch::autograd::FunctionPreHook {
public:
    Delivery(std::weak_ptr<Reducer> reducer, size_t index) : reducer_(std::move(reducer)), index_(index) {}

    variable_list operator()(const variable_list& gradients) override
    {
        const auto alive = reducer_.lock();
        return alive ? variable_list{alive->deliver(index_, gradients.at(0))} : gradients;
    }
    bool is_of(const Reducer& reducer) const { return reducer_.lock().get() == &reducer; }

private:
    const std::weak_ptr<Reducer> reducer_;
    const size_t index_;
};

namespace {

/// Whether a dict of Python's hooks is not empty. Reads one number, without the interpreter's lock.
bool has_any(PyObject* hooks)
{
    return PyDict_GET_SIZE(hooks) > 0;
}

/// Whether the hook is of one of torch's classes for a dict of Python's hooks, whose types other modules cannot name.
template <typename Hook>
bool is_of_python(const Hook& hook)
{
    return std::strstr(typeid(hook).name(), "PyFunction") != nullptr;
}

/// Whether a node has a post-hook that other code has registered and not removed.
bool has_hooks_behind(torch::autograd::Node& node)
{
    for (const auto& hook : node.post_hooks()) {
        if (dynamic_cast<const Accumulated*>(hook.get())) { continue; }
        using OfPython = torch::autograd::PyFunctionPostHook;
        if (!is_of_python(*hook) || has_any(static_cast<const OfPython&>(*hook).dict)) { return true; }
    }
    return false;
}

}  // namespace

void Reducer::look_at_parameters()
{
    // The optimizer may give parameters new memory, when it moves its states away and back. If that changed the device,
    // autograd makes a new accumulation node.
    for (auto& record : records_) {
        record.storage_location = storage_location_of(record.parameter);
        watch_accumulation(record);
    }
}

void Reducer::watch_accumulation(ParameterRecord& record)
{
    if (!record.parameter.requires_grad()) { return; }
    auto node = torch::autograd::impl::grad_accumulator(record.parameter);
    if (node == record.accumulation_node) { return; }
    // The hook stays for ever: a graph may keep the node for longer than the reducer lives, and one of autograd's
    // threads may iterate over the node's hooks when the reducer is closed. The hook holds the reducer weakly and does
    // nothing without it.
    node->add_post_hook(std::make_unique<Accumulated>(
        [reducer = weak_from_this(), index = static_cast<size_t>(record.index)](const variable_list& inputs) {
            if (const auto alive = reducer.lock()) { alive->on_accumulated(index, inputs); }
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
    at::Tensor parameter, undelivered;
    bool moved = false, is_delivered = false;
    {
        std::lock_guard lock(mutex_);
        if (index >= records_.size()) { return; }
        parameter = records_[index].parameter;
        // A user may have registered the parameter's first hook after its graph ran.
        undelivered = take_for_autograd(records_[index]);
        // Another engine may have taken the parameters over, although this reducer's engine was not destroyed. But
        // while this engine's backward runs, only the caller can have moved the parameter.
        moved = storage_location_of(parameter) != records_[index].storage_location;
        is_delivered = std::exchange(records_[index].is_delivered, false) && !undelivered.defined();
    }
    if (undelivered.defined()) { reduce(index, undelivered, Route::autograd, /*donated=*/true); }
    if (moved && !in_backward()) { return; }
    // Autograd also runs the node of a parameter whose gradient a compiled graph has reduced, and passes no gradient.
    auto& grad = parameter.mutable_grad();
    if (!grad.defined()) {
        if (is_delivered) { on_nothing_accumulated(index); }
        return;
    }
    at::Tensor gradient = std::exchange(grad, {});
    // Autograd may have put into `parameter.grad` a view of memory that another gradient still uses. For this hook,
    // autograd has also kept the node's input. If nothing else refers to the input, the input is a second name of the
    // gradient's memory and counts as one more reference to the storage.
    const bool kept_for_hook = inputs.size() == 1 && inputs[0].defined() && inputs[0].use_count() == 1 &&
                               inputs[0].layout() == at::kStrided && gradient.is_alias_of(inputs[0]);
    // A user's hook that ran earlier may hold the gradient, and one that runs later, at the same node, will read the
    // input. The gradient is then not donated.
    const auto node = current_node(parameter);
    const bool read_later = node && has_hooks_behind(*node);
    const bool donated = !read_later && gradient.layout() == at::kStrided && gradient.use_count() == 1 &&
                         gradient.storage().use_count() == (kept_for_hook ? 2 : 1);
    reduce(index, gradient, Route::autograd, donated);
}

// Gradients of graphs that a hook or the caller wants to see.

KeptForAutograd& Reducer::keep_for_autograd(ParameterRecord& record, const at::Tensor& gradient, bool donated)
{
    streams_.order_after_last_use();
    const int task = torch::autograd::get_current_graph_task_id();
    KeptForAutograd none{UnreducedSum(record.parameter.scalar_type(), streams_, counters_)};
    auto& kept = record.for_autograd.try_emplace(task, std::move(none)).first->second;
    kept.sum.add(gradient, donated);
    // A user's first hook of a parameter removes the hooks that C++ has added.
    auto& hooks = torch::autograd::impl::hooks(record.parameter);
    auto* first = hooks.empty() ? nullptr : dynamic_cast<Delivery*>(hooks.front().get());
    if (first && first->is_of(*this)) { return kept; }
    auto delivery = std::make_unique<Delivery>(weak_from_this(), static_cast<size_t>(record.index));
    if (first) {
        // The hook of an earlier engine.
        hooks.front() = std::move(delivery);
    } else {
        hooks.insert(hooks.begin(), std::move(delivery));
    }
    return kept;
}

at::Tensor Reducer::take_for_autograd(ParameterRecord& record)
{
    const auto kept = record.for_autograd.find(torch::autograd::get_current_graph_task_id());
    if (kept == record.for_autograd.end()) { return {}; }
    streams_.order_after_last_use();
    at::Tensor gradient = kept->second.sum.take();
    record.is_delivered = true;
    record.for_autograd.erase(kept);
    return gradient;
}

at::Tensor Reducer::deliver(size_t index, const at::Tensor& gradient)
{
    std::lock_guard lock(mutex_);
    if (index >= records_.size()) { return gradient; }
    auto& record = records_[index];
    at::Tensor kept = take_for_autograd(record);
    if (!kept.defined()) { return gradient; }
    TORCH_CHECK(!at::GradMode::is_enabled(),
                record.describe() + " got a gradient of a compiled graph, which has no second derivatives; run this " +
                    "forward and its backward in `with torch.compiler.set_stance('force_eager'):`");
    return gradient.defined() ? kept.add_(gradient) : kept;
}

void Reducer::on_nothing_accumulated(size_t index)
{
    std::lock_guard lock(mutex_);
    if (index >= records_.size()) { return; }
    // The gradient of a parameter that was frozen after the forward accumulates nothing, and has no turn.
    if (!takes_turns(records_[index]) || !records_[index].parameter.requires_grad()) { return; }
    at::NoGradGuard no_grad;
    streams_.order_after_last_use();
    count_without_gradient(records_[index]);
}

bool Reducer::takes_turns(const ParameterRecord& record) const
{
    return in_backward() && reduces_ && record.group->world() > 1;
}

bool ParameterRecord::has_hooks_of_sum() const
{
    // Only Python adds hooks of this kind. Their dict stays when the last one is removed.
    using OfPython = torch::autograd::PyFunctionTensorPostAccGradHooks;
    const auto& hooks = torch::autograd::impl::post_acc_grad_hooks(parameter);
    return hooks && has_any(static_cast<const OfPython&>(*hooks).dict);
}

bool ParameterRecord::has_hooks() const
{
    using namespace torch::autograd;
    if (has_hooks_of_sum()) { return true; }
    for (const auto& hook : impl::hooks(parameter)) {
        if (dynamic_cast<const Delivery*>(hook.get())) { continue; }
        if (!is_of_python(*hook) || has_any(static_cast<const PyFunctionTensorPreHook&>(*hook).dict)) { return true; }
    }
    const auto node = current_node(parameter);
    if (!node) { return false; }
    for (const auto& hook : node->pre_hooks()) {
        if (!is_of_python(*hook) || has_any(static_cast<const PyFunctionPreHook&>(*hook).dict)) { return true; }
    }
    return has_hooks_behind(*node);
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
    // The thread that drops the task may hold the interpreter's lock, and must not wait for mutex_ with it.
    std::optional<pybind11::gil_scoped_release> unlocked;
    if (PyGILState_Check()) { unlocked.emplace(); }
    Dropped dropped;
    std::lock_guard lock(mutex_);
    if (serial == serial_ && in_backward()) { abandon(BackwardState::raised, dropped); }
} catch (const std::exception& error) {
    TORCH_WARN(std::string("DeepCompile could not drop the gradients of a backward that raised: ") + error.what());
}

std::optional<std::string> Reducer::abandon_unfinished(bool may_enclose)
{
    Dropped dropped;
    std::unique_lock lock(mutex_);
    // A backward whose graph has ended cannot enclose another. On CPU, a backward that raised is abandoned by now, so
    // one that is still running encloses. On a GPU, a thread of autograd's may still hold the graph task of a backward
    // that raised, so the backward encloses only if this thread runs in its task.
    const bool encloses = may_enclose && state_ == BackwardState::running &&
                          (streams_.on_cpu() || graph_task_ == torch::autograd::get_current_graph_task_id());
    if (in_backward() && !encloses) { abandon(BackwardState::unfinished, dropped); }
    lock.unlock();
    return abandoned();
}

std::optional<std::string> Reducer::abandoned()
{
    // Python asks often, also while another thread holds mutex_ and waits for other ranks.
    if (!is_abandoned()) { return std::nullopt; }
    std::lock_guard lock(mutex_);
    if (!is_abandoned()) { return std::nullopt; }
    const auto state = state_.exchange(BackwardState::none);
    return state == BackwardState::raised ? "raised" : "unfinished";
}

// The gradients that autograd's running task computes.

namespace {

/// The task's plan for each requested node, or null if it runs all nodes of its graph. torch.autograd.grad() and
/// backward(inputs=...) request some gradients only.
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
        // Skip autograd's own nodes, which are many: reading all names would take long.
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
    return found != asked->end() && found->second.should_execute();
}

bool ParameterRecord::caller_wants() const
{
    const auto* asked = asked_for();
    if (!asked) { return false; }
    const auto found = asked->find(current_node(parameter).get());
    return found != asked->end() && found->second.captures_;
}

int64_t Reducer::contributions_of_graphs(const ParameterRecord& record)
{
    const int task = torch::autograd::get_current_graph_task_id();
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (!nodes) { return 0; }
    if (from_graphs_of_ != task) {
        static constexpr auto of_other_code = std::numeric_limits<int64_t>::min() / 2;
        from_graphs_of_ = task;
        from_graphs_.clear();
        for (const auto& registered : records_) { from_graphs_[current_node(registered.parameter).get()] = 0; }
        const auto note_edges = [this](const torch::autograd::Node& node) {
            int64_t adds = 0;
            for (const auto& edge : node.next_edges()) {
                const auto found = from_graphs_.find(edge.function.get());
                if (!edge.is_valid() || found == from_graphs_.end()) { continue; }
                if (adds == 0) { adds = node.name() == compiled_function ? 1 : of_other_code; }
                found->second = std::max(found->second + adds, of_other_code);
            }
        };
        for (auto* node : *nodes) {
            if (runs(node)) { note_edges(*node); }
        }
        // Autograd leaves out a node with which alone the task begins. If it is a graph, it runs now.
        const auto current = torch::autograd::get_current_node();
        if (current && nodes->count(current.get()) == 0) { note_edges(*current); }
    }
    const auto found = from_graphs_.find(current_node(record.parameter).get());
    return found == from_graphs_.end() ? 0 : std::max<int64_t>(found->second, 0);
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

bool Reducer::find_unreachable(bool is_first)
{
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (!nodes) { return false; }
    bool some = false;
    for (auto& record : records_) {
        const bool reached = record.parameter.requires_grad() && nodes->count(record.accumulation_node.get()) > 0;
        // A later graph of the same backward reaches it: the first graph did not show all.
        record.reachability_unreliable = record.reachability_unreliable || (record.unreachable && reached);
        record.unreachable = !reached && !record.reachability_unreliable && (is_first || record.unreachable);
        some = some || record.unreachable;
    }
    return some;
}

// Sums of gradients that stay on this rank.

void UnreducedSum::add(const at::Tensor& gradient, bool donated)
{
    if (sum_.defined()) {
        sum_.add_(gradient);
        // The stream that has just added to the sum may not be the stream whose pool has the sum's memory.
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

void UnreducedSum::leave_in_grad(const at::Tensor& parameter, Dropped& dropped)
{
    if (!sum_.defined() || sum_.scalar_type() != parameter.scalar_type()) { return; }
    // A user's hook may have written there while the backward ran.
    take_from_grad(parameter, dropped);
    parameter.mutable_grad() = take();
}

void UnreducedSum::take_from_grad(const at::Tensor& parameter, Dropped& dropped)
{
    auto& grad = parameter.mutable_grad();
    if (!grad.defined() || grad.layout() != at::kStrided) { return; }
    streams_.order_after_last_use();
    at::Tensor kept = std::exchange(grad, {});
    // If other code also refers to the gradient, it is copied below, on the current stream, and dropped soon. The pool
    // of the stream that allocated the gradient must not reuse its memory before the copy is done.
    record_on_current_stream(kept);
    add(kept, /*donated=*/kept.use_count() == 1 && kept.storage().use_count() == 1);
    dropped.push_back(std::move(kept));
}

}  // namespace deepcompile

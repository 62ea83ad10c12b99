// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

// The life of a gradient, as deepcompile.h describes it.

namespace deepcompile {

namespace {

// A compiled graph may serve many layers and, through torch's caches, many engines. So each call passes the number of
// the engine that owns the parameters. This map, one for the process, leads from the number to the engine's reducer. It
// holds reducers weakly, because an engine owns its reducer.
struct Registry {
    std::mutex mutex;
    std::unordered_map<int64_t, std::weak_ptr<Reducer>> reducers;
    std::atomic<int> wanting_to_hold = 0;  ///< how many of them have `hold_on_cpu`
    std::atomic<bool> holds = false;       ///< what the ranks have agreed on
};

Registry& registry()
{
    static Registry one;
    return one;
}

}  // namespace

std::shared_ptr<Reducer> Reducer::make(Options options)
{
    auto reducer = std::shared_ptr<Reducer>(new Reducer(options));
    std::lock_guard lock(registry().mutex);
    registry().reducers[options.identity] = reducer;
    registry().wanting_to_hold += options.hold_on_cpu;
    return reducer;
}

bool Reducer::some_want_to_hold()
{
    return registry().wanting_to_hold > 0;
}

void Reducer::hold_on_cpu(bool holds)
{
    registry().holds = holds;
}

bool Reducer::holds_on_cpu()
{
    return registry().holds;
}

std::shared_ptr<Reducer> Reducer::find(int64_t identity)
{
    std::lock_guard lock(registry().mutex);
    const auto found = registry().reducers.find(identity);
    return found == registry().reducers.end() ? nullptr : found->second.lock();
}

Reducer::Reducer(Options options)
    : options_(options), agreement_(options.identity), buckets_(options_, groups_, streams_, agreement_, counters_)
{
}

Reducer::~Reducer()
{
    // An exception must not leave a destructor. Nobody else uses what close() touches, so dropping the error is safe.
    try {
        close();
    } catch (const std::exception& error) {
        TORCH_WARN(std::string("DeepCompile could not close its gradient reducer: ") + error.what());
    }
}

// 1. Registered empty.

int64_t Reducer::add_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                           double divisor,
                           int64_t partition_numel,
                           at::ScalarType target_dtype,
                           at::Device device,
                           bool flat,
                           std::optional<at::Tensor> host)
{
    std::lock_guard lock(mutex_);
    TORCH_CHECK_VALUE(divisor > 0, "the divisor of gradients must be positive");
    TORCH_CHECK_VALUE(partition_numel > 0, "a gradient partition needs at least one element");
    TORCH_CHECK_VALUE(groups_.empty() || groups_.front().device == device,
                      "all parameter groups of an engine must be on one device, but " + device.str() + " follows " +
                          groups_.front().device.str());
    TORCH_CHECK_VALUE(!host || (!flat && host->is_cpu() && host->is_contiguous() && host->numel() == partition_numel &&
                                host->scalar_type() == target_dtype),
                      "host memory for targets must have the partition's size and the targets' dtype");
    TORCH_CHECK_VALUE(groups_.empty() || groups_.front().host.has_value() == host.has_value(),
                      "either all parameter groups have targets in host memory, or none has");
    auto carrier = std::make_shared<Collectives>(process_group, device);
    groups_.push_back({std::move(process_group),
                       divisor,
                       partition_numel,
                       target_dtype,
                       device,
                       flat,
                       std::move(host),
                       counters_,
                       std::move(carrier)});
    streams_.set_device(device);
    return static_cast<int64_t>(groups_.size()) - 1;
}

void Reducer::set_carrier(int64_t group, std::shared_ptr<Carrier> carrier)
{
    std::lock_guard lock(mutex_);
    groups_.at(group).carrier = std::move(carrier);
}

void Reducer::register_parameter(int64_t group,
                                 std::string name,
                                 at::Tensor parameter,
                                 at::ScalarType communication_dtype,
                                 int64_t shard_numel,
                                 int64_t offset)
{
    std::lock_guard lock(mutex_);
    auto& its_group = groups_.at(group);
    // DeepSpeed gives its optimizers no parameter without elements.
    const int64_t numel = parameter.numel();
    TORCH_CHECK_VALUE(numel > 0, "parameter '" + name + "' has no elements, so nobody owns its gradient");
    const int64_t own = std::clamp<int64_t>(numel - its_group.rank() * shard_numel, 0, shard_numel);
    // A single rank sends nothing, so its gradients need no dtype for sending.
    if (its_group.world() == 1) { communication_dtype = its_group.target_dtype; }
    ParameterRecord record{static_cast<int64_t>(records_.size()),
                           std::move(name),
                           std::move(parameter),
                           &its_group,
                           communication_dtype,
                           {shard_numel, offset, own},
                           UnreducedSum(its_group.target_dtype, streams_, counters_)};
    TORCH_CHECK_VALUE(shard_numel * its_group.world() >= numel, record.describe() + " has elements in no partition");
    TORCH_CHECK_VALUE(offset >= 0 && offset + shard_numel <= its_group.partition_numel,
                      record.describe() + " has a shard that lies in no partition of its group");
    order_.add_parameter(record.index, its_group.world() > 1);
    its_group.own_shards += own > 0;
    records_.push_back(std::move(record));
    ++counters_.registered;
}

std::string ParameterRecord::describe() const
{
    return "parameter '" + name + "' of shape " + shape_of(parameter) + " (rank " + std::to_string(group->rank()) +
           " of " + std::to_string(group->world()) + ")";
}

// 2. Reduced.

void Reducer::begin_backward(bool reduces)
{
    Dropped dropped;
    std::lock_guard lock(mutex_);
    TORCH_CHECK(!is_abandoned(),
                "a backward of this engine raised in another thread while this one began; run this one again");
    look_at_parameters();
    const bool is_first = !in_backward();
    // The backward of several losses begins once for each loss. From the second time on, autograd is accumulating, and
    // `parameter.grad` belongs to autograd.
    if (is_first) {
        for (auto& record : records_) {
            // The accumulation node adds to this sum, and the hooks see both together.
            if (!record.has_hooks_of_sum()) { record.unreduced.take_from_grad(record.parameter, dropped); }
        }
        begin_turns();
    }
    reduces_ = reduces;
    state_ = BackwardState::running;
    watch_graph_task();
    // Reentrant checkpointing hides the parameters of checkpointed modules from this graph.
    if (reduces && find_unreachable(is_first) && leads_to_checkpoints()) {
        for (auto& record : records_) { record.unreachable = false; }
    }
}

void Reducer::listen(std::function<bool()> begin)
{
    // Shared, because a copy of the function itself takes the interpreter's lock, and reduce() makes one each time.
    auto shared = std::make_shared<const std::function<bool()>>(std::move(begin));
    std::lock_guard lock(mutex_);
    begin_.swap(shared);
    look_at_parameters();
}

void Reducer::reduce(size_t index, const at::Tensor& gradient, Route route, bool donated)
{
    RECORD_USER_SCOPE("deepcompile::reduce");
    Dropped dropped;
    std::unique_lock lock(mutex_);
    at::NoGradGuard no_grad;
    const auto destroyed = "the engine of a parameter was destroyed while its gradient was computed";
    TORCH_CHECK(index < records_.size(), destroyed);
    if (route == Route::graph) {
        auto& record = records_[index];
        if (!record.autograd_wants()) { return; }
        // If a parameter was frozen after the forward, its accumulation node shows the gradient to hooks and
        // accumulates nothing.
        const bool is_frozen = !record.parameter.requires_grad();
        if (is_frozen && !record.has_hooks()) { return; }
        if (is_frozen || record.caller_wants()) {
            keep_for_autograd(record, gradient, donated);
            return;
        }
    }
    bool belongs_to_backward = in_backward();
    if (!belongs_to_backward && begin_) {
        // The function may call begin_backward(), which takes mutex_.
        const auto begin = begin_;
        lock.unlock();
        belongs_to_backward = (*begin)();
        lock.lock();
        TORCH_CHECK(index < records_.size(), destroyed);
    }
    auto& record = records_[index];
    TORCH_CHECK(gradient.layout() == at::kStrided,
                record.describe() +
                    " got a sparse gradient, and DeepCompile reduces dense ones only; build the module " +
                    "with sparse=False");
    TORCH_CHECK(gradient.sizes() == record.parameter.sizes(),
                record.describe() + " got a gradient of shape " + shape_of(gradient));
    if (route == Route::graph && record.has_hooks()) {
        auto& kept = keep_for_autograd(record, gradient, donated);
        if (!takes_turns(record)) { return; }
        if (!kept.left) { kept.left = contributions_of_graphs(record); }
        // The last contribution counts when the node gives the sum, before another graph runs.
        if (--*kept.left != 0) { count_without_gradient(record); }
        return;
    }
    ++(route == Route::graph ? counters_.from_graphs : counters_.from_autograd);
    streams_.order_after_last_use();

    if (!belongs_to_backward) {
        // The next backward takes the sum from there.
        record.unreduced.add(gradient, donated);
        record.unreduced.leave_in_grad(record.parameter, dropped);
        return;
    }
    if (!reduces_) {
        record.unreduced.add(gradient, donated);
        return;
    }
    if (record.group->world() == 1) {
        enqueue_with_sum(record, gradient, donated);
        return;
    }
    count(record);
    const auto* turn = order_.next();
    if (turn && turn->index == record.index) {
        if (record.received < turn->contributions) {
            record.unreduced.add(gradient, donated);
            return;
        }
        enqueue_with_sum(record, gradient, donated);
        record.received = 0;
        order_.advance();
        send_due_turns();
        return;
    }
    const int64_t awaited = order_.contributions_to(record.index);
    // A gradient that comes late can still join its parameter's in the bucket that is being filled.
    if (awaited == 0 && buckets_.add_to_earlier(record, gradient)) {
        --record.received;
        return;
    }
    order_.came_out_of_turn();
    ++counters_.out_of_turn;
    if (awaited == 0) {
        record.unreduced.add(gradient, donated);
    } else {
        keep_early(record, awaited, gradient, donated);
    }
}

// 4. End of backward. (3. Bound: see bucket.cpp.)

void Reducer::end_backward()
{
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    // If turns are left on this rank, other ranks may have put more gradients into the bucket that is being filled. All
    // ranks must send the same bucket, so do not send it here.
    if (buckets_.empty() || !order_.complete()) { return; }
    streams_.order_after_last_use();
    buckets_.launch();
    buckets_.drain();
}

std::vector<std::shared_ptr<HandedOver>> Reducer::finish_backward(bool reduces, bool completes)
{
    RECORD_USER_SCOPE("deepcompile::finish_backward");
    Dropped dropped;
    std::unique_lock lock(mutex_);
    std::vector<std::shared_ptr<HandedOver>> handed_over;
    if (groups_.empty()) { return handed_over; }
    at::NoGradGuard no_grad;
    // Autograd runs the callbacks that end a backward on the stream of the backward's caller, but on the default stream
    // if no accumulation node has run. So this function does not rely on the current stream: it works on the stream
    // that used the gradients last, and makes the current stream wait for that one in the end.
    const auto caller = streams_.current();
    // Outside of a backward the caller's stream may have changed `parameter.grad`, for example clipped it.
    if (torch::autograd::get_current_graph_task_id() == -1) { streams_.let_last_wait(caller); }
    c10::OptionalStreamGuard on_last_stream(streams_.last());
    streams_.order_after_last_use();
    if (reduces && !in_backward()) { begin_turns(); }
    buckets_.send_held();
    if (reduces) {
        // If no backward has begun, or no gradient has come for a hook, sums of the parameter's dtype still lie in
        // `parameter.grad`.
        for (auto& record : records_) { record.unreduced.take_from_grad(record.parameter, dropped); }
        // Clear `dropped` here: a sum may have the memory of a tensor in it, and must free the memory when the sum's
        // bucket is drained.
        lock.unlock();
        dropped.clear();
        lock.lock();
        if (groups_.empty()) { return handed_over; }
        for (auto& record : records_) {
            if (record.group->world() == 1 && record.unreduced.defined()) { enqueue_sum(record); }
        }
        send_rest_of_turns();
    } else {
        for (auto& record : records_) { record.unreduced.leave_in_grad(record.parameter, dropped); }
    }
    buckets_.launch();
    buckets_.drain();
    if (reduces) {
        // The optimizer also steps a parameter without a gradient, on zeros.
        for (auto& group : groups_) { group.allocate_flat_partition(); }
        for (const auto& record : records_) {
            if (record.group->targets.size() < record.group->own_shards) {
                record.group->bind_to_zeros(record.shards);
            }
        }
    }
    if (in_backward()) { leave_backward(BackwardState::none); }
    if (completes) {
        agree_and_reduce_late();
        is_handed_over_ = true;
        for (auto& group : groups_) { handed_over.push_back(group.hand_over()); }
    }
    streams_.let_wait(caller);
    // The optimizer reads host memory without a stream, so wait here for the queued copies.
    if (is_handed_over_ && groups_.front().host) { streams_.wait_on_host(); }
    return handed_over;
}

void Reducer::leave_backward(BackwardState next)
{
    reduces_ = false;
    state_ = next;
    graph_task_ = -1;
    ++serial_;
}

void Reducer::abandon_backward()
{
    Dropped dropped;
    std::lock_guard lock(mutex_);
    abandon(BackwardState::raised, dropped);
}

void Reducer::abandon(BackwardState how, Dropped& dropped)
{
    // If the backward raised on some ranks only, before any of them sent a bucket, only this marker makes their
    // fingerprints differ from those of the other ranks.
    agreement_.add(Marker::backward_abandoned);
    // Leave the backward first: during one, forget_gradients() leaves `parameter.grad` to autograd.
    leave_backward(how);
    buckets_.abandon();
    forget_gradients(dropped);
}

void Reducer::replace_gradients()
{
    std::lock_guard lock(mutex_);
    agreement_.add(Marker::gradients_replaced);
}

// 5. Handed over.

void Reducer::compare_and_await_targets()
{
    std::lock_guard lock(mutex_);
    if (groups_.empty()) { return; }
    const auto& all_ranks = largest(groups_);
    if (streams_.on_cpu() && all_ranks.world() > 1) { agreement_.compare(groups_, "begin a step"); }
    streams_.order_after_last_use();
    if (groups_.front().host) { streams_.wait_on_host(); }
    // The optimizer reads targets on this stream, and may drop them before the stream has read them.
    record_targets();
    streams_.forget_other_streams();
}

void Reducer::record_targets() const
{
    for (const auto& group : groups_) {
        for (const auto& [offset, target] : group.targets) { streams_.record_on_last(target); }
    }
}

void Reducer::await_others()
{
    std::lock_guard lock(mutex_);
    await_carriers("add up gradients");
}

void Reducer::await_carriers(const std::string& purpose)
{
    try {
        for (const auto& group : groups_) { group.carrier->await_others(); }
    } catch (const std::exception& error) {
        throw_for_other_ranks(purpose, error);
    }
}

// 6. Released.

void Reducer::release(std::optional<int64_t> group)
{
    Dropped dropped;
    std::lock_guard lock(mutex_);
    is_handed_over_ = false;
    if (!group) {
        forget_gradients(dropped);
    } else if (*group < static_cast<int64_t>(groups_.size())) {
        record_targets();
        // The optimizer's views of a partition may outlive the engine's groups.
        groups_[*group].release(dropped);
    }
}

void Reducer::forget_gradients(Dropped& dropped)
{
    record_targets();
    for (auto& group : groups_) { group.release(dropped); }
    const int task = torch::autograd::get_current_graph_task_id();
    for (auto& record : records_) {
        end_early(record);
        record.unreduced.drop(dropped);
        for (auto kept = record.for_autograd.begin(); kept != record.for_autograd.end();) {
            if (kept->first != task) { kept->second.sum.drop(dropped); }
            kept = kept->first == task ? std::next(kept) : record.for_autograd.erase(kept);
        }
        // While a backward runs, perhaps on another thread, `parameter.grad` belongs to autograd.
        if (in_backward()) { continue; }
        if (auto& grad = record.parameter.mutable_grad(); grad.defined()) {
            dropped.push_back(std::exchange(grad, {}));
        }
    }
}

void Reducer::close()
{
    // Declared before the lock, because dropping them takes the interpreter's lock.
    std::shared_ptr<const std::function<bool()>> begin;
    std::deque<ParameterRecord> records;
    Dropped dropped;
    std::lock_guard lock(mutex_);
    buckets_.abandon();
    forget_gradients(dropped);
    leave_backward(BackwardState::none);
    // Copies may still write into host memory that goes with the groups.
    if (!groups_.empty() && groups_.front().host) { streams_.wait_on_host(); }
    begin.swap(begin_);
    {
        std::lock_guard registry_lock(registry().mutex);
        const bool was_open = registry().reducers.erase(options_.identity) > 0;
        registry().wanting_to_hold -= was_open && options_.hold_on_cpu;
    }
    order_ = SendOrder();
    records.swap(records_);
    counters_.registered = 0;
    groups_.clear();
    // Forgets the device too, which may be gone when the destructor closes the reducer a second time.
    streams_ = StreamOrder();
}

// Counters.

std::map<std::string, int64_t> Reducer::counters() const
{
    // A thread that waits for other ranks holds the mutex, and a monitor's thread must not wait for it. Do not use a
    // timed mutex, whose locks gcc's ThreadSanitizer does not track.
    std::unique_lock lock(mutex_, std::try_to_lock);
    for (int tries = 0; !lock.owns_lock() && tries < 100; ++tries) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        lock.try_lock();
    }
    auto values = counters_.values();
    // Between backwards `parameter.grad` holds unreduced gradients. In a backward it belongs to autograd, on any
    // thread.
    if (lock.owns_lock() && !in_backward() && Py_IsInitialized()) {
        const pybind11::gil_scoped_acquire locked;
        for (const auto& record : records_) {
            const auto& grad = record.parameter.grad();
            if (grad.defined()) { values["unreduced"] += bytes_of(grad); }
        }
    }
    values["peak_unreduced"] = std::max(values["peak_unreduced"], values["unreduced"]);
    return values;
}

}  // namespace deepcompile

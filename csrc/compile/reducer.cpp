// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <set>
#include <string>

namespace deepcompile {

namespace {

// Gradients below this many elements are packed side by side, so that a norm's gradient costs no
// message of its own; larger ones get a segment each.
constexpr int64_t pack_limit = int64_t(1) << 19;
// Elements of one packed segment.
constexpr int64_t pack_numel = int64_t(1) << 20;
// A bucket of so many elements is sent even if more may be pending: tens of megabytes keep NVLink busy long
// enough, and their memory is free earlier.
constexpr int64_t send_numel = int64_t(1) << 25;

int64_t bytes_of(const at::Tensor& tensor)
{
    return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

/// Completes "could not".
std::string to_reduce(const Bucket& bucket)
{
    return "reduce the bucket that begins with the gradient of " + bucket.first_parameter;
}

/// Has `waiting` wait for what `used` does.
void wait_for(const c10::Stream& used, const c10::Stream& waiting)
{
    c10::Event done(used.device_type());
    done.record(used);
    done.block(waiting);
}

/// Whether keeping the tensor keeps exactly its own elements, in order.
bool fills_its_storage(const at::Tensor& tensor)
{
    return tensor.is_contiguous() && static_cast<int64_t>(tensor.storage().nbytes()) == bytes_of(tensor);
}

/// One message for each run of entries that have the same owner.
std::vector<Message> messages_of(const Segment& segment)
{
    std::vector<Message> messages;
    for (size_t first = 0, next = 0; first < segment.entries.size(); first = next) {
        const auto& begin = segment.entries[first];
        int64_t numel = 0;
        for (next = first; next < segment.entries.size() && segment.entries[next].piece.owner == begin.piece.owner;
             ++next) {
            numel += segment.entries[next].piece.numel;
        }
        messages.emplace_back(segment.memory.narrow(0, begin.offset, numel), begin.piece.owner);
    }
    return messages;
}

/// Whether a copy that lays together what goes to one owner saves at least half of the messages.
bool owners_alternate(const std::vector<Message>& messages)
{
    std::set<int64_t> owners;
    for (const auto& [memory, owner] : messages) { owners.insert(owner); }
    return messages.size() > 2 * owners.size();
}

}  // namespace

// Messages are put together without streams: where a compiler links its own copy of the C++ library, their locales
// are not torch's, and formatting a number crashes.
std::string shape_of(const at::Tensor& tensor)
{
    std::string text = "[";
    for (const auto size : tensor.sizes()) { text += (text.size() > 1 ? ", " : "") + std::to_string(size); }
    return text + "]";
}

std::vector<Piece> cut_at_partitions(int64_t offset, int64_t numel, int64_t partition_numel)
{
    std::vector<Piece> pieces;
    int64_t done = 0;
    while (done < numel) {
        const int64_t position = offset + done;
        const int64_t owner = position / partition_numel;
        const int64_t target_offset = position - owner * partition_numel;
        const int64_t length = std::min(numel - done, partition_numel - target_offset);
        pieces.push_back({owner, done, target_offset, length});
        done += length;
    }
    return pieces;
}

std::shared_ptr<Reducer> Reducer::make(Options options)
{
    auto reducer = std::shared_ptr<Reducer>(new Reducer(options));
    add_reducer(options.identity, reducer);
    return reducer;
}

Reducer::Reducer(Options options) : options_(options)
{
    // Engines may share a process group: ranks that send for different ones have sent different gradients.
    sent_.hash = options.identity;
}

Reducer::~Reducer()
{
    // An exception must not leave a destructor; what close() touches is this object's own.
    try {
        close();
    } catch (const std::exception& error) {
        TORCH_WARN(std::string("DeepCompile could not close its gradient reducer: ") + error.what());
    }
}

int64_t Reducer::add_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                           int64_t partition_numel,
                           at::ScalarType target_dtype,
                           at::Device device,
                           bool flat)
{
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_VALUE(partition_numel > 0, "a gradient partition needs at least one element");
    TORCH_CHECK_VALUE(groups_.empty() || groups_.front().device == device,
                      "all parameter groups of an engine must be on one device, but " + device.str() + " follows " +
                          groups_.front().device.str());
    groups_.push_back({std::move(process_group), partition_numel, target_dtype, device, flat, {}, {}});
    return static_cast<int64_t>(groups_.size()) - 1;
}

// 1. Registered empty.

void Reducer::register_parameter(
    int64_t group, std::string name, at::Tensor parameter, at::ScalarType communication_dtype, int64_t offset)
{
    std::lock_guard<std::mutex> lock(mutex_);
    ParameterRecord record;
    record.name = std::move(name);
    record.parameter = std::move(parameter);
    record.group = group;
    record.communication_dtype = communication_dtype;
    record.pieces = cut_at_partitions(offset, record.parameter.numel(), groups_.at(group).partition_numel);
    TORCH_CHECK_VALUE(record.pieces.empty() || record.pieces.back().owner < groups_[group].world(),
                      describe(record) + " ends behind the last partition of its group");
    records_.push_back(std::move(record));
}

std::string Reducer::describe(const ParameterRecord& record) const
{
    const auto& group = groups_[record.group];
    return "parameter '" + record.name + "' of shape " + shape_of(record.parameter) + " (rank " +
           std::to_string(group.rank()) + " of " + std::to_string(group.world()) + ")";
}

void Reducer::look_at_parameters()
{
    // The optimizer gives parameters new memory when states are offloaded and reloaded, and autograd a
    // new accumulation node when that changed the device.
    for (size_t index = 0; index < records_.size(); ++index) {
        auto& record = records_[index];
        if (record.parameter.numel() == 0) { continue; }
        record.data = record.parameter.const_data_ptr();
        watch_accumulation(index);
    }
}

void Reducer::watch_accumulation(size_t index)
{
    auto& record = records_[index];
    if (!record.parameter.requires_grad()) { return; }
    auto node = torch::autograd::impl::grad_accumulator(record.parameter);
    if (node == record.accumulation_node) { return; }
    using torch::autograd::variable_list;
    // A graph may keep the node for longer than this object lives, and a device's thread may be going through the
    // node's hooks when it is closed. So the hook is not taken out again, and does nothing from then on.
    node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [reducer = weak_from_this(), index](const variable_list& outputs, const variable_list& inputs) {
            if (const auto alive = reducer.lock()) { alive->on_accumulated(index, inputs); }
            return outputs;
        }));
    record.accumulation_node = std::move(node);
}

void Reducer::follow_stream()
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (groups_.empty() || groups_.front().device.is_cpu()) { return; }
    const auto stream = current_stream(groups_.front().device);
    if (watched_from_ == stream) { return; }
    bool all = true;
    for (size_t index = 0; index < records_.size(); ++index) {
        auto& record = records_[index];
        if (!record.accumulation_node) { continue; }
        const auto alive = [&record] { return torch::autograd::impl::try_get_grad_accumulator(record.parameter); };
        const bool in_use = alive() == record.accumulation_node;
        record.accumulation_node = nullptr;
        // A graph that is still alive has kept the node, with the hook.
        if (in_use) { record.accumulation_node = alive(); }
        all = all && !record.accumulation_node;
        if (!record.accumulation_node) { watch_accumulation(index); }
    }
    // Else the next forward tries again.
    if (all) { watched_from_ = stream; }
}

void Reducer::on_accumulated(size_t index, const torch::autograd::variable_list& inputs)
{
    at::Tensor parameter;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (index >= records_.size()) { return; }
        parameter = records_[index].parameter;
        // Another engine may have taken the parameters over while this one was not destroyed.
        if (parameter.numel() > 0 && parameter.const_data_ptr() != records_[index].data) { return; }
    }
    // Also called for a parameter whose gradient a compiled graph has reduced already: then it is undefined.
    auto& slot = parameter.mutable_grad();
    if (!slot.defined()) { return; }
    at::Tensor gradient = std::move(slot);
    slot = at::Tensor();
    // Autograd may have taken over a view of memory that another gradient still uses. It has kept what came in for
    // this hook, which is then a second name of the same memory, and nobody else's.
    const bool kept_for_hook = inputs.size() == 1 && inputs[0].defined() && inputs[0].use_count() == 1 &&
                               inputs[0].layout() == at::kStrided && gradient.is_alias_of(inputs[0]);
    // A hook of the user's may hold the gradient that it has seen.
    const bool sole_user = gradient.layout() == at::kStrided && gradient.use_count() == 1 &&
                           gradient.storage().use_count() == (kept_for_hook ? 2 : 1);
    reduce(index, gradient, Route::autograd, sole_user);
}

// 2. Reduced.

void Reducer::begin_backward(bool synchronize, const std::vector<size_t>& hooked)
{
    std::lock_guard<std::mutex> lock(mutex_);
    look_at_parameters();
    for (auto& record : records_) { record.hooked = false; }
    for (const auto index : hooked) { records_.at(index).hooked = true; }
    // The backward of several losses comes here for each of them, in the middle of which autograd is accumulating.
    if (!in_backward_) { take_kept(); }
    synchronize_ = synchronize;
    in_backward_ = true;
}

void Reducer::on_unannounced_backward(std::function<void()> begin)
{
    // Shared, because copying the function itself would take the interpreter's lock under this one.
    auto shared = std::make_shared<const std::function<void()>>(std::move(begin));
    std::lock_guard<std::mutex> lock(mutex_);
    begin_unannounced_.swap(shared);
    look_at_parameters();
}

const c10::Stream Reducer::current_stream(c10::Device device) const
{
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void Reducer::synchronize_device(c10::Device device) const
{
    if (!device.is_cpu()) { c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index()); }
}

void Reducer::order_after_last_use()
{
    // Buckets and targets are used from whichever stream a gradient was produced on; each user waits for
    // the one before, so that they may be written and read as if there were one stream.
    const auto device = groups_.front().device;
    if (device.is_cpu()) { return; }
    const auto stream = current_stream(device);
    if (last_stream_ && *last_stream_ != stream) {
        wait_for(*last_stream_, stream);
        several_streams_ = true;
    }
    last_stream_ = stream;
}

bool Reducer::autograd_wants(const ParameterRecord& record) const
{
    // torch.autograd.grad() and backward(inputs=...) ask for some gradients only, and a graph computes them all.
    const auto* asked = torch::autograd::get_current_graph_task_exec_info();
    if (!asked || asked->empty()) { return true; }
    const auto found = asked->find(record.accumulation_node.get());
    if (found == asked->end()) { return false; }
    TORCH_CHECK(!found->second.captures_ || found->second.captures_->empty(),
                describe(record) + " is reduced by its compiled graph, so torch.autograd.grad() cannot return its " +
                    "gradient; use safe_get_full_grad() after engine.backward()");
    return found->second.needed_;
}

void Reducer::reduce(size_t index, const at::Tensor& gradient, Route route, bool may_keep)
{
    std::unique_lock<std::mutex> lock(mutex_);
    at::NoGradGuard no_grad;
    const auto destroyed = "the engine of a parameter was destroyed while its gradient was computed";
    TORCH_CHECK(index < records_.size(), destroyed);
    if (!in_backward_ && begin_unannounced_ && (route == Route::autograd || autograd_wants(records_[index]))) {
        // It takes the interpreter's lock, whose holder may be waiting for this one.
        const auto begin = begin_unannounced_;
        lock.unlock();
        (*begin)();
        lock.lock();
        TORCH_CHECK(index < records_.size(), destroyed);
    }
    auto& record = records_[index];
    TORCH_CHECK(gradient.layout() == at::kStrided,
                describe(record) +
                    " got a sparse gradient, and DeepCompile reduces dense ones only; build the module " +
                    "with sparse=False");
    TORCH_CHECK(gradient.sizes() == record.parameter.sizes(),
                describe(record) + " got a gradient of shape " + shape_of(gradient));
    TORCH_CHECK(route != Route::graph || !record.hooked,
                describe(record) + " has a hook that its compiled graph does not call: register hooks before " +
                    "engine.compile(), in every layer that shares the graph, or call torch._dynamo.reset() " +
                    "after registering one");
    if (route == Route::graph && !autograd_wants(record)) { return; }
    ++(route == Route::graph ? from_graphs_ : from_autograd_);
    if (gradient.numel() == 0) { return; }
    order_after_last_use();

    if (synchronize_) { ++record.contributions; }
    // All ranks run the same graphs, so they have counted the same and wait for as many.
    if (!synchronize_ || record.contributions < record.awaited) {
        keep_unreduced(record, gradient, may_keep);
        return;
    }
    if (!record.unreduced.defined()) {
        enqueue(record, gradient, may_keep);
        return;
    }
    // The gradient joins what this rank has kept of earlier micro-batches, or of this backward.
    keep_unreduced(record, gradient, may_keep);
    enqueue(record, take_unreduced(record), /*may_keep=*/true);
}

void Reducer::keep_unreduced(ParameterRecord& record, const at::Tensor& gradient, bool may_keep)
{
    if (record.unreduced.defined()) {
        record.unreduced.add_(gradient);
        // The stream that added may not be the one whose pool the sum is from.
        if (several_streams_) { record.unreduced.record_stream(*last_stream_); }
        return;
    }
    const auto dtype = groups_[record.group].target_dtype;
    const bool as_it_is = may_keep && gradient.scalar_type() == dtype && fills_its_storage(gradient);
    record.unreduced = as_it_is ? gradient.detach()
                                : gradient.detach().to(gradient.options().dtype(dtype),
                                                       /*non_blocking=*/false,
                                                       /*copy=*/true,
                                                       at::MemoryFormat::Contiguous);
    unreduced_.add(bytes_of(record.unreduced));
}

at::Tensor Reducer::take_unreduced(ParameterRecord& record)
{
    at::Tensor sum = std::move(record.unreduced);
    record.unreduced = at::Tensor();
    unreduced_.remove(bytes_of(sum));
    // An earlier backward may have allocated it on another stream, whose pool must not hand it out while this stream
    // uses it. On the stream of its allocation this does nothing.
    if (!sum.is_cpu()) { sum.record_stream(current_stream(sum.device())); }
    return sum;
}

void Reducer::leave_kept()
{
    for (auto& record : records_) {
        if (!record.unreduced.defined() || record.unreduced.scalar_type() != record.parameter.scalar_type()) {
            continue;
        }
        record.parameter.mutable_grad() = take_unreduced(record);
    }
}

void Reducer::take_kept()
{
    for (auto& record : records_) {
        auto& slot = record.parameter.mutable_grad();
        if (!slot.defined() || slot.layout() != at::kStrided) { continue; }
        order_after_last_use();
        at::Tensor kept = std::move(slot);
        slot = at::Tensor();
        // What somebody else refers to as well is copied here and dropped, on another stream than that of its pool.
        if (!kept.is_cpu()) { kept.record_stream(current_stream(kept.device())); }
        keep_unreduced(record, kept, /*may_keep=*/kept.use_count() == 1 && kept.storage().use_count() == 1);
    }
}

int64_t Reducer::kept_bytes() const
{
    int64_t bytes = 0;
    for (const auto& record : records_) {
        const auto& slot = record.parameter.grad();
        if (slot.defined()) { bytes += bytes_of(slot); }
    }
    return bytes;
}

void Reducer::enqueue(ParameterRecord& record, at::Tensor gradient, bool may_keep)
{
    auto& group = groups_[record.group];
    if (group.world() == 1) {
        bind(group,
             record.pieces.front().target_offset,
             gradient.detach().reshape({-1}),
             may_keep && fills_its_storage(gradient));
        return;
    }
    const auto waiting = filling_.waiting.find(&record);
    if (waiting != filling_.waiting.end()) {
        // An earlier contribution has not been sent yet, so this one costs neither memory nor a message.
        waiting->second.add_(gradient);
        return;
    }
    // Pending bytes stay within `reduce_bucket_size` and one gradient, the largest of those being sent. Every
    // rank sees the same sizes in the same order and so sends the same buckets.
    const int64_t element_size = static_cast<int64_t>(c10::elementSize(record.communication_dtype));
    const int64_t limit = options_.bucket_numel * element_size;
    const int64_t bytes = gradient.numel() * element_size;
    if (in_flight_ && in_flight_->bytes - in_flight_->largest + filling_.bytes + bytes > limit) { drain(); }
    if (filling_.segments.empty()) { filling_.first_parameter = describe(record); }
    filling_.fingerprint.add_gradient(&record - records_.data());
    pack(group, record, gradient, may_keep);
    filling_.bytes += bytes;
    filling_.largest = std::max(filling_.largest, bytes);
    pending_.add(bytes);
    // Before a bucket is sent, the stream waits for the one before. Behind a long one, such as an embedding's,
    // more is gathered first: computing half as many bytes of gradients takes longer than sending those.
    const int64_t ahead = in_flight_ ? in_flight_->bytes / 2 : 0;
    if (filling_.bytes >= std::min((limit + 1) / 2, std::max(send_numel * element_size, ahead))) { launch(); }
}

void Reducer::pack(PartitionGroup& group, ParameterRecord& record, const at::Tensor& gradient, bool may_keep)
{
    const int64_t numel = gradient.numel();
    const auto stream = current_stream(group.device);
    const bool large = numel >= std::min(pack_limit, options_.bucket_numel);

    Segment* segment = nullptr;
    if (large && may_keep && gradient.scalar_type() == record.communication_dtype && fills_its_storage(gradient)) {
        filling_.segments.push_back({gradient.detach().view({-1}), record.group, /*owned=*/false, 0, stream, {}});
        segment = &filling_.segments.back();
    } else {
        for (auto& candidate : filling_.segments) {
            if (!large && candidate.owned && candidate.group == record.group && candidate.stream == stream &&
                candidate.memory.scalar_type() == record.communication_dtype &&
                candidate.used + numel <= candidate.memory.numel()) {
                segment = &candidate;
            }
        }
        if (!segment) {
            const int64_t capacity =
                large ? numel : std::max(numel, std::min(pack_numel, (options_.bucket_numel + 1) / 2));
            auto memory = at::empty({capacity}, gradient.options().dtype(record.communication_dtype));
            bucket_.add(bytes_of(memory));
            filling_.segments.push_back({std::move(memory), record.group, /*owned=*/true, 0, stream, {}});
            segment = &filling_.segments.back();
        }
    }
    auto place = segment->memory.narrow(0, segment->used, numel).view(gradient.sizes());
    // The copy runs on the stream that produced the gradient, before its memory can be used again.
    if (segment->owned) { place.copy_(gradient); }
    filling_.waiting.emplace(&record, std::move(place));
    for (const auto& piece : record.pieces) {
        segment->entries.push_back({piece, segment->used + piece.source_offset});
    }
    segment->used += numel;
}

void Reducer::launch()
{
    if (filling_.segments.empty()) { return; }
    // One bucket at a time is on its way; its memory is free for the next once the stream has waited.
    drain();
    filling_.waiting.clear();
    const auto device = groups_.front().device;
    if (options_.synchronize_before) { synchronize_device(device); }
    sent_.add_bucket(filling_.fingerprint);
    if (device.is_cpu()) {
        // The host waits for gloo anyway, and gloo ends the process when sizes differ.
        agreement_.ask(*groups_.front().process_group, device, sent_, asks_to_stop_compiling_, to_reduce(filling_));
        agreement_.check();
    }

    for (size_t index = 0; index < groups_.size(); ++index) {
        auto& group = groups_[index];
        std::vector<Message> messages;
        const bool average = group.process_group->getBackend(device.type())->getBackendName() == "nccl";
        for (auto& segment : filling_.segments) {
            if (segment.group != static_cast<int64_t>(index)) { continue; }
            auto runs = messages_of(segment);
            if (owners_alternate(runs)) {
                sort_by_owner(segment, std::move(runs));
                runs = messages_of(segment);
            }
            // Without averaging in the collective, scale before the sum, which then cannot leave fp16's range.
            if (!average) { segment.memory.narrow(0, 0, segment.used).mul_(1.0 / group.world()); }
            messages.insert(messages.end(), runs.begin(), runs.end());
        }
        if (messages.empty()) { continue; }
        send(group, messages, average);
        messages_sent_ += static_cast<int64_t>(messages.size());
    }
    ++buckets_sent_;
    in_flight_ = std::move(filling_);
    filling_ = Bucket();
    if (!options_.overlap || options_.synchronize_after) { drain(); }
    if (options_.synchronize_after) { synchronize_device(device); }
}

void Reducer::sort_by_owner(Segment& segment, std::vector<Message> runs)
{
    // Stable, so that contributions to one parameter are added in the order in which they came.
    std::stable_sort(runs.begin(), runs.end(), [](const Message& a, const Message& b) { return a.second < b.second; });
    std::vector<at::Tensor> parts;
    for (auto& [memory, owner] : runs) { parts.push_back(std::move(memory)); }
    auto sorted = at::cat(parts);
    bucket_.add(bytes_of(sorted));
    drop_memory(segment);
    segment.memory = std::move(sorted);
    segment.owned = true;
    segment.stream = current_stream(groups_[segment.group].device);
    std::stable_sort(segment.entries.begin(),
                     segment.entries.end(),
                     [](const Segment::Entry& a, const Segment::Entry& b) { return a.piece.owner < b.piece.owner; });
    int64_t offset = 0;
    for (auto& entry : segment.entries) {
        entry.offset = offset;
        offset += entry.piece.numel;
    }
}

void Reducer::send(PartitionGroup& group, std::vector<Message>& messages, bool average)
{
    const auto device = group.device.type();
    const bool coalesce = group.process_group->getBackend(device)->supportsCoalescing();
    if (coalesce) { group.process_group->startCoalescing(device); }
    try {
        for (auto& [tensor, owner] : messages) {
            c10d::ReduceOptions options;
            options.reduceOp = average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
            options.rootRank = owner;
            options.asyncOp = true;
            std::vector<at::Tensor> tensors{tensor};
            auto work = group.process_group->reduce(tensors, options);
            if (!coalesce) { filling_.works.push_back(std::move(work)); }
        }
    } catch (const std::exception& error) {
        // Leave the process group usable: an open coalescing block would swallow later collectives.
        if (coalesce) { group.process_group->endCoalescing(device); }
        throw_for_other_ranks(to_reduce(filling_), error);
    }
    if (coalesce) { filling_.works.push_back(group.process_group->endCoalescing(device)); }
}

void Reducer::drain()
{
    if (!in_flight_) { return; }
    // If this raises, nothing of the bucket is left.
    Bucket bucket = std::move(*in_flight_);
    in_flight_.reset();
    try {
        await(bucket);
        for (auto& segment : bucket.segments) {
            auto& group = groups_[segment.group];
            for (const auto& entry : segment.entries) {
                if (entry.piece.owner != group.rank()) { continue; }
                const auto arrived = segment.memory.narrow(0, entry.offset, entry.piece.numel);
                // A packed segment holds other gradients too, and one that straddles partitions other ranks' elements.
                bind(group, entry.piece.target_offset, arrived, entry.piece.numel == segment.memory.numel());
            }
        }
    } catch (...) {
        wait_on_device(bucket);
        recycle(bucket);
        throw;
    }
    recycle(bucket);
}

void Reducer::await(Bucket& bucket)
{
    // NCCL: the current stream waits for the collective. gloo: this thread does.
    try {
        for (auto& work : bucket.works) { work->wait(); }
    } catch (const std::exception& error) {
        throw_for_other_ranks(to_reduce(bucket), error);
    }
}

// 3. Bound.

void Reducer::bind(PartitionGroup& group, int64_t offset, const at::Tensor& arrived, bool may_keep)
{
    const auto bound = group.targets.find(offset);
    if (bound != group.targets.end()) {
        bound->second.add_(arrived);
        return;
    }
    at::Tensor target;
    if (group.flat) {
        bind_flat(group);
        target = group.flat_partition.narrow(0, offset, arrived.numel());
        target.copy_(arrived);
    } else {
        const bool as_it_is = may_keep && arrived.scalar_type() == group.target_dtype;
        target = as_it_is ? arrived
                          : arrived.to(arrived.options().dtype(group.target_dtype),
                                       /*non_blocking=*/false,
                                       /*copy=*/true,
                                       at::MemoryFormat::Contiguous);
        bound_.add(bytes_of(target));
    }
    group.targets.emplace(offset, std::move(target));
}

void Reducer::bind_flat(PartitionGroup& group)
{
    if (group.flat_partition.defined()) { return; }
    group.flat_partition =
        at::zeros({group.partition_numel}, at::TensorOptions().dtype(group.target_dtype).device(group.device));
    bound_.add(bytes_of(group.flat_partition));
}

void Reducer::bind_rest()
{
    for (auto& group : groups_) {
        if (group.flat) { bind_flat(group); }
    }
    for (const auto& record : records_) {
        auto& group = groups_[record.group];
        for (const auto& piece : record.pieces) {
            if (piece.owner != group.rank() || group.targets.count(piece.target_offset)) { continue; }
            const auto options = at::TensorOptions().dtype(group.target_dtype).device(group.device);
            // One zero for all where it only has to be copied.
            const auto zeros =
                group.flat ? at::zeros({1}, options).expand({piece.numel}) : at::zeros({piece.numel}, options);
            bind(group, piece.target_offset, zeros, /*may_keep=*/true);
        }
    }
}

int64_t PartitionGroup::bound_bytes() const
{
    if (flat) { return flat_partition.defined() ? bytes_of(flat_partition) : 0; }
    int64_t bytes = 0;
    for (const auto& [offset, target] : targets) { bytes += bytes_of(target); }
    return bytes;
}

void Reducer::recycle(Bucket& bucket)
{
    // The stream that waited for the collective is the one on which memory may be used again.
    for (auto& segment : bucket.segments) { drop_memory(segment); }
    pending_.remove(bucket.bytes);
    bucket = Bucket();
}

void Reducer::drop_memory(Segment& segment)
{
    // Memory that belongs to another stream's pool must not return to that pool before the last stream is done.
    if (!segment.memory.is_cpu() && last_stream_ && segment.stream != *last_stream_) {
        segment.memory.record_stream(*last_stream_);
    }
    if (segment.owned) { bucket_.remove(bytes_of(segment.memory)); }
    segment.memory = at::Tensor();
}

// 4. End of backward.

void Reducer::end_backward()
{
    std::lock_guard<std::mutex> lock(mutex_);
    at::NoGradGuard no_grad;
    if (empty()) { return; }
    order_after_last_use();
    launch();
    drain();
}

void Reducer::finish_backward(bool synchronize)
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (groups_.empty()) { return; }
    at::NoGradGuard no_grad;
    const auto device = groups_.front().device;
    // Autograd runs the callbacks that end a backward on the caller's stream, but where no accumulation node has run,
    // on the default one. The reductions' own stream is right in either case, and the caller's waits for it.
    const auto caller = current_stream(device);
    c10::OptionalStreamGuard guard(last_stream_);
    order_after_last_use();
    if (synchronize) {
        // Where no backward has begun, all of them lie between backwards still.
        if (!in_backward_) { take_kept(); }
        // An earlier micro-batch kept the gradient and the last one did not use the parameter, or fewer contributions
        // came than in the backward before. Registration order is the same on every rank.
        for (auto& record : records_) {
            if (record.unreduced.defined()) { enqueue(record, take_unreduced(record), /*may_keep=*/true); }
        }
    } else {
        leave_kept();
    }
    launch();
    drain();
    if (synchronize) {
        // A parameter that got no gradient is still stepped, on zeros.
        bind_rest();
    }
    if (synchronize_) {
        for (auto& record : records_) {
            if (record.contributions == 0) { continue; }
            // Two contributions are sent one by one: they are often those of an embedding that is also the head, of
            // which a sum would be held throughout the backward.
            record.awaited = record.contributions > 2 ? record.contributions : 0;
            record.contributions = 0;
        }
    }
    if (last_stream_ && *last_stream_ != caller) { wait_for(*last_stream_, caller); }
    synchronize_ = false;
    in_backward_ = false;
}

void Reducer::use_targets_here()
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (groups_.empty()) { return; }
    order_after_last_use();
    if (!several_streams_) { return; }
    // The optimizer reads targets on this stream, and may drop them before it is done.
    for (const auto& group : groups_) {
        for (const auto& [offset, target] : group.targets) { target.record_stream(*last_stream_); }
    }
    several_streams_ = false;
}

void Reducer::abandon_backward()
{
    std::lock_guard<std::mutex> lock(mutex_);
    at::NoGradGuard no_grad;
    if (in_backward_) { sent_.add_abandoned_backward(); }
    synchronize_ = in_backward_ = false;
    if (in_flight_) {
        wait_on_device(*in_flight_);
        recycle(*in_flight_);
        in_flight_.reset();
    }
    // Holds works too where launching it failed half way.
    wait_on_device(filling_);
    recycle(filling_);
    forget_gradients();
}

void Reducer::wait_on_device(Bucket& bucket)
{
    // The stream has to wait before the memory is used again. On CPU the works themselves hold their tensors, and
    // waiting for them here could outlast a peer that is gone.
    if (groups_.empty() || groups_.front().device.is_cpu()) { return; }
    order_after_last_use();
    for (auto& work : bucket.works) {
        try {
            work->wait();
        } catch (const std::exception& error) {
            TORCH_WARN(std::string("DeepCompile drops gradients whose reduction failed: ") + error.what());
        }
    }
}

// 5. Handed over.

Targets Reducer::targets(int64_t group) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return groups_.at(group).targets;
}

std::optional<at::Tensor> Reducer::flat_partition(int64_t group) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& flat = groups_.at(group).flat_partition;
    return flat.defined() ? std::optional<at::Tensor>(flat) : std::nullopt;
}

// 6. Released.

void Reducer::release(int64_t group)
{
    std::lock_guard<std::mutex> lock(mutex_);
    // Views of a partition may outlive the engine.
    if (group >= static_cast<int64_t>(groups_.size())) { return; }
    bound_.remove(groups_[group].bound_bytes());
    groups_[group].flat_partition = at::Tensor();
    groups_[group].targets.clear();
}

void Reducer::release_all()
{
    std::lock_guard<std::mutex> lock(mutex_);
    forget_gradients();
}

void Reducer::forget_gradients()
{
    for (auto& group : groups_) {
        group.flat_partition = at::Tensor();
        group.targets.clear();
    }
    for (auto& record : records_) {
        record.unreduced = at::Tensor();
        record.parameter.mutable_grad() = at::Tensor();
        record.contributions = 0;
    }
    bound_.remove(bound_.now());
    unreduced_.remove(unreduced_.now());
}

void Reducer::close()
{
    abandon_backward();
    // Dropped behind the lock, see on_unannounced_backward().
    std::shared_ptr<const std::function<void()>> begin;
    std::lock_guard<std::mutex> lock(mutex_);
    begin.swap(begin_unannounced_);
    remove_reducer(options_.identity);
    records_.clear();
    groups_.clear();
    last_stream_.reset();
}

void Reducer::ask_others()
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (groups_.empty()) { return; }
    const auto& group = groups_.front();
    agreement_.ask(*group.process_group, group.device, sent_, asks_to_stop_compiling_, "begin the optimizer step");
}

void Reducer::check_others()
{
    std::lock_guard<std::mutex> lock(mutex_);
    agreement_.check();
}

void Reducer::ask_to_stop_compiling()
{
    std::lock_guard<std::mutex> lock(mutex_);
    asks_to_stop_compiling_ = true;
}

bool Reducer::stops_compiling() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return agreement_.stops_compiling();
}

std::map<std::string, int64_t> Reducer::counters() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    std::map<std::string, int64_t> values{{"registered", static_cast<int64_t>(records_.size())},
                                          {"from_graphs", from_graphs_},
                                          {"from_autograd", from_autograd_},
                                          {"buckets_sent", buckets_sent_},
                                          {"messages_sent", messages_sent_}};
    const std::pair<const char*, const ByteCount*> counts[] = {
        {"bound", &bound_}, {"pending", &pending_}, {"bucket", &bucket_}, {"unreduced", &unreduced_}};
    for (const auto& [name, count] : counts) {
        values[name] = count->now();
        values[std::string("peak_") + name] = count->peak();
    }
    values["unreduced"] += kept_bytes();
    values["peak_unreduced"] = std::max(values["peak_unreduced"], values["unreduced"]);
    return values;
}

void Reducer::reset_counters()
{
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* count : {&bound_, &pending_, &bucket_, &unreduced_}) { count->reset_peak(); }
    from_graphs_ = from_autograd_ = buckets_sent_ = messages_sent_ = 0;
}

}  // namespace deepcompile

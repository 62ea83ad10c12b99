// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

// Gradients on their way: packed, joined, sent, awaited, and bound as the averaged gradients of this rank's partition.

namespace deepcompile {

namespace {

// Gradients whose shards have fewer elements are packed side by side, so that a norm's gradient costs no message of its
// own. A larger gradient gets a segment for itself.
constexpr int64_t pack_limit = int64_t(1) << 17;
// Elements of a segment in which gradients are packed, for each rank, and at most.
constexpr int64_t pack_numel = int64_t(1) << 18;
constexpr int64_t most_packed = int64_t(1) << 24;

/// Counts `more` buckets that a reducer of this process sends over a process group; returns how many there were so far.
/// If one backward runs through two engines that share a group, ranks that differ may send the engines' buckets in
/// another order, which neither engine could see by itself.
int64_t launches_over(const c10d::ProcessGroup& process_group, int64_t more)
{
    static std::mutex mutex;
    static std::unordered_map<std::string, int64_t> counts;
    std::lock_guard lock(mutex);
    return counts[process_group.getGroupName()] += more;
}

// Elements of host memory to copy or add at once, which bounds the device memory of a cast or a sum.
constexpr int64_t part_numel = int64_t(1) << 23;

/// Copies to a target in host memory, or adds to it. The device computes the sum, because the host would have to wait
/// for the arrived gradient.
void write_host_target(const at::Tensor& target, const at::Tensor& arrived, bool adds)
{
    for (int64_t first = 0; first < target.numel(); first += part_numel) {
        const int64_t numel = std::min(part_numel, target.numel() - first);
        const auto part = target.narrow(0, first, numel);
        auto value = arrived.narrow(0, first, numel);
        if (adds) { value = part.to(arrived.device(), part.scalar_type(), /*non_blocking=*/true).add_(value); }
        part.copy_(value, /*non_blocking=*/true);
    }
}

}  // namespace

// Filled.

std::string Bucket::purpose() const
{
    return "reduce the bucket that begins with the gradient of " + first_parameter_;
}

bool Bucket::add_to_earlier(const ParameterRecord& record, const at::Tensor& gradient)
{
    const auto joinable = joinable_.find(&record);
    if (joinable == joinable_.end()) { return false; }
    joinable->second.add_(gradient);
    return true;
}

void Bucket::add(const ParameterRecord& record, const at::Tensor& gradient, bool donated)
{
    if (empty()) { first_parameter_ = record.describe(); }
    ++fingerprint_.gradients;
    fingerprint_.mix(record.index);
    const int64_t numel = gradient.numel();
    auto& segment = segment_for(record, gradient, donated);
    auto place = segment.memory.narrow(0, segment.used, numel).view(gradient.sizes());
    // The copy runs on the stream that produced the gradient. The gradient's memory can be used again only by later
    // work of that stream.
    if (!segment.donated) { place.copy_(gradient); }
    joinable_.emplace(&record, std::move(place));
    const int64_t padded = record.shards.numel * record.group->world();
    if (padded > numel) { segment.memory.narrow(0, segment.used + numel, padded - numel).zero_(); }
    segment.entries.push_back({record.shards, segment.used});
    for (const auto value : {record.shards.offset, record.shards.numel}) { fingerprint_.mix(value); }
    segment.used += padded;
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(record.communication_dtype));
    bytes_ += bytes;
    largest_ = std::max(largest_, bytes);
    counters_.pending.add(bytes);
}

Segment& Bucket::segment_for(const ParameterRecord& record, const at::Tensor& gradient, bool donated)
{
    const int64_t world = record.group->world();
    const int64_t numel = record.shards.numel * world;
    const auto dtype = record.communication_dtype;
    const auto stream = streams_.current();
    const bool large = gradient.numel() >= std::min(pack_limit * world, options_.bucket_numel);
    if (large && donated && numel == gradient.numel() && gradient.scalar_type() == dtype &&
        fills_its_storage(gradient)) {
        segments_.push_back({gradient.detach().view({-1}), record.group, /*donated=*/true, stream});
        mark_stage("deepcompile::on_its_way", gradient);
        return segments_.back();
    }
    if (!large) {
        const auto has_room = [&](const Segment& segment) {
            return !segment.donated && segment.group == record.group && segment.memory.scalar_type() == dtype &&
                   segment.used + numel <= segment.memory.numel();
        };
        // Every rank takes the latest segment that has room, so that all ranks send the same messages.
        const auto found = std::find_if(segments_.rbegin(), segments_.rend(), has_room);
        if (found != segments_.rend()) { return *found; }
    }
    const int64_t packed = std::min({pack_numel * world, most_packed, (options_.bucket_numel + 1) / 2});
    const int64_t capacity = large ? numel : std::max(numel, packed);
    auto memory = at::empty({capacity}, gradient.options().dtype(dtype));
    counters_.bucket.add(bytes_of(memory));
    segments_.push_back({std::move(memory), record.group, /*donated=*/false, stream});
    return segments_.back();
}

// Sent.

void Bucket::send(const std::deque<PartitionGroup>& groups)
{
    // Views of the segments' memory. Joining replaces that memory, and a view would keep the old memory alive.
    joinable_.clear();
    for (const auto& group : groups) {
        std::vector<Message> messages;
        for (auto& segment : segments_) {
            if (segment.group != &group) { continue; }
            // A single rank has nobody to send to. Targets in host memory come here all the same.
            if (group.world() == 1) {
                if (group.divisor != 1) { segment.memory.narrow(0, 0, segment.used).div_(group.divisor); }
                segment.shard = segment.memory;
                continue;
            }
            messages.push_back(message_of(segment));
        }
        if (messages.empty()) { continue; }
        counters_.messages_sent += static_cast<int64_t>(messages.size());
        try {
            group.carrier->reduce(messages, group.divisor, works_);
        } catch (const std::exception& error) {
            throw_for_other_ranks(purpose(), error);
        }
    }
}

Message Bucket::message_of(Segment& segment)
{
    const int64_t world = segment.group->world();
    if (segment.entries.size() > 1) {
        std::vector<at::Tensor> rows;
        for (const auto& entry : segment.entries) {
            const int64_t numel = entry.shards.numel;
            rows.push_back(segment.memory.narrow(0, entry.offset, world * numel).view({world, numel}));
        }
        auto joined = at::cat(rows, /*dim=*/1).view({-1});
        rows.clear();
        counters_.bucket.add(bytes_of(joined));
        drop_memory(segment);
        segment.memory = std::move(joined);
        segment.donated = false;
        segment.stream = streams_.current();
    }
    segment.sent_on = streams_.current();
    segment.shard = at::empty({segment.used / world}, segment.memory.options());
    counters_.bucket.add(bytes_of(segment.shard));
    return {segment.memory.narrow(0, 0, segment.used), segment.shard};
}

// Awaited.

void Bucket::copy_to_host()
{
    const c10::StreamGuard on_copies(streams_.copies());
    // The collectives have waited for the stream that made the gradients, but a single rank has sent nothing.
    streams_.let_wait(streams_.copies());
    try {
        arrive();
    } catch (...) {
        // Copies may have been queued. abandon() waits for them.
        copied_ = record_event(streams_.copies());
        throw;
    }
    copied_ = record_event(streams_.copies());
}

void Bucket::arrive()
{
    if (copied_) {
        copied_->block(streams_.current());
        return;
    }
    try {
        for (auto& work : works_) { work->wait(); }
    } catch (const std::exception& error) {
        throw_for_other_ranks(purpose(), error);
    }
    for (auto& segment : segments_) {
        // Copies to the host are only queued here, on another stream than that on which the shard was allocated.
        const auto shard = segment.group->host ? segment.shard : drop_shard(segment);
        int64_t offset = 0;
        for (const auto& entry : segment.entries) {
            if (entry.shards.own > 0) {
                const auto arrived = shard.narrow(0, offset, entry.shards.own);
                // A target may keep the memory only if it is all of it, without padding and other gradients.
                segment.group->bind(entry.shards.offset, arrived, /*donated=*/entry.shards.own == shard.numel());
            }
            offset += entry.shards.numel;
        }
    }
}

void Bucket::wait_on_device()
{
    // On a GPU the stream has to wait for the collectives before the bucket's memory is used again. On CPU the works
    // themselves hold their tensors, and waiting for the works here could outlast a peer that is gone.
    if (streams_.on_cpu()) { return; }
    streams_.order_after_last_use();
    if (copied_) { copied_->block(streams_.current()); }
    for (auto& work : works_) {
        try {
            work->wait();
        } catch (const std::exception& error) {
            TORCH_WARN(std::string("DeepCompile drops gradients whose reduction failed: ") + error.what());
        }
    }
}

Bucket::~Bucket()
{
    counters_.pending.remove(bytes_);
    // The last stream has waited for the collectives, so on that stream the memory may be used again. An exception must
    // not leave a destructor, least of all one that hides an earlier error of a collective.
    try {
        for (auto& segment : segments_) {
            drop_shard(segment);
            drop_memory(segment);
        }
    } catch (const std::exception& error) {
        TORCH_WARN(std::string("DeepCompile could not drop a bucket's memory: ") + error.what());
    }
}

void Bucket::drop_memory(Segment& segment)
{
    // Memory from the pool of another stream must not return to that pool before the last stream is done with it.
    streams_.record_on_last(segment.memory, segment.stream);
    if (!segment.donated) { counters_.bucket.remove(bytes_of(segment.memory)); }
    // On CPU, a thread of gloo may hold the memory for a moment longer, and a profiler does not see that thread free
    // it.
    mark_stage("deepcompile::dropped", segment.memory);
    segment.memory = at::Tensor();
}

at::Tensor Bucket::drop_shard(Segment& segment)
{
    auto shard = std::exchange(segment.shard, {});
    if (shard.defined() && !shard.is_same(segment.memory)) {
        streams_.record_on_last(shard, *segment.sent_on);
        counters_.bucket.remove(bytes_of(shard));
    }
    return shard;
}

// One bucket after the other.

void BucketQueue::enqueue(const ParameterRecord& record, const at::Tensor& gradient, bool donated)
{
    // A copy to the host takes time, and the gradient's memory waits for it in a bucket.
    if (record.group->world() == 1 && !record.group->host) {
        auto own = in_shape(gradient.contiguous(), {gradient.numel()});
        const double divisor = record.group->divisor;
        if (divisor != 1) { own = donated ? own.div_(divisor) : own.div(divisor); }
        record.group->bind(record.shards.offset, own, donated || divisor != 1);
        return;
    }
    if (filling_->add_to_earlier(record, gradient)) { return; }
    // Pending bytes stay within `reduce_bucket_size` plus the largest gradient in flight, unless buckets are held. Every
    // rank sees the same sizes in the same order, so every rank sends the same buckets.
    const int64_t element_size = static_cast<int64_t>(c10::elementSize(record.communication_dtype));
    const int64_t limit = options_.bucket_numel * element_size;
    const int64_t bytes = gradient.numel() * element_size;
    if (launched_bytes_ > 0 && launched_bytes_ - launched_largest_ + filling_->bytes() + bytes > limit) { drain(); }
    filling_->add(record, gradient, donated);
    // Before a bucket is sent, the stream waits for the bucket in flight. If that is a long one, such as an
    // embedding's, gather more first: computing half as many bytes of gradients takes longer than sending the bucket
    // in flight.
    const int64_t ahead = launched_bytes_ / 2;
    const int64_t enough = std::max(options_.send_numel * element_size, ahead);
    if (filling_->bytes() >= std::min((limit + 1) / 2, enough)) { launch(); }
}

void BucketQueue::begin_backward(bool holds)
{
    holds_ = holds;
    if (!groups_.empty()) { launches_before_ = launches_over(*largest(groups_).process_group, 0); }
}

void BucketQueue::launch()
{
    if (filling_->empty()) { return; }
    // Only one bucket at a time is in flight. When the stream has waited for it, its memory is free for the next one.
    drain();
    if (options_.overlap && !options_.synchronize_after) {
        launched_bytes_ = filling_->bytes();
        launched_largest_ = filling_->largest();
    }
    held_.push_back(std::exchange(filling_, empty_bucket()));
    if (!holds_) { send_first(); }
}

void BucketQueue::send_held()
{
    holds_ = false;
    while (!held_.empty()) {
        await_in_flight();
        send_first();
    }
}

void BucketQueue::send_first()
{
    RECORD_USER_SCOPE("deepcompile::launch");
    failed_ = true;
    in_flight_ = std::move(held_.front());
    held_.pop_front();
    if (options_.synchronize_before) { streams_.synchronize_device(); }
    const auto& group = largest(groups_);
    const int64_t launches = launches_over(*group.process_group, 1);
    agreement_.add_bucket(in_flight_->fingerprint(), launches - 1 - launches_before_);
    launches_before_ = launches;
    if (streams_.on_cpu() && group.world() > 1) {
        // gloo ends the process if ranks send different sizes, so the ranks first compare their fingerprints. The host
        // waits for that, as it does for gloo's reductions anyway.
        agreement_.compare(groups_, in_flight_->purpose());
    }
    in_flight_->send(groups_);
    ++counters_.buckets_sent;
    if (group.host && !streams_.on_cpu()) { in_flight_->copy_to_host(); }
    failed_ = false;
    if (!options_.overlap || options_.synchronize_after) { await_in_flight(); }
    if (options_.synchronize_after) { streams_.synchronize_device(); }
}

void BucketQueue::drain()
{
    launched_bytes_ = launched_largest_ = 0;
    await_in_flight();
}

void BucketQueue::await_in_flight()
{
    // Another thread of the backward, or a function that has caught the error, may come here before abandon(). If the
    // bucket was sent again, the other ranks would take it for the next one. Without it, the step would lack gradients.
    TORCH_CHECK(!failed_,
                "DeepCompile sends no more gradients of this backward, because sending an earlier bucket of it has "
                "failed; look for the first error of this rank");
    if (!in_flight_) { return; }
    failed_ = true;
    in_flight_->arrive();
    failed_ = false;
    in_flight_.reset();
}

void BucketQueue::abandon()
{
    // If sending the bucket failed half way, it holds works too.
    if (in_flight_) { in_flight_->wait_on_device(); }
    in_flight_.reset();
    failed_ = false;
    held_.clear();
    filling_ = empty_bucket();
    launched_bytes_ = launched_largest_ = 0;
}

// 3. Bound.

const PartitionGroup& largest(const std::deque<PartitionGroup>& groups)
{
    return *std::max_element(groups.begin(), groups.end(), [](const PartitionGroup& one, const PartitionGroup& other) {
        return one.world() < other.world();
    });
}

void PartitionGroup::bind(int64_t offset, const at::Tensor& arrived, bool donated)
{
    RECORD_USER_SCOPE("deepcompile::bind");
    const auto bound = targets.find(offset);
    if (bound != targets.end()) {
        if (host) {
            write_host_target(bound->second, arrived, /*adds=*/true);
        } else {
            bound->second.add_(arrived);
        }
        return;
    }
    at::Tensor target;
    if (host) {
        target = host->narrow(0, offset, arrived.numel());
        write_host_target(target, arrived, /*adds=*/false);
    } else if (flat) {
        allocate_flat_partition();
        target = flat_partition.narrow(0, offset, arrived.numel());
        target.copy_(arrived);
    } else {
        target = keep_or_copy(arrived, target_dtype, donated);
        mark_stage("deepcompile::bound", target);
    }
    if (!flat) { (host ? counters.on_host : counters.bound).add(bytes_of(target)); }
    targets.emplace(offset, std::move(target));
}

void PartitionGroup::bind_to_zeros(const Shards& shards)
{
    if (shards.own == 0 || targets.count(shards.offset)) { return; }
    const auto options = at::TensorOptions().dtype(target_dtype).device(device);
    // If the zeros are only copied, one zero serves for all elements. Copy them to host memory from the device too: it
    // may still read parameters there that the previous step wrote.
    const bool copied = flat || host;
    bind(shards.offset, at::zeros({copied ? 1 : shards.own}, options).expand({shards.own}), /*donated=*/true);
}

void PartitionGroup::allocate_flat_partition()
{
    if (!flat || flat_partition.defined()) { return; }
    flat_partition = at::zeros({partition_numel}, at::TensorOptions().dtype(target_dtype).device(device));
    counters.bound.add(bytes_of(flat_partition));
    mark_stage("deepcompile::bound", flat_partition);
}

std::shared_ptr<HandedOver> PartitionGroup::hand_over()
{
    // Several backwards may add up in one step. What the previous backward handed over has the same targets, and a list
    // that the caller has kept of it goes on showing them, so nothing is dropped here.
    return handed_over = std::make_shared<HandedOver>(targets, flat_partition);
}

void PartitionGroup::release(Dropped& dropped)
{
    if (flat_partition.defined()) { counters.bound.remove(bytes_of(flat_partition)); }
    for (auto& [offset, target] : targets) {
        if (!flat) { (host ? counters.on_host : counters.bound).remove(bytes_of(target)); }
        dropped.push_back(std::move(target));
    }
    dropped.push_back(std::exchange(flat_partition, {}));
    targets.clear();
    if (handed_over) { handed_over->drop(dropped); }
    handed_over.reset();
}

// 5. Handed over.

at::Tensor HandedOver::flat_partition() const
{
    std::lock_guard lock(mutex_);
    return flat_partition_;
}

Targets HandedOver::targets() const
{
    std::lock_guard lock(mutex_);
    return targets_;
}

bool HandedOver::are_views(const std::vector<std::optional<at::Tensor>>& views) const
{
    std::lock_guard lock(mutex_);
    if (views.size() != targets_.size()) { return false; }
    if (flat_partition_.defined() && !targets_.empty()) {
        const auto& [offset, first] = *targets_.begin();
        const auto* begin = static_cast<const char*>(flat_partition_.const_data_ptr());
        if (first.const_data_ptr() != begin + offset * first.element_size()) { return false; }
    }
    auto view = views.begin();
    return std::all_of(targets_.begin(), targets_.end(), [&view](const auto& entry) {
        const auto& target = entry.second;
        const auto& taken = *view++;
        return !taken || (taken->layout() == at::kStrided && taken->numel() == target.numel() &&
                          taken->scalar_type() == target.scalar_type() && taken->is_contiguous() &&
                          taken->const_data_ptr() == target.const_data_ptr());
    });
}

void HandedOver::drop(Dropped& dropped)
{
    std::lock_guard lock(mutex_);
    for (auto& [offset, target] : targets_) { dropped.push_back(std::move(target)); }
    targets_.clear();
    dropped.push_back(std::exchange(flat_partition_, {}));
}

}  // namespace deepcompile

// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>

// The order in which all ranks send gradients, whether all have sent the same, and what a rank does if its own
// gradients come in another order.

namespace deepcompile {

// The order.

void SendOrder::add_parameter(int64_t index, bool is_sent)
{
    // A parameter that no rank has seen in the first step loses its turn then: it may never get a gradient.
    unseen_.resize(index + 1, steps_to_give_up - 1);
    if (!is_sent) { return; }
    turns_.insert(turns_.begin(), {index, 1});
}

const Turn* SendOrder::next() const
{
    return complete() ? nullptr : &turns_[taken_];
}

int64_t SendOrder::contributions_to(int64_t index) const
{
    const auto next = turns_.begin() + static_cast<std::ptrdiff_t>(taken_);
    const auto found = std::find_if(next, turns_.end(), [index](const Turn& turn) { return turn.index == index; });
    return found == turns_.end() ? 0 : found->contributions;
}

void SendOrder::begin_backward()
{
    taken_ = 0;
    arrived_.clear();
    suits_ = true;
}

void SendOrder::saw(int64_t index)
{
    arrived_.push_back(index);
    unseen_[index] = seen_now;
}

void SendOrder::end_step()
{
    for (auto& steps : unseen_) { ++steps; }
}

bool SendOrder::wants_change() const
{
    // Ask only in every 16th step, because another rank may still see the parameter.
    const auto may_go = [this](const Turn& turn) {
        return unseen_[turn.index] > 0 && unseen_[turn.index] % steps_to_give_up == 0;
    };
    return !suits_ || std::any_of(turns_.begin(), turns_.end(), may_go);
}

std::vector<Turn> SendOrder::as_arrived() const
{
    std::unordered_map<int64_t, int64_t> contributions;
    for (const auto index : arrived_) { ++contributions[index]; }
    std::vector<Turn> turns;
    std::unordered_map<int64_t, int64_t> so_far;
    for (const auto index : arrived_) {
        // Two contributions are sent one by one. They are often those of a tied embedding and head, at the two ends of
        // the backward, and this rank would hold their sum all the time between. Three or more are sent together when
        // the last one has come.
        const int64_t together = contributions[index] > 2 ? contributions[index] : 1;
        if (++so_far[index] % together == 0) { turns.push_back({index, together}); }
    }
    return turns;
}

void SendOrder::take_over(const std::vector<Turn>& first_rank, const std::vector<int64_t>& steps_unseen)
{
    std::vector<Turn> turns = first_rank;
    std::vector<bool> arrived(steps_unseen.size(), false);
    for (const auto& turn : turns) { arrived[turn.index] = true; }
    // Some turns of the old order have gradients that did not arrive on the first rank. Such a turn keeps its place
    // after the turn that it followed, so that branches which alternate do not push each other to the end. For example,
    // old a b c d and arrived d a give d a b c. `place` is where the next such turn goes.
    size_t place = 0;
    std::vector<bool> has_turn = arrived;
    for (const auto& turn : turns_) {
        if (!arrived[turn.index]) {
            if (steps_unseen[turn.index] >= steps_to_give_up) { continue; }
            turns.insert(turns.begin() + static_cast<std::ptrdiff_t>(place++), turn);
            has_turn[turn.index] = true;
            continue;
        }
        const auto found = std::find_if(turns.begin() + static_cast<std::ptrdiff_t>(place),
                                        turns.end(),
                                        [&turn](const Turn& other) { return other.index == turn.index; });
        if (found != turns.end()) { place = static_cast<size_t>(found - turns.begin()) + 1; }
    }
    // Parameters without a turn whose gradients came late on some rank get a turn at the end.
    for (auto index = static_cast<int64_t>(steps_unseen.size()) - 1; index >= 0; --index) {
        if (steps_unseen[index] == 0 && !has_turn[index]) { turns.push_back({index, 1}); }
    }
    turns_ = std::move(turns);
}

// The check that all ranks have sent the same.

void Fingerprint::mix(int64_t value)
{
    hash = static_cast<int64_t>(c10::hash_combine(static_cast<size_t>(hash), static_cast<size_t>(value)));
}

std::string could_not(const std::string& purpose, const std::string& reason)
{
    return "DeepCompile could not " + purpose +
           ", because another rank has died, hangs, raised, or reduces other gradients; look for the first error of "
           "any rank, and start the processes again from a checkpoint: " +
           reason;
}

void throw_for_other_ranks(const std::string& purpose, const std::exception& error)
{
    const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
    // This rank's own error: its memory ran out, or its process group does not support the call. Errors of other ranks
    // arrive as torch's DistError from NCCL, and as plain C++ exceptions from gloo.
    if (from_torch && !dynamic_cast<const c10::DistError*>(&error)) { throw; }
    C10_THROW_ERROR(DistBackendError,
                    could_not(purpose, from_torch ? from_torch->what_without_backtrace() : error.what()));
}

void Agreement::add_bucket(const Fingerprint& bucket, int64_t between)
{
    ++sent_.buckets;
    sent_.gradients += bucket.gradients;
    sent_.mix(bucket.hash);
    sent_.mix(between);
}

bool Agreement::compare(const std::deque<PartitionGroup>& groups, const std::string& purpose, bool wants_exchange)
{
    const auto& group = largest(groups);
    // Ranks that have disagreed once disagree for ever. Some of them may never ask again, and this rank would wait for
    // them in the collective below.
    TORCH_CHECK(disagreement_.empty(), disagreement_);
    const std::vector<int64_t> own = {sent_.hash, sent_.gradients, sent_.buckets, wants_exchange};
    std::vector<int64_t> answers;
    try {
        answers = group.carrier->exchange(own);
    } catch (const std::exception& error) {
        throw_for_other_ranks(purpose, error);
    }
    std::vector<Fingerprint> seen;
    std::string sent;
    bool exchanges = false;
    for (int64_t rank = 0; rank < group.world(); ++rank) {
        const auto* row = answers.data() + own.size() * rank;
        exchanges = exchanges || row[3] != 0;
        const Fingerprint fingerprint{row[0], row[1], row[2]};
        // The message names the first rank of each kind.
        if (std::find(seen.begin(), seen.end(), fingerprint) != seen.end()) { continue; }
        sent += (seen.empty() ? "rank " : ", rank ") + std::to_string(rank) + " sent " +
                std::to_string(fingerprint.gradients) + " in " + std::to_string(fingerprint.buckets) +
                (seen.empty() ? " buckets" : "");
        seen.push_back(fingerprint);
    }
    if (seen.size() > 1) {
        disagreement_ = "DeepCompile's ranks sent different gradients: " + sent +
                        ". Usually some rank ran another number of backwards, or those of another engine, or one " +
                        "raised. Restart from a checkpoint.";
        for (const auto& partition_group : groups) { partition_group.carrier->give_up(disagreement_); }
    }
    TORCH_CHECK(disagreement_.empty(), disagreement_);
    return exchanges;
}

// Sent in turn.

void Reducer::begin_turns()
{
    order_.begin_backward();
    buckets_.begin_backward(holds_on_cpu() && streams_.on_cpu());
    early_count_ = early_numel_ = 0;
    for (auto& record : records_) {
        record.received = 0;
        record.is_new = record.is_early = record.unreachable = record.is_delivered = false;
    }
}

void Reducer::send_due_turns()
{
    while (const auto* turn = order_.next()) {
        auto& record = records_[turn->index];
        if (record.received < turn->contributions && !record.unreachable) { return; }
        send_turn(record, *turn);
    }
}

void Reducer::send_rest_of_turns()
{
    while (const auto* turn = order_.next()) { send_turn(records_[turn->index], *turn); }
    // Sums of earlier micro-batches whose parameters have no turn. reduce() has counted this backward's gradients.
    counters_.out_of_turn += std::count_if(records_.begin(), records_.end(), [](const ParameterRecord& record) {
        return record.received == 0 && record.unreduced.defined();
    });
}

void Reducer::send_turn(ParameterRecord& record, const Turn& turn)
{
    record.received = std::max<int64_t>(record.received - turn.contributions, 0);
    if (record.unreduced.defined()) { order_.saw_earlier(record.index); }
    order_.advance();
    enqueue_sum(record);
}

void Reducer::count(ParameterRecord& record)
{
    order_.saw(record.index);
    record.reachability_unreliable = record.reachability_unreliable || record.unreachable;
    record.unreachable = false;
    // Turns of unreachable parameters may stand before this one's.
    send_due_turns();
    ++record.received;
}

void Reducer::count_without_gradient(ParameterRecord& record)
{
    count(record);
    const auto* turn = order_.next();
    if (turn && turn->index == record.index) {
        if (record.received < turn->contributions) { return; }
        send_turn(record, *turn);
        record.received = 0;
        send_due_turns();
    } else if (const int64_t awaited = order_.contributions_to(record.index)) {
        order_.came_out_of_turn();
        ++counters_.out_of_turn;
        keep_early(record, awaited, /*gradient=*/{}, /*donated=*/false);
    }
}

void Reducer::keep_early(ParameterRecord& record, int64_t awaited, const at::Tensor& gradient, bool donated)
{
    // A gradient that joins the sum of earlier micro-batches needs no memory of its own.
    if (!record.unreduced.defined()) { record.is_new = true; }
    if (gradient.defined()) { record.unreduced.add(gradient, donated); }
    // A sum that lacks contributions waits for them. Sending the turns before its own would not free it.
    if (record.is_new && !record.is_early && record.received >= awaited) {
        record.is_early = true;
        ++early_count_;
        early_numel_ += record.parameter.numel();
    }
    // The missing gradient may never come, and reentrant checkpointing hides that. So send its turn as zeros; the
    // gradient is late if it comes after all. If a turn has some of its contributions, wait for the others. One
    // gradient may be larger than a bucket. Which gradient came last does not matter, because a hook of one rank
    // changes that.
    while (early_count_ > 1 && early_numel_ > options_.bucket_numel && records_[order_.next()->index].received == 0) {
        const auto turn = *order_.next();
        send_turn(records_[turn.index], turn);
        send_due_turns();
    }
}

void Reducer::end_early(ParameterRecord& record)
{
    record.is_new = false;
    if (!record.is_early) { return; }
    record.is_early = false;
    --early_count_;
    early_numel_ -= record.parameter.numel();
}

void Reducer::enqueue_sum(ParameterRecord& record)
{
    end_early(record);
    if (record.unreduced.defined()) {
        buckets_.enqueue(record, record.unreduced.take(), /*donated=*/true);
        return;
    }
    // Other ranks may have a gradient of this parameter, to which this rank adds zeros.
    const auto& parameter = record.parameter;
    buckets_.enqueue(
        record, at::zeros(parameter.sizes(), parameter.options().dtype(record.communication_dtype)), /*donated=*/true);
}

void Reducer::enqueue_with_sum(ParameterRecord& record, const at::Tensor& gradient, bool donated)
{
    if (!record.unreduced.defined()) {
        buckets_.enqueue(record, gradient, donated);
        return;
    }
    record.unreduced.add(gradient, donated);
    enqueue_sum(record);
}

// Late gradients, and the order of later backwards.

void Reducer::agree_and_reduce_late()
{
    RECORD_USER_SCOPE("deepcompile::agree");
    const auto& group = largest(groups_);
    if (group.world() == 1) { return; }
    streams_.order_after_last_use();
    agreement_.add(Marker::step_complete);
    bool is_late = false;
    for (const auto& record : records_) {
        if (!record.unreduced.defined()) { continue; }
        is_late = true;
        order_.saw_earlier(record.index);
    }
    order_.end_step();
    const bool rank_decides = group.rank() == 0;
    const bool exchanges = agreement_.compare(
        groups_, "agree on what the backward has reduced", is_late || (rank_decides && order_.wants_change()));
    if (!exchanges) { return; }
    await_carriers("exchange the order of gradients");
    for (const auto index : exchange_orders()) { enqueue_sum(records_[index]); }
    buckets_.launch();
    buckets_.drain();
}

std::vector<int64_t> Reducer::exchange_orders()
{
    const auto& group = largest(groups_);
    const auto count = static_cast<int64_t>(records_.size());
    // Each rank sends: the first rank's turns, at most two for each parameter, as pairs of index and contributions;
    // then for each parameter the negated number of steps in which this rank has not seen it; then for each parameter
    // whether this rank has unsent gradients of it. The ranks take the maximum of each number, so all ranks but the
    // first leave the turns at -1.
    std::vector<int64_t> own(6 * count, -1);
    if (group.rank() == 0) {
        auto* place = own.data();
        for (const auto& turn : order_.as_arrived()) {
            *place++ = turn.index;
            *place++ = turn.contributions;
        }
    }
    for (int64_t index = 0; index < count; ++index) {
        own[4 * count + index] = -order_.steps_unseen(index);
        own[5 * count + index] = records_[index].unreduced.defined() ? 1 : 0;
    }
    std::vector<at::Tensor> tensors{at::tensor(own, at::kLong).to(group.device)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    try {
        group.process_group->allreduce(tensors, options)->wait();
    } catch (const std::exception& error) {
        throw_for_other_ranks("agree on the order of gradients", error);
    }
    const auto all = tensors.front().cpu();
    const auto* value = all.const_data_ptr<int64_t>();
    std::vector<Turn> turns;
    for (int64_t place = 0; place < 4 * count && value[place] >= 0; place += 2) {
        turns.push_back({value[place], value[place + 1]});
    }
    std::vector<int64_t> steps_unseen;
    std::vector<int64_t> late_on_some;
    for (int64_t index = 0; index < count; ++index) {
        steps_unseen.push_back(-value[4 * count + index]);
        if (value[5 * count + index] > 0) { late_on_some.push_back(index); }
    }
    order_.take_over(turns, steps_unseen);
    return late_on_some;
}

}  // namespace deepcompile

// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <unordered_set>

// The order in which all ranks send gradients, and what a rank does whose own gradients come in another order.

namespace deepcompile {

// The order.

void SendOrder::add_parameter(int64_t index)
{
    turns_.insert(turns_.begin(), {index, 1});
    ++left_[index];
}

void SendOrder::clear()
{
    *this = SendOrder();
}

const Turn* SendOrder::next() const
{
    return complete() ? nullptr : &turns_[taken_];
}

void SendOrder::advance()
{
    --left_[turns_[taken_++].index];
}

bool SendOrder::comes_to(int64_t index) const
{
    const auto found = left_.find(index);
    return found != left_.end() && found->second > 0;
}

void SendOrder::restart()
{
    taken_ = 0;
    left_.clear();
    for (const auto& turn : turns_) { ++left_[turn.index]; }
}

void SendOrder::begin_backward()
{
    arrived_.clear();
    suits_ = true;
}

std::vector<Turn> SendOrder::as_arrived() const
{
    std::unordered_map<int64_t, int64_t> contributions;
    for (const auto index : arrived_) { ++contributions[index]; }
    std::vector<Turn> turns;
    std::unordered_map<int64_t, int64_t> so_far;
    for (const auto index : arrived_) {
        // Two contributions are sent one by one. They are often those of an embedding that is also the head, at the
        // two ends of the backward, and their sum would be held all the time between them.
        const int64_t together = contributions[index] > 2 ? contributions[index] : 1;
        if (++so_far[index] % together == 0) { turns.push_back({index, together}); }
    }
    return turns;
}

void SendOrder::take_over(const std::vector<Turn>& first_rank, const std::vector<bool>& seen)
{
    std::vector<Turn> turns = first_rank;
    std::vector<bool> placed(seen.size(), false);
    for (const auto& turn : turns) { placed[turn.index] = true; }
    std::vector<bool> known = placed;
    // What the first rank has not seen this time stays behind what it stood behind, so that branches which take turns
    // do not push each other to the end. Before any backward nobody knew which parameters get gradients at all.
    size_t behind = 0;
    for (const auto& turn : turns_) {
        known[turn.index] = true;
        if (!placed[turn.index]) {
            if (is_guess_ && !seen[turn.index]) { continue; }
            turns.insert(turns.begin() + static_cast<std::ptrdiff_t>(behind++), turn);
            continue;
        }
        const auto found = std::find_if(turns.begin() + static_cast<std::ptrdiff_t>(behind),
                                        turns.end(),
                                        [&turn](const Turn& other) { return other.index == turn.index; });
        if (found != turns.end()) { behind = static_cast<size_t>(found - turns.begin()) + 1; }
    }
    for (auto index = static_cast<int64_t>(seen.size()) - 1; index >= 0; --index) {
        if (seen[index] && !known[index]) { turns.push_back({index, 1}); }
    }
    turns_ = std::move(turns);
    restart();
    // The guess had turns of parameters that get no gradients at all.
    missed_ = missed_ && !is_guess_;
    is_guess_ = false;
    suits_ = true;
}

// Sent in turn.

void Reducer::send_those_in_turn()
{
    while (const auto* turn = order_.next()) {
        auto& record = records_[turn->index];
        if (record.received < turn->contributions && !record.absent) { return; }
        send_turn(record, *turn);
    }
}

void Reducer::send_rest_of_turns()
{
    while (const auto* turn = order_.next()) {
        auto& record = records_[turn->index];
        // A sum of earlier micro-batches, which the last one added nothing to, has not been seen yet.
        if (record.received == 0 && record.unreduced.defined()) { order_.saw(record.index); }
        if (record.received == 0 && !record.absent) { order_.misses(); }
        send_turn(record, *turn);
    }
    order_.restart();
}

void Reducer::send_turn(ParameterRecord& record, const Turn& turn)
{
    record.received = std::max<int64_t>(record.received - turn.contributions, 0);
    order_.advance();
    enqueue_sum(record);
}

void Reducer::enqueue_sum(ParameterRecord& record)
{
    if (record.unreduced.defined()) {
        buckets_.enqueue(record, record.unreduced.take(), /*donated=*/true);
        return;
    }
    // Other ranks may have a gradient, and what this rank adds to it is nothing.
    const auto& parameter = record.parameter;
    buckets_.enqueue(
        record, at::zeros(parameter.sizes(), parameter.options().dtype(record.communication_dtype)), /*donated=*/true);
}

void Reducer::look_ahead(const at::Tensor& loss)
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (in_backward_ || !order_.missed() || !loss.defined() || !loss.grad_fn()) { return; }
    std::unordered_set<const torch::autograd::Node*> reached;
    std::vector<const torch::autograd::Node*> open{loss.grad_fn().get()};
    while (!open.empty()) {
        const auto* node = open.back();
        open.pop_back();
        if (!reached.insert(node).second) { continue; }
        for (const auto& edge : node->next_edges()) {
            if (edge.function) { open.push_back(edge.function.get()); }
        }
    }
    for (auto& record : records_) { record.absent = !record.hidden && !reached.count(record.accumulation_node.get()); }
}

// What came when its parameter's turns were over.

void Reducer::settle()
{
    RECORD_USER_SCOPE("deepcompile::settle");
    std::lock_guard<std::mutex> lock(mutex_);
    if (groups_.empty()) { return; }
    at::NoGradGuard no_grad;
    const auto& group = groups_.front();
    if (group.world() == 1) { return; }
    streams_.order_after_last_use();
    const bool is_late = std::any_of(
        records_.begin(), records_.end(), [](const ParameterRecord& record) { return record.unreduced.defined(); });
    const bool rank_decides = group.rank() == 0;
    agreement_.ask(*group.process_group,
                   group.device,
                   "agree on what the backward has reduced",
                   is_late || (rank_decides && !order_.suits()));
    agreement_.check();
    if (!agreement_.exchanges()) { return; }
    for (const auto index : exchange_orders()) { enqueue_sum(records_[index]); }
    buckets_.launch();
    buckets_.drain();
}

std::vector<int64_t> Reducer::exchange_orders()
{
    const auto& group = groups_.front();
    const auto count = static_cast<int64_t>(records_.size());
    // The first rank's turns, of which a parameter has two at most, as pairs of index and contributions; then for each
    // parameter whether a rank has seen it, and whether a rank has something left. The maximum over ranks is taken: the
    // others leave the turns at -1.
    std::vector<int64_t> own(6 * count, -1);
    auto* const seen = own.data() + 4 * count;
    auto* const late = own.data() + 5 * count;
    if (group.rank() == 0) {
        auto* place = own.data();
        for (const auto& turn : order_.as_arrived()) {
            *place++ = turn.index;
            *place++ = turn.contributions;
        }
    }
    for (const auto index : order_.arrived()) { seen[index] = 1; }
    for (const auto& record : records_) {
        if (record.unreduced.defined()) { late[record.index] = seen[record.index] = 1; }
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
    std::vector<bool> seen_by_some(count);
    std::vector<int64_t> late_on_some;
    for (int64_t index = 0; index < count; ++index) {
        seen_by_some[index] = value[4 * count + index] > 0;
        if (value[5 * count + index] > 0) { late_on_some.push_back(index); }
    }
    order_.take_over(turns, seen_by_some);
    return late_on_some;
}

}  // namespace deepcompile

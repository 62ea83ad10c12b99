// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile_carrier.h"
#include "deepcompile_memory.h"

#include <exception>
#include <utility>

// How gradients are added up by the collectives of a process group.

namespace deepcompile {

void Collectives::reduce(std::vector<Message>& messages, double divisor, Works& works)
{
    const auto device = device_.type();
    const auto backend = process_group_->getBackend(device);
    // NCCL can divide by the number of ranks, and nothing else; other backends only add up. Scaling before the sum keeps
    // the sum within fp16's range.
    const bool average =
        divisor == static_cast<double>(process_group_->getSize()) && backend->getBackendName() == "nccl";
    if (!average && divisor != 1) {
        for (auto& message : messages) { message.contribution.mul_(1.0 / divisor); }
    }
    const bool coalesce = backend->supportsCoalescing();
    bool is_open = false;
    const auto close = [&] {
        is_open = false;
        if (auto work = process_group_->endCoalescing(device)) { works.push_back(std::move(work)); }
    };
    try {
        if (coalesce) {
            process_group_->startCoalescing(device);
            is_open = true;
        }
        for (auto& message : messages) {
            c10d::ReduceScatterOptions options;
            options.reduceOp = average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
            options.asyncOp = true;
            auto work = process_group_->_reduce_scatter_base(message.shard, message.contribution, options);
            if (!coalesce) { works.push_back(std::move(work)); }
        }
        if (coalesce) { close(); }
    } catch (const std::exception&) {
        // An open coalescing block would swallow the process group's later collectives. Closing the block sends what it
        // holds, so the caller must find that work before it drops the tensors.
        try {
            if (is_open) { close(); }
        } catch (const std::exception&) {
            // Keep the first error, which says more.
        }
        throw;
    }
}

std::vector<int64_t> Collectives::exchange(const std::vector<int64_t>& own)
{
    const auto count = static_cast<int64_t>(own.size());
    const auto options = at::TensorOptions().dtype(at::kLong).device(device_);
    // A fill passes the number to the kernel as an argument. Copying a tensor from the host would make the host wait.
    auto sent = at::empty({count}, options);
    for (int64_t index = 0; index < count; ++index) { sent[index].fill_(own[index]); }
    at::Tensor answers = at::empty({count * process_group_->getSize()}, options);
    // NCCL: the current stream waits for the collective. gloo: this thread does.
    process_group_->_allgather_base(answers, sent)->wait();
    if (!device_.is_cpu()) {
        const auto gathered = answers;
        answers = at::empty(gathered.sizes(), at::TensorOptions().dtype(at::kLong).pinned_memory(true));
        answers.copy_(gathered, /*non_blocking=*/true);
        record_event(current_stream(device_)).synchronize();
    }
    const auto* first = answers.const_data_ptr<int64_t>();
    return {first, first + answers.numel()};
}

}  // namespace deepcompile

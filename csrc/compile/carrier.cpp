// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile_carrier.h"

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

}  // namespace deepcompile

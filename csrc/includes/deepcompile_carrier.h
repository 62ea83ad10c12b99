// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

/*
How the ranks of a process group add up their gradients. A Bucket says what is to be sent, and a Carrier sends it: by
collectives of the process group, or in another way that gives the same result.
*/

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace deepcompile {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

/// One sum of a bucket. All ranks have as many, in the same order, of the same sizes and dtypes.
struct Message {
    /// What this rank adds: [world * n], 1-D and contiguous. Shard r is for rank r. The carrier may write into it.
    at::Tensor contribution;
    /// What this rank gets: [n], 1-D and contiguous, of the same dtype, in memory of its own that holds nothing yet.
    at::Tensor shard;
};

/// Carries the gradients of one process group. A reducer calls it under its mutex, so one call at a time, in the same
/// order on all ranks. Several messages may be on their way at once.
class Carrier {
public:
    virtual ~Carrier() = default;

    /// Begins to add up messages: each `shard` is to be the ranks' sum of this rank's shard, divided by `divisor`. Where
    /// the dtype has little range, such as fp16, the division must not come after a sum that could overflow.
    ///
    /// Contributions are ready on the current stream. What happens is put on other streams, and on this one only what
    /// does not wait for other ranks. Appends works to `works`, whose wait() makes the current stream wait, or on a CPU
    /// the calling thread, until all shards are written and no contribution is used any more. The caller keeps the
    /// tensors until it has waited, on whichever stream, and waits for each work once.
    ///
    /// If it raises, or a wait() does, the works that were appended are those of what was begun; the caller waits for
    /// them before it drops the tensors. An error of this rank is a c10::Error. Another rank's is a c10::DistError, or
    /// no c10::Error: throw_for_other_ranks() tells them apart.
    virtual void reduce(std::vector<Message>& messages, double divisor, Works& works) = 0;

    /// Called before the host waits for the device in a collective of the process group: a carrier whose streams wait
    /// for other ranks in another way waits here until these have come, or raises as wait() does.
    virtual void await_others() {}

    /// Returns the numbers of all ranks, rank by rank. Every rank gives as many, at most `most_exchanged`. The host
    /// waits for the other ranks. Raises as wait() does.
    virtual std::vector<int64_t> exchange(const std::vector<int64_t>& own) = 0;
    static constexpr size_t most_exchanged = 4;

    /// Called on each rank when the ranks have found that they reduce different gradients: no stream waits for another
    /// rank any more. A collective waits until its process group's time-out, as it would without DeepCompile.
    virtual void give_up(const std::string& /*reason*/) {}
};

/// Carries by the process group's reduce-scatter: NCCL, gloo, or another backend.
class Collectives : public Carrier {
public:
    Collectives(c10::intrusive_ptr<c10d::ProcessGroup> process_group, c10::Device device)
        : process_group_(std::move(process_group)), device_(device)
    {
    }

    void reduce(std::vector<Message>& messages, double divisor, Works& works) override;
    std::vector<int64_t> exchange(const std::vector<int64_t>& own) override;

private:
    c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
    c10::Device device_;
};

}  // namespace deepcompile

// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile_agreement.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace deepcompile {

namespace {

void mix(int64_t& hash, int64_t value)
{
    hash = static_cast<int64_t>(c10::hash_combine(static_cast<size_t>(hash), static_cast<size_t>(value)));
}

std::string disagreement(const std::vector<Fingerprint>& fingerprints)
{
    std::string sent;
    for (auto fingerprint = fingerprints.begin(); fingerprint != fingerprints.end(); ++fingerprint) {
        if (std::find(fingerprints.begin(), fingerprint, *fingerprint) != fingerprint) { continue; }
        sent += (sent.empty() ? "rank " : "; rank ") + std::to_string(fingerprint - fingerprints.begin()) + " " +
                std::to_string(fingerprint->gradients) + " in " + std::to_string(fingerprint->buckets) + " buckets";
    }
    return "DeepCompile's ranks have not run the same backwards, and would use wrong gradients (sent since "
           "engine.compile(), the first rank of each kind: " +
           sent +
           "): some ranks ran another number of backwards, or those of another engine or model, or one backward went "
           "through two engines in another order, or a backward raised or replaced gradients on some ranks only; have "
           "every rank run the same number for the same engines, and start the processes again from a checkpoint";
}

}  // namespace

void Fingerprint::add_gradient(int64_t index)
{
    ++gradients;
    mix(hash, index);
}

void Fingerprint::add_piece(int64_t owner, int64_t target_offset, int64_t numel)
{
    mix(hash, owner);
    mix(hash, target_offset);
    mix(hash, numel);
}

void Fingerprint::add_bucket(const Fingerprint& bucket, int64_t between)
{
    ++buckets;
    gradients += bucket.gradients;
    mix(hash, bucket.hash);
    mix(hash, between);
}

void Fingerprint::add(Marker marker)
{
    mix(hash, static_cast<int64_t>(marker));
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

void Agreement::ask(c10d::ProcessGroup& process_group,
                    at::Device device,
                    const std::string& purpose,
                    bool wants_exchange)
{
    // Ranks that have disagreed once disagree for ever. Some of them may never ask again, and this rank would wait for
    // them in the collective below.
    TORCH_CHECK(disagreement_.empty(), disagreement_);
    const auto options = at::TensorOptions().dtype(at::kLong).device(device);
    // A fill passes the number to the kernel as an argument. Copying a tensor from the host would make the host wait.
    auto own = at::empty({4}, options);
    own[0].fill_(sent_.hash);
    own[1].fill_(sent_.gradients);
    own[2].fill_(sent_.buckets);
    own[3].fill_(static_cast<int64_t>(wants_exchange));
    auto gathered = at::empty({4 * process_group.getSize()}, options);
    try {
        // NCCL: the current stream waits for the collective. gloo: this thread does.
        process_group._allgather_base(gathered, own)->wait();
    } catch (const std::exception& error) {
        throw_for_other_ranks(purpose, error);
    }
    arrived_.reset();
    if (device.is_cpu()) {
        answer_ = gathered;
        return;
    }
    answer_ = at::empty(gathered.sizes(), at::TensorOptions().dtype(at::kLong).pinned_memory(true));
    answer_.copy_(gathered, /*non_blocking=*/true);
    arrived_.emplace(device.type());
    arrived_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void Agreement::check()
{
    TORCH_CHECK(disagreement_.empty(), disagreement_);
    if (!answer_.defined()) { return; }
    const at::Tensor answer = std::move(answer_);
    answer_ = at::Tensor();
    if (arrived_) { arrived_->synchronize(); }
    std::vector<Fingerprint> fingerprints;
    exchanges_ = false;
    for (int64_t rank = 0; 4 * rank < answer.numel(); ++rank) {
        const auto* row = answer.const_data_ptr<int64_t>() + 4 * rank;
        fingerprints.push_back({row[0], row[1], row[2]});
        exchanges_ = exchanges_ || row[3] != 0;
    }
    const bool agree = std::all_of(fingerprints.begin(), fingerprints.end(), [&](const Fingerprint& fingerprint) {
        return fingerprint == fingerprints.front();
    });
    if (!agree) { disagreement_ = disagreement(fingerprints); }
    TORCH_CHECK(agree, disagreement_);
}

}  // namespace deepcompile

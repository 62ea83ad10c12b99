// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

/*
Whether all ranks have sent the same gradients. A process group matches messages by their order alone: if one rank ran
another number of backwards, or its backward raised, the process group would add gradients to those of other parameters.
*/

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>

namespace deepcompile {

/// Events that are mixed into the fingerprint although nothing is sent for them. Without them, ranks that differ only
/// in such an event would look alike.
enum class Marker : int64_t {
    backward_abandoned = -1,  ///< a backward raised
    gradients_replaced = -2,  ///< a backward began the step anew
    step_complete = -3,       ///< the gradients of a step are complete
};

/// Which gradients of which engine were sent, in which order and in which buckets.
struct Fingerprint {
    int64_t hash = 0;
    int64_t gradients = 0;
    int64_t buckets = 0;

    /// `index`: of the parameter, in order of registration.
    void add_gradient(int64_t index);
    /// Where in a partition a piece of the gradient that was added last goes.
    void add_piece(int64_t owner, int64_t target_offset, int64_t numel);
    /// `between`: how many buckets of other engines have been sent since this engine's last one in this backward.
    void add_bucket(const Fingerprint& bucket, int64_t between);
    void add(Marker marker);
    bool operator==(const Fingerprint& other) const
    {
        return hash == other.hash && gradients == other.gradients && buckets == other.buckets;
    }
};

/// The message of a collective that failed for another rank. `purpose` completes "could not".
std::string could_not(const std::string& purpose, const std::string& reason);

/// Raises a process group's error anew, with what this rank could not do; an error of this rank's own stays as it is.
/// To be called in the handler that caught the error. `purpose` completes "could not".
[[noreturn]] void throw_for_other_ranks(const std::string& purpose, const std::exception& error);

/// What this rank has sent, and whether the other ranks have sent the same. With its fingerprint, each rank also says
/// whether it wants an exchange of orders; see Reducer::finish_backward().
class Agreement {
public:
    /// `identity`: the engine's number. Engines may share a process group, and ranks that send for different engines
    /// have sent different gradients.
    explicit Agreement(int64_t identity) { sent_.hash = identity; }

    /// This rank is about to send a bucket.
    void add_bucket(const Fingerprint& bucket, int64_t between) { sent_.add_bucket(bucket, between); }
    void add(Marker marker) { sent_.add(marker); }

    /// Sends this rank's fingerprint and collects the other ranks'. The host does not wait for a GPU. `purpose` is for
    /// the message of throw_for_other_ranks().
    void ask(c10d::ProcessGroup& process_group, at::Device device, const std::string& purpose, bool wants_exchange);
    /// Waits on the host for the answers to the last ask(), unless they have been checked. Raises on every rank if the
    /// ranks have sent different gradients, now or earlier.
    void check();
    /// Whether some rank wanted an exchange in the last ask(). Every rank learns it from the same check().
    bool exchanges() const { return exchanges_; }

private:
    Fingerprint sent_;  ///< since the engine was made
    bool exchanges_ = false;
    std::string disagreement_;  ///< the message, once the ranks have disagreed
    at::Tensor answer_;         ///< on the host, [4 * ranks]; undefined once it has been checked
    std::optional<c10::Event> arrived_;
};

}  // namespace deepcompile

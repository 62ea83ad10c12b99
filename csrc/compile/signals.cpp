// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile_copy_engines.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

// Numbers that ranks post to each other, and the bound on waits for them.

namespace deepcompile {

namespace {

using std::chrono::steady_clock;

// How often the watcher looks. A stream that waits does not need the watcher, so this only delays the end of a run.
constexpr auto look_every = std::chrono::milliseconds(20);
// How often await() looks. The host is about to wait for the device anyway.
constexpr auto await_every = std::chrono::microseconds(20);
// How far beyond any awaited number the released words lie.
constexpr uint32_t far = uint32_t(1) << 30;

}  // namespace

Signals::Signals(at::Tensor words, int64_t rank, double timeout)
    : words_(std::move(words)), rank_(rank), timeout_(timeout)
{
    TORCH_CHECK_VALUE(words_.is_cpu() && words_.is_contiguous() && words_.scalar_type() == at::kInt &&
                          words_.dim() == 3 && words_.size(0) > 1 && words_.size(1) == channels &&
                          words_.size(2) == numbers_of_a_word,
                      "words of signals must be int32 [world + 1, channels, numbers of a word] on a CPU");
    TORCH_CHECK_VALUE(rank_ >= 0 && rank_ < world() && timeout_ > 0, "signals need a rank of the group and a timeout");
    watcher_ = std::thread([this] { watch(); });
}

Signals::~Signals()
{
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    watcher_.join();
}

int64_t Signals::offset(int64_t rank, Channel channel) const
{
    return (rank * channels + static_cast<int64_t>(channel)) * numbers_of_a_word *
           static_cast<int64_t>(sizeof(uint32_t));
}

Signals::Word& Signals::word(int64_t rank, Channel channel) const
{
    // Devices and other processes write it.
    return *reinterpret_cast<Word*>(static_cast<char*>(words_.data_ptr()) + offset(rank, channel));
}

Signals::Word& Signals::given_up() const
{
    return word(world(), Channel::staged);
}

std::atomic<int64_t>* Signals::told(int64_t rank, uint32_t number) const
{
    // Two places in turns: a rank may be one exchange behind this one and still read. It is never two behind, because
    // this rank has its word of the exchange between.
    constexpr auto place = Carrier::most_exchanged * sizeof(int64_t);
    static_assert(3 * place <= numbers_of_a_word * sizeof(uint32_t), "two places lie behind a word");
    return reinterpret_cast<std::atomic<int64_t>*>(reinterpret_cast<char*>(&word(rank, Channel::told)) +
                                                   (1 + number % 2) * place);
}

int64_t Signals::lacking(const Expected& expected) const
{
    int64_t last = -1;
    int32_t most = 0;
    for (int64_t peer = 0; peer < world(); ++peer) {
        const auto missing = static_cast<int32_t>(expected.number - word(peer, expected.channel));
        if (peer != rank_ && missing > most) {
            last = peer;
            most = missing;
        }
    }
    return last;
}

void Signals::forget_arrived()
{
    expected_.erase(
        std::remove_if(
            expected_.begin(), expected_.end(), [this](const Expected& expected) { return lacking(expected) < 0; }),
        expected_.end());
}

void Signals::set_timeout(double timeout)
{
    std::lock_guard lock(mutex_);
    timeout_ = timeout;
}

void Signals::expect(Channel channel, uint32_t number)
{
    std::lock_guard lock(mutex_);
    const auto timeout = std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(timeout_));
    // The watcher may be slower than a caller that expects much.
    if (expected_.size() >= 64) { forget_arrived(); }
    const bool was_empty = expected_.empty();
    expected_.push_back({channel, number, steady_clock::now() + timeout});
    last_[static_cast<size_t>(channel)] = number;
    if (was_empty) { changed_.notify_all(); }
}

void Signals::check() const
{
    const uint32_t by = given_up();
    if (by == 0) { return; }
    std::string reason;
    {
        std::lock_guard lock(mutex_);
        reason = reason_;
    }
    if (reason.empty()) {
        reason = "rank " + std::to_string(by - 1) + " has given up waiting for signals of other ranks";
    }
    C10_THROW_ERROR(DistBackendError, reason);
}

void Signals::await()
{
    for (;;) {
        check();
        {
            std::lock_guard lock(mutex_);
            forget_arrived();
            if (expected_.empty()) { break; }
        }
        std::this_thread::sleep_for(await_every);
    }
    // The words may have reached their numbers because a rank released them.
    check();
}

std::vector<int64_t> Signals::exchange(const std::vector<int64_t>& own)
{
    TORCH_CHECK_VALUE(own.size() <= Carrier::most_exchanged, "too many numbers for one exchange");
    const auto number = ++exchanges_;
    for (size_t index = 0; index < own.size(); ++index) { told(rank_, number)[index] = own[index]; }
    word(rank_, Channel::told) = number;
    expect(Channel::told, number);
    // Nobody releases these words, so numbers that have come are right. A rank that has them may give up at once.
    while (lacking({Channel::told, number, {}}) >= 0) {
        check();
        std::this_thread::sleep_for(await_every);
    }
    std::vector<int64_t> all;
    for (int64_t rank = 0; rank < world(); ++rank) {
        const auto* first = told(rank, number);
        for (size_t index = 0; index < own.size(); ++index) { all.push_back(first[index]); }
    }
    return all;
}

void Signals::release()
{
    for (int64_t rank = 0; rank < world(); ++rank) {
        for (const auto channel : awaited_by_streams) {
            word(rank, channel) = last_[static_cast<size_t>(channel)] + far;
        }
    }
}

void Signals::give_up(const std::string& reason)
{
    {
        std::lock_guard lock(mutex_);
        give_up_locked(reason);
    }
    changed_.notify_all();
}

void Signals::give_up_locked(const std::string& reason)
{
    if (reason_.empty()) { reason_ = reason; }
    // Before the words: a rank that goes on must find it.
    given_up() = static_cast<uint32_t>(rank_ + 1);
}

void Signals::watch()
{
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        if (given_up() != 0) {
            // Again and again: a living rank's stream may write its own, smaller number over a released word.
            release();
        } else if (expected_.empty()) {
            changed_.wait(lock);
            continue;
        }
        changed_.wait_for(lock, look_every);
        if (given_up() != 0) { continue; }
        forget_arrived();
        if (expected_.empty() || steady_clock::now() < expected_.front().deadline) { continue; }
        const auto peer = lacking(expected_.front());
        if (peer < 0) { continue; }
        give_up_locked("rank " + std::to_string(rank_) + " has waited " +
                       std::to_string(static_cast<int64_t>(timeout_)) + " seconds for a signal of rank " +
                       std::to_string(peer));
    }
}

}  // namespace deepcompile

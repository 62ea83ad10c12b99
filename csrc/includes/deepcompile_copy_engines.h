// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

/*
A Carrier for ranks of one host whose GPUs can read each other's memory. A GPU's copy engines carry the bytes, and no
streaming multiprocessor does, so matrix products beside them keep their speed.

Gradients. A rank copies what it contributes to other ranks' shards into its staging, a ring of slots that all ranks
have mapped, and posts a signal. Each rank waits for that signal of a peer and pulls its row from the peer's slot, to the
place of what it has itself staged for this peer. When a rank has pulled a row from every peer, it posts another signal,
after which the peers may fill the slot again, and a kernel adds the rows in fp32. What does not fit into one slot goes
through in portions. A kernel may have to wait until matrix products leave room for it, so one adds the rows of all ranks.

Parameters. The flat tensor of a group lies in memory that all ranks have mapped. After the update a rank posts a
signal, and each rank pulls the shards of its peers to their places.

All of this is put on streams of the carrier's own; no host thread waits, and no kernel spins. A signal is a number in
host memory that all ranks have mapped (Signals). A stream writes it and waits for it by the driver's stream memory
operations. Such a wait has no time-out, so a thread watches that awaited signals come.
*/

#pragma once

#include "deepcompile_carrier.h"
#include "deepcompile_memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace deepcompile {

// Signals. (signals.cpp)

/// What a rank posts. Each channel is one number for each rank, which only grows (modulo 2^32).
enum class Channel : int64_t {
    staged,    ///< so many portions lie in this rank's staging, or did
    pulled,    ///< of so many portions this rank has pulled its row from every peer
    updated,   ///< so many times this rank's shards of parameters were complete
    gathered,  ///< so many times this rank has pulled all shards
    told,      ///< so many times this rank has given numbers to all
};
constexpr int64_t channels = 5;
constexpr Channel awaited_by_streams[] = {Channel::staged, Channel::pulled, Channel::updated, Channel::gathered};
constexpr int64_t numbers_of_a_word = 32;  ///< words lie 128 bytes apart, so that no two share a line of a cache

/// The numbers that the ranks of one host post to each other, and a thread that bounds how long this rank waits.
///
/// If a signal does not come in time, the thread notes in the shared memory that this rank has given up, and writes
/// large numbers over all words that streams wait for, until this object is destroyed. So every stream of every rank
/// goes on, with wrong bytes, and every rank raises in its next check().
class Signals {
public:
    /// `words`: int32 [world + 1, channels, numbers_of_a_word] on CPU, zeroed, in memory that all ranks have mapped.
    /// The last row tells which rank has given up. `timeout`: in seconds.
    Signals(at::Tensor words, int64_t rank, double timeout);
    ~Signals();
    Signals(const Signals&) = delete;
    Signals& operator=(const Signals&) = delete;

    int64_t world() const { return words_.size(0) - 1; }
    /// The bytes of a rank's word from the start of the words.
    int64_t offset(int64_t rank, Channel channel) const;
    const at::Tensor& words() const { return words_; }

    /// Counts for what is expected from now on. In seconds.
    void set_timeout(double timeout);
    /// From now on, the words of all peers must reach this number within the timeout.
    void expect(Channel channel, uint32_t number);
    /// Raises DistBackendError if some rank has given up.
    void check() const;
    /// The host waits until all expected signals have come. Raises as check() does.
    void await();
    /// Does what Carrier::exchange() says, without the device.
    std::vector<int64_t> exchange(const std::vector<int64_t>& own);
    /// Does what Carrier::give_up() says.
    void give_up(const std::string& reason);

private:
    struct Expected {
        Channel channel;
        uint32_t number;
        std::chrono::steady_clock::time_point deadline;
    };

    using Word = std::atomic<uint32_t>;
    static_assert(Word::is_always_lock_free && sizeof(Word) == sizeof(uint32_t), "processes share words");

    Word& word(int64_t rank, Channel channel) const;
    Word& given_up() const;
    /// Where a rank leaves its numbers in an exchange, behind its word.
    std::atomic<int64_t>* told(int64_t rank, uint32_t number) const;
    /// The peer whose word is furthest from the number; -1: all have reached it, modulo 2^32, as the driver compares
    /// them. A rank that has died stands behind the ranks that wait for it.
    int64_t lacking(const Expected& expected) const;
    /// Forgets what has come. Needs mutex_.
    void forget_arrived();
    /// Lets every stream of every rank go on. Needs mutex_.
    void release();
    /// Does the same while this thread holds mutex_.
    void give_up_locked(const std::string& reason);
    void watch();

    const at::Tensor words_;
    const int64_t rank_;
    double timeout_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Expected> expected_;
    std::array<uint32_t, channels> last_ = {};  ///< the largest number that was expected
    uint32_t exchanges_ = 0;
    std::string reason_;  ///< why this rank gave up
    bool stopping_ = false;
    std::thread watcher_;
};

// What goes where, and in which order. (schedule.cpp)

/// Bytes [first, first + bytes) of each rank's shard of a message, at `offset` of a row of a slot.
struct Span {
    int64_t message;
    int64_t first;
    int64_t bytes;
    int64_t offset;
};
/// What lies in one slot at a time.
using Portion = std::vector<Span>;

/// Cuts messages, whose shards have these bytes, in portions whose rows have at most `row_bytes`, a multiple of 256. All
/// ranks cut alike.
std::vector<Portion> cut(const std::vector<int64_t>& shard_bytes, int64_t row_bytes);

/// The shape of a carrier.
struct Shape {
    int64_t world;
    int64_t rank;
    int64_t slots;  ///< of the staging
    int64_t pulls;  ///< streams that pull

    /// The other ranks, in the order in which this rank pulls from them. Each rank begins with another one.
    std::vector<int64_t> peers() const;
    /// The row of a rank in a slot of another rank, whose own row is left out.
    static int64_t row(int64_t of, int64_t in) { return of < in ? of : of - 1; }
};

/// One thing that a stream does.
struct Step {
    enum Act : int64_t {
        mark,    ///< record `event`
        follow,  ///< wait for the last record of `event`, if there is one
        wait,    ///< wait until the word of `peer` in `channel` has reached `number`
        post,    ///< write `number` to this rank's word in `channel`
        stage,   ///< copy `portion` to `slot` of the staging
        pull,    ///< copy this rank's row of `portion` from `slot` of the peer's staging to where the peer's row was
        add,     ///< add the rows of `portion`
    };
    static constexpr int64_t staging = 0, adding = 1, pulling = 2;  ///< streams; the last ones pull

    Act act;
    int64_t stream;
    int64_t event = -1;
    int64_t peer = -1;
    Channel channel = Channel::staged;
    uint32_t number = 0;
    int64_t portion = -1;
    int64_t slot = -1;
};

/// Returns the steps that reduce this many portions, of which `first` were reduced before, in the order in which the
/// host must queue them. In this order no step waits for a step of a peer that needs a later step of this rank. So no
/// rank hangs even where the device runs the steps of all streams one after the other.
std::vector<Step> schedule(const Shape& shape, int64_t first, int64_t portions);

/// Writes to `out` [n] the sum of `rows` [world, n], times `scale`. bf16, fp16 and fp32; adds in fp32, and rounds once.
void add_rows(const at::Tensor& out, const at::Tensor& rows, double scale);

// The driver. (driver.cpp)

/// Functions of the CUDA driver, which are looked up at run time: the same build serves machines without a GPU.
class Driver {
public:
    /// Raises c10::Error if there is no driver, or it lacks a function.
    static const Driver& get();

    void copy(void* stream, uint64_t to, uint64_t from, int64_t bytes) const;
    void write(void* stream, uint64_t address, uint32_t number) const;
    /// Makes the stream wait until the number at the address has reached `number`, modulo 2^32.
    void wait(void* stream, uint64_t address, uint32_t number) const;
    /// Maps host memory into the device's addresses, and returns its address there.
    uint64_t map(void* host, int64_t bytes) const;
    void unmap(void* host) const noexcept;
    /// The calling thread's context; null if it has none.
    void* context() const;
    void use(void* context) const;

private:
    Driver();
    void check(int result, const char* what) const;

    int (*copy_)(uint64_t, uint64_t, size_t, void*);
    int (*write_)(void*, uint64_t, uint32_t, unsigned);
    int (*wait_)(void*, uint64_t, uint32_t, unsigned);
    int (*register_)(void*, size_t, unsigned);
    int (*address_)(uint64_t*, void*, unsigned);
    int (*unregister_)(void*);
    int (*context_)(void**);
    int (*use_)(void*);
    int (*describe_)(int, const char**);
};

// The carrier. (copy_engines.cpp)

/// A stream, and the driver's handle of it.
struct OwnStream {
    c10::Stream stream;
    void* handle;
};

/// Memory of the same size on each rank, all of which this rank's device can read.
struct MappedMemory {
    std::vector<uint64_t> addresses;  ///< by rank
    int64_t bytes;
};

class CopyEngines : public Carrier, public std::enable_shared_from_this<CopyEngines> {
public:
    /// `streams`: one that stages, one that adds, those that pull, and one that gathers. `staging`: as many slots
    /// of (world - 1) rows of `row_bytes` as `slots` says. `device`: this rank's.
    CopyEngines(std::shared_ptr<Signals> signals,
                int64_t rank,
                std::vector<OwnStream> streams,
                MappedMemory staging,
                int64_t slots,
                int64_t row_bytes,
                c10::Device device);
    ~CopyEngines() override;

    void reduce(std::vector<Message>& messages, double divisor, Works& works) override;
    /// The host waits for all signals that streams wait for. Raises DistBackendError if one does not come.
    void await_others() override { signals_->await(); }
    std::vector<int64_t> exchange(const std::vector<int64_t>& own) override { return signals_->exchange(own); }
    void give_up(const std::string& reason) override { signals_->give_up(reason); }

    /// Adds memory in which parameters lie.
    void add_flat(MappedMemory flat);
    /// Forgets all such memory.
    void forget_flats();
    /// Pulls the peers' shards of runs. A run: 1-D, contiguous, world equal shards. It lies in a memory of add_flat(), at
    /// the same place on all ranks, and holds this rank's shard. Or `shards` has this rank's shard of each run, in a
    /// memory of add_flat(), at the same place on all ranks; then the run may lie anywhere, and gets this shard too.
    /// This rank's shards are ready on the current stream. All ranks call this function with the same runs, in the same
    /// order. wait() of the work makes the current stream wait, also until all peers have pulled this rank's shards, which
    /// may be written again then.
    c10::intrusive_ptr<c10d::Work> gather(const std::vector<at::Tensor>& runs, const std::vector<at::Tensor>& shards);
    /// Makes the current stream wait for all that gather() has begun, whoever holds its work.
    void before_write();

    /// Waits for this carrier's streams, and lets go of the words.
    void close();

private:
    c10::Event& event(int64_t index);
    void use_context() const;
    void run(const Step& step,
             const std::vector<Portion>& portions,
             const std::vector<Message>& messages,
             double scale);
    void stage(const Portion& portion, int64_t slot, const std::vector<Message>& messages);
    void pull(
        const OwnStream& on, const Portion& portion, int64_t peer, int64_t slot, const std::vector<Message>& messages);
    void add(const Portion& portion, const std::vector<Message>& messages, double scale);
    const MappedMemory& flat_with(uint64_t begin, int64_t bytes) const;
    void post(const OwnStream& on, Channel channel, uint32_t number);
    void wait(const OwnStream& on, int64_t peer, Channel channel, uint32_t number);

    const std::shared_ptr<Signals> signals_;
    const Driver& driver_;
    void* const context_;
    const std::vector<OwnStream> streams_;  ///< as `Step` numbers them
    const OwnStream gathers_;
    const MappedMemory staging_;
    const Shape shape_;
    const int64_t row_bytes_;
    const c10::Device device_;
    uint64_t words_;  ///< the device's address of the words; 0 once closed

    std::mutex mutex_;
    std::vector<MappedMemory> flats_;
    std::vector<std::optional<c10::Event>> events_;
    uint32_t portions_ = 0;  ///< how many were reduced
    uint32_t gathers_begun_ = 0;
};

}  // namespace deepcompile

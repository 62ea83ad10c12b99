// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

/*
The life of a gradient under DeepCompile ZeRO-1 and ZeRO-2, in the order in which it happens.

A parameter group of `world` ranks is one flat run of elements, cut into `world` partitions of equal
size. Rank r owns partition r: it alone needs the averaged gradient of those elements. A parameter is
a range of that run and may straddle several partitions.

  1. Registered empty.  Reducer::register_parameter() notes where a parameter lies. No gradient memory.
  2. Reduced.           Reducer::reduce() takes a gradient the moment the backward has produced it. It is
                        cut into pieces at partition boundaries and waits in a bucket; full buckets are
                        sent, each piece to the rank that owns it and to no other. A parameter that got more
                        than two gradients in the last backward that reduced has as many added up first.
  3. Bound.             A piece that has arrived at its owner becomes a target: the averaged gradient of a
                        range of the owner's partition. It lies where the gradient was reduced, if that
                        memory holds nothing else, or in memory of its own, so that a rank holds what has
                        arrived and no more. Where the optimizer can use the flat partition as it is, the
                        first piece has it allocated, zeroed, and targets lie in it. What arrives later for
                        the same elements is added.
  4. End of backward.   Reducer::end_backward() sends and waits for what is pending and gives the buckets
                        back; called by the graph that reduces last. Reducer::finish_backward() guarantees
                        the same whatever ran, and is called after every backward. Elements that got no
                        gradient are bound to zeros.
  5. Handed over.       Reducer::targets() gives the targets to the optimizer.
  6. Released.          Reducer::release() forgets them, after which nothing here holds gradient storage.

ZeRO-1 reduces in the backward at the accumulation boundary only. Until then a gradient stays on its
rank, one unreduced sum a parameter: in `parameter.grad` between backwards, where users read, clip and
drop it, and here while a backward runs. ZeRO-2 reduces in every backward, into targets that live
until the step.

Everything here is ATen and c10d, so that one source serves gloo on CPU and NCCL on CUDA. All device
work is put on the current stream of the calling thread, nothing but Agreement::check() waits for the
device on the host, and every error is an exception that names the parameter and the rank.
*/

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace deepcompile {

/// How a Reducer behaves; from `ds_config`, fixed for its life.
struct Options {
    int64_t identity;         ///< the engine's number: the same on every rank, another for each engine of a process
    int64_t bucket_numel;     ///< `reduce_bucket_size`: elements that may be pending at once
    bool overlap;             ///< false: the compute stream waits for each reduction right away
    bool synchronize_before;  ///< `compile.sync_before_reduce`: drain the device first, for debugging
    bool synchronize_after;   ///< `compile.sync_after_reduce`
};

/// A run of elements of one parameter that lies in one partition.
struct Piece {
    int64_t owner;          ///< rank in the group's process group
    int64_t source_offset;  ///< elements from the start of the parameter
    int64_t target_offset;  ///< elements from the start of the owner's partition
    int64_t numel;
};

/// "[2, 3]"
std::string shape_of(const at::Tensor& tensor);

/// Cuts the flat range [offset, offset + numel) at multiples of `partition_numel`.
std::vector<Piece> cut_at_partitions(int64_t offset, int64_t numel, int64_t partition_numel);

/// Averaged gradients by their offset in a partition, in elements; each flat, contiguous and of the target dtype.
using Targets = std::map<int64_t, at::Tensor>;

/// The ranks that share a parameter group, and this rank's gradient targets in it.
struct PartitionGroup {
    c10::intrusive_ptr<c10d::ProcessGroup> process_group;
    int64_t partition_numel;
    at::ScalarType target_dtype;  ///< of targets and of unreduced gradients
    at::Device device;
    bool flat;                  ///< whether targets lie in one flat tensor
    at::Tensor flat_partition;  ///< that tensor, [partition_numel]; undefined while nothing is bound
    Targets targets;            ///< those that are bound

    int64_t bound_bytes() const;

    int64_t rank() const { return process_group->getRank(); }
    int64_t world() const { return process_group->getSize(); }
};

// torch changed the kind of this pointer between the releases that the fork supports.
using AccumulationNode = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// A registered parameter: where it lies, and what has not been reduced of its gradient yet.
struct ParameterRecord {
    std::string name;
    at::Tensor parameter;
    int64_t group;
    at::ScalarType communication_dtype;  ///< of what is sent
    std::vector<Piece> pieces;
    /// This rank's own sum of micro-batches or contributions while a backward runs. Between backwards `parameter.grad`
    /// holds it, unless that cannot, because sums have another dtype than parameters.
    at::Tensor unreduced;
    int64_t contributions = 0;  ///< received in this backward, if it reduces
    int64_t awaited = 0;  ///< contributions to be summed on this rank before the sum is reduced; 0: each is by itself
    bool hooked = false;  ///< a user's hook wants to see its gradient
    /// Where its data lay when this engine's last backward began. Elsewhere, another engine may have taken it over.
    const void* data = nullptr;

    // Gradients that reach autograd's accumulation node did not pass through a compiled graph.
    // The node is only weakly held by the parameter, so the hook lives as long as this reference.
    AccumulationNode accumulation_node;
};

/// Bytes held, now and at their highest since reset_counters().
class ByteCount {
public:
    void add(int64_t bytes)
    {
        now_ += bytes;
        if (now_ > peak_) { peak_ = now_; }
    }
    void remove(int64_t bytes) { now_ -= bytes; }
    int64_t now() const { return now_; }
    int64_t peak() const { return peak_; }
    void reset_peak() { peak_ = now_; }

private:
    int64_t now_ = 0;
    int64_t peak_ = 0;
};

/// Contiguous memory holding gradients, or parts of them, that are on their way to their owners.
struct Segment {
    at::Tensor memory;  ///< flat; a packed run of small gradients, a copy of a large one, or that itself
    int64_t group;
    bool owned;  ///< allocated here (counts as bucket) rather than a gradient's own memory
    int64_t used = 0;
    c10::Stream stream;  ///< the stream that produced it

    struct Entry {
        Piece piece;
        int64_t offset;  ///< elements from the start of `memory`
    };
    std::vector<Entry> entries;
};

/// Which gradients of which engine were sent, in which order and in which buckets.
struct Fingerprint {
    int64_t hash = 0;
    int64_t gradients = 0;
    int64_t buckets = 0;

    void add_gradient(int64_t index);
    void add_bucket(const Fingerprint& bucket);
    void add_abandoned_backward();
    bool operator==(const Fingerprint& other) const
    {
        return hash == other.hash && gradients == other.gradients && buckets == other.buckets;
    }
};

/// Raises an error of the process group anew, with what this rank could not do.
[[noreturn]] void throw_for_other_ranks(const std::string& purpose, const std::exception& error);

/// Whether all ranks have sent the same. A process group matches messages by their order alone: where a rank ran other
/// parts of the model, or its backward raised, gradients would be added to those of other parameters.
class Agreement {
public:
    /// Exchanges fingerprints, without waiting for the device. `purpose` completes "could not" where that fails.
    /// `stops_compiling`: whether this rank wants to go on without compiled code.
    void ask(c10d::ProcessGroup& process_group,
             at::Device device,
             const Fingerprint& own,
             bool stops_compiling,
             const std::string& purpose);
    /// Waits for what was last asked, if it has not been checked. Raises on every rank if they differ, or ever did.
    void check();
    /// Whether some rank wants to go on without compiled code. Every rank learns it from the same check().
    bool stops_compiling() const { return stops_compiling_; }

private:
    std::string disagreement_;
    bool stops_compiling_ = false;
    at::Tensor answer_;  ///< on the host, [4 * ranks]
    std::optional<c10::Event> arrived_;
};

/// Elements to send, and the rank that owns them.
using Message = std::pair<at::Tensor, int64_t>;

/// Gradients that are sent together. Filled, launched once, then drained.
struct Bucket {
    std::vector<Segment> segments;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    int64_t bytes = 0;            ///< of gradients
    int64_t largest = 0;          ///< bytes of the largest of them
    std::string first_parameter;  ///< for messages
    Fingerprint fingerprint;      ///< of its gradients
    /// While the bucket is filled: each gradient in it, of the parameter's shape.
    std::unordered_map<const ParameterRecord*, at::Tensor> waiting;
};

/// How a gradient came here: counted, because the slow way gives the same numbers.
enum class Route { graph, autograd };

/// Reduces the gradients of one engine. Every public method may be called from any thread.
class Reducer : public std::enable_shared_from_this<Reducer> {
public:
    /// The reducer of a new engine, which graphs find by the engine's number until it is closed.
    static std::shared_ptr<Reducer> make(Options options);
    ~Reducer();
    Reducer(const Reducer&) = delete;
    Reducer& operator=(const Reducer&) = delete;

    /// The engine's number, by which graphs find its reducer.
    int64_t identity() const { return options_.identity; }

    /// Returns the index of the group. `partition_numel` is the same on every rank. All groups of a
    /// Reducer are on one device. `flat`: whether targets shall lie in one flat tensor.
    int64_t add_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                      int64_t partition_numel,
                      at::ScalarType target_dtype,
                      at::Device device,
                      bool flat);

    /// 1. Called once a parameter by the engine when it compiles. `offset`: elements from the start of
    /// the group's flat run to the parameter.
    void register_parameter(
        int64_t group, std::string name, at::Tensor parameter, at::ScalarType communication_dtype, int64_t offset);

    /// Called by the optimizer when a backward starts. `synchronize`: whether gradients are to be
    /// reduced now (accumulation boundary, or ZeRO-2) or to be kept on this rank. `hooked`: indices, in
    /// order of registration, of parameters whose gradients no graph may keep from a user's hook.
    void begin_backward(bool synchronize, const std::vector<size_t>& hooked);

    /// From now on gradients are noticed: where one arrives and no backward has begun, `begin` is called. It is to call
    /// begin_backward().
    void on_unannounced_backward(std::function<void()> begin);

    /// Called before a forward. Autograd runs an accumulation node on the stream on which the node was made, which this
    /// object keeps from one backward to the next. Has it made again where the forward runs on another stream, so that
    /// the backward needs that stream only. Nodes of graphs that are still alive stay as they are.
    void follow_stream();

    /// 2. and 3. Called by the compiled backward (op `reduce_grad`) and, for gradients of code that was
    /// not compiled, by the parameter's accumulation node. Contributions to one parameter add up.
    /// `may_keep`: nothing else reads or reuses the gradient's memory, so it need not be copied.
    void reduce(size_t index, const at::Tensor& gradient, Route route, bool may_keep);

    /// 4. Called by the backward graph that reduces last (op `end_backward`).
    void end_backward();

    /// 4. Called by the optimizer after every backward, whichever graphs ran in it. With `synchronize`,
    /// gradients still kept on this rank are reduced too, and every piece of this rank's is bound on return.
    void finish_backward(bool synchronize);

    /// 4. Called when a backward raised: drops what it left.
    void abandon_backward();

    /// 5. Called by the optimizer before it reads targets, on its stream.
    void use_targets_here();

    /// 5. What is bound of this rank's partition of a group.
    Targets targets(int64_t group) const;
    /// 5. The flat tensor in which they lie, or nothing if they do not.
    std::optional<at::Tensor> flat_partition(int64_t group) const;

    /// 6. Forgets the targets of a group.
    void release(int64_t group);
    /// 6. Forgets every target and every unreduced gradient.
    void release_all();

    /// Unregisters the parameters, whose hooks do nothing from then on. The destructor calls it.
    void close();

    /// Bytes held, and the number of parameters registered, gradients received, and buckets and messages sent: name ->
    /// value.
    std::map<std::string, int64_t> counters() const;
    void reset_counters();

    /// Asks the other ranks whether they have sent the same gradients in the same order since the beginning. So ranks
    /// that once disagreed do so for ever.
    void ask_others();
    /// Raises on every rank if they have not.
    void check_others();

    /// Has the next ask_others() tell that this rank wants to go on without compiled code.
    void ask_to_stop_compiling();
    /// Whether some rank wants that. All ranks learn it in the check_others() of the same step, and must act alike,
    /// because gradients of uncompiled code arrive in another order.
    bool stops_compiling() const;

private:
    explicit Reducer(Options options);
    std::string describe(const ParameterRecord& record) const;
    void look_at_parameters();
    void watch_accumulation(size_t index);
    void on_accumulated(size_t index, const torch::autograd::variable_list& inputs);
    void order_after_last_use();

    void keep_unreduced(ParameterRecord& record, const at::Tensor& gradient, bool may_keep);
    at::Tensor take_unreduced(ParameterRecord& record);
    void leave_kept();
    void take_kept();
    int64_t kept_bytes() const;
    void enqueue(ParameterRecord& record, at::Tensor gradient, bool may_keep);
    void pack(PartitionGroup& group, ParameterRecord& record, const at::Tensor& gradient, bool may_keep);
    void launch();
    void sort_by_owner(Segment& segment, std::vector<Message> runs);
    void send(PartitionGroup& group, std::vector<Message>& messages, bool average);
    void await(Bucket& bucket);
    void drain();
    void bind(PartitionGroup& group, int64_t offset, const at::Tensor& arrived, bool may_keep);
    void bind_flat(PartitionGroup& group);
    void bind_rest();
    bool autograd_wants(const ParameterRecord& record) const;
    void wait_on_device(Bucket& bucket);
    void recycle(Bucket& bucket);
    void drop_memory(Segment& segment);
    void forget_gradients();
    const c10::Stream current_stream(c10::Device device) const;
    void synchronize_device(c10::Device device) const;
    bool empty() const { return filling_.segments.empty() && !in_flight_; }

    const Options options_;
    std::vector<PartitionGroup> groups_;
    std::vector<ParameterRecord> records_;

    Bucket filling_;
    std::optional<Bucket> in_flight_;
    bool synchronize_ = false;
    bool in_backward_ = false;
    std::shared_ptr<const std::function<void()>> begin_unannounced_;
    std::optional<c10::Stream> last_stream_;
    std::optional<c10::Stream> watched_from_;  ///< the stream on which all accumulation nodes were made
    bool several_streams_ = false;

    ByteCount bound_, pending_, bucket_, unreduced_;
    int64_t from_graphs_ = 0;
    int64_t from_autograd_ = 0;
    int64_t buckets_sent_ = 0;
    int64_t messages_sent_ = 0;
    Fingerprint sent_;
    bool asks_to_stop_compiling_ = false;
    Agreement agreement_;
    mutable std::mutex mutex_;
};

/// The reducer of the engine with this number, or nothing if the engine was destroyed. Any thread.
std::shared_ptr<Reducer> find_reducer(int64_t identity);
void add_reducer(int64_t identity, const std::shared_ptr<Reducer>& reducer);
void remove_reducer(int64_t identity);

}  // namespace deepcompile

// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

/*
The life of a gradient under DeepCompile ZeRO-1 and ZeRO-2, in the order in which it happens.

The elements of each parameter are shared out among the `world` ranks of its process group in `world` shards of equal
size; the last ones may have padding, or nothing else. Rank r owns shard r: no other rank needs the averaged gradient
of those elements. A rank's partition of a parameter group is its shards of all parameters.

  1. Registered empty.  Reducer::register_parameter() notes where the shards of a parameter lie. No gradient memory
                        exists yet.
  2. Reduced.           Reducer::reduce() takes a gradient as soon as the backward has produced it. All ranks
                        send gradients in one SendOrder. A gradient that comes before its turn waits; if
                        more than a bucket waits for gradients that have not even begun to come, the rank sends
                        zeros for them. In its turn the gradient is put into a Bucket. When the bucket is full,
                        a Carrier adds up its gradients, and gives each rank its own shards. The gradients die
                        with their bucket, when its reduction is over: before the next bucket is sent, or at the
                        end of the backward.
  3. Bound.             PartitionGroup::bind() makes each shard that has arrived a target: the averaged gradient
                        of a range of this rank's partition. The target keeps the memory in which the shard
                        arrived if that memory holds nothing else; otherwise it is a copy. So a rank holds only
                        its own shards. Where the optimizer can use the flat partition as it is, the first shard
                        that arrives has the whole partition allocated and zeroed, and targets are views of it.
                        A later shard of the same parameter is added to the target. Targets may also lie in host
                        memory that the caller owns; then a shard that has arrived is copied there.
  4. End of backward.   Reducer::end_backward() sends and awaits the pending buckets and frees their memory; the
                        graph that reduces last calls it. BackwardLife in Python calls
                        Reducer::finish_backward() after every backward. That function does the same for the
                        remaining turns: a turn whose gradient has not come is sent as zeros. Elements that
                        got no gradient on any rank are bound to zeros. When the step is complete, the ranks
                        find out whether one has late gradients. If so, all ranks send their unsent gradients of
                        those parameters. On a CPU beside sharded parameters, end_backward() sends nothing and
                        finish_backward() sends everything: see BucketQueue.
  5. Handed over.       Reducer::finish_backward() returns the targets of each group as a HandedOver, and goes on
                        holding them. BackwardLife puts a PartitionViews over each HandedOver into the optimizer's
                        `averaged_gradients`. The step calls Reducer::compare_and_await_targets() before it reads.
  6. Released.          For each group, PartitionGradient in step/partition_gradient.py calls PartitionViews.take(),
                        which calls Reducer::release(group). Then the step goes through the groups one after the
                        other. PartitionGradient gives the optimizer the gradients range by range, scaled and in
                        the dtype of the master weights, and drops a target when its last element has been taken. A
                        flat partition is itself the gradient of the master weights, without a copy. A partition
                        that must not be cut is one range: WholeStep in step/partitions.py frees its gradient at
                        `master.grad = None`. At the end of the step, also of one that overflowed or raised,
                        BackwardLife.release() calls
                        Reducer::release() without a group, which frees the rest. From then on the reducer holds
                        no gradient memory.

ZeRO-1 reduces only in the backward at the accumulation boundary. Until then a gradient stays on its
rank, one UnreducedSum a parameter: in `parameter.grad` between backwards, where users read, clip and
drop it, and in the reducer while a backward runs. ZeRO-2 reduces in every backward, into targets that
live until the step.

The reducer is written on ATen, autograd and c10d, so one source serves gloo on CPU and NCCL on CUDA. All
device work is put on the current stream of the calling thread, except for copies to the host, which
have a stream of their own. On a GPU the host waits for the device once in a step: in the
Reducer::finish_backward() that completes it, where it reads other ranks' fingerprints. Beyond that it
waits if an option for debugging asks for it, and if targets lie in host memory: before it reads targets
and, if that memory is not pinned, in each copy. An error is an exception; it names the parameter that it
is about, and its rank.

deepcompile_memory.h has what all parts need for gradient memory, deepcompile_carrier.h how ranks add up gradients.
*/

#pragma once

#include "deepcompile_carrier.h"
#include "deepcompile_memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
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

/// How a Reducer behaves. The values come from `ds_config` and never change while the Reducer exists.
struct Options {
    int64_t identity;         ///< the engine's number: the same on every rank, and unique within a process
    int64_t bucket_numel;     ///< `reduce_bucket_size`: elements that may be pending at once, unless buckets are held
    int64_t send_numel;       ///< a bucket of so many elements is sent, even if it could take more
    bool overlap;             ///< false: the compute stream waits for each bucket as soon as it is sent
    bool hold_on_cpu;         ///< asks that on a CPU no engine send before the backward has run; see BucketQueue
    bool synchronize_before;  ///< `compile.sync_before_reduce`: wait for the device before a bucket is sent
    bool synchronize_after;   ///< `compile.sync_after_reduce`: wait for the device after a bucket was sent
};

// 1. Registered empty: where a parameter lies.

/// How a parameter is cut into shards, as `Layout` in layout.py does it. Numbers are elements.
struct Shards {
    int64_t numel;   ///< of each shard, with padding
    int64_t offset;  ///< where each rank's shard lies in that rank's partition
    int64_t own;     ///< of this rank's shard, without padding; perhaps none
};

/// This rank's own sum of one parameter's gradients, in the dtype of targets. It adds up micro-batches, or
/// contributions in one backward. (autograd.cpp)
class UnreducedSum {
public:
    UnreducedSum(at::ScalarType dtype, StreamOrder& streams, Counters& counters)
        : dtype_(dtype), streams_(streams), counters_(counters)
    {
    }

    bool defined() const { return sum_.defined(); }
    /// The first gradient becomes the sum, without a copy if it is donated; see keep_or_copy().
    void add(const at::Tensor& gradient, bool donated);
    /// Returns the sum, for use on the current stream, and forgets it.
    at::Tensor take();
    /// Moves the sum to `dropped`.
    void drop(Dropped& dropped);

    /// Between backwards, adds the sum to `parameter.grad`. Keeps a sum whose dtype differs from the parameter's,
    /// because torch does not allow such a gradient there.
    void leave_in_grad(const at::Tensor& parameter, Dropped& dropped);
    /// Adds `parameter.grad` to the sum and moves it to `dropped`. Leaves a sparse gradient where it is.
    void take_from_grad(const at::Tensor& parameter, Dropped& dropped);

private:
    at::Tensor sum_;
    at::ScalarType dtype_;
    StreamOrder& streams_;
    Counters& counters_;
};

/// The sum of gradients that graphs computed in one of autograd's tasks and that a parameter's accumulation node must
/// get there, because a hook or the caller wants to see it.
struct KeptForAutograd {
    UnreducedSum sum;
    /// From the first contribution on that may have a turn: how many graphs of the task are still to contribute; not
    /// positive if the node also gets a gradient of code that is not compiled.
    std::optional<int64_t> left = {};
};

// The kind of this pointer differs between the torch releases that the fork supports.
using AccumulationNode = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

struct PartitionGroup;

/// The storage of a tensor, and the tensor's offset there. Not the address, which changes when a sharded parameter's
/// storage is freed and allocated again.
using StorageLocation = std::pair<const c10::StorageImpl*, int64_t>;

/// A registered parameter: where it lies, and which of its gradients have not been sent yet.
struct ParameterRecord {
    int64_t index;  ///< in order of registration, which is the same on every rank
    std::string name;
    at::Tensor parameter;
    PartitionGroup* group;
    at::ScalarType communication_dtype;  ///< the dtype in which gradients are sent
    Shards shards;
    UnreducedSum unreduced;
    int64_t received = 0;      ///< contributions of this backward, if it reduces, that no turn has taken yet
    bool is_new = false;       ///< only gradients of this backward wait for the turn, and came before it
    bool is_early = false;     ///< `is_new`, and the turn is complete but must wait for earlier turns
    bool unreachable = false;  ///< autograd's graph of this backward does not lead to the parameter
    bool reachability_unreliable = false;  ///< an earlier backward gave an unreachable parameter a gradient
    /// Where the parameter lay when the last backward began. If it lies elsewhere when a gradient comes, another engine
    /// may have taken the parameter over.
    StorageLocation storage_location = {};
    /// Autograd's node that accumulates into `parameter.grad`. Gradients of code that was not compiled reach it, and
    /// the reducer's hook on it. The parameter holds the node weakly, so this reference keeps node and hook alive.
    AccumulationNode accumulation_node = {};
    /// By autograd's number of a task.
    std::map<int, KeptForAutograd> for_autograd = {};
    bool is_delivered = false;  ///< the accumulation node has the kept gradient, and has not accumulated it yet

    /// Name, shape and rank, for messages.
    std::string describe() const;
    /// Whether autograd's running task wants this gradient: torch.autograd.grad() and backward(inputs=...) ask for
    /// some gradients, and a compiled graph computes all of them.
    bool autograd_wants() const;
    /// Whether the task is to return this gradient to its caller, as that of torch.autograd.grad() does.
    bool caller_wants() const;
    /// Whether the parameter or its accumulation node has a hook that is not a reducer's.
    bool has_hooks() const;
    /// Whether the parameter has a hook that reads `parameter.grad` when a gradient was added to it.
    bool has_hooks_of_sum() const;
};

// 2. Reduced: the order in which all ranks send gradients. (order.cpp)

/// A place in the order: the sum of so many contributions to one parameter.
struct Turn {
    int64_t index;          ///< of the parameter, in order of registration
    int64_t contributions;  ///< how many to add up before their sum is sent
};

/// The order in which all ranks send gradients, and how far this rank has come in it.
///
/// A process group matches messages by their order alone, but ranks may run different graphs, or the same graphs in
/// another order. So all ranks agree on one order: at first the reverse of the order of registration, then the order in
/// which gradients arrived on the first rank in an earlier backward. If all ranks run the same graphs, no gradient
/// waits for its turn from then on. A parameter that no rank has seen for many steps has no turn; a gradient that comes
/// then is late, and gives the parameter a turn again.
class SendOrder {
public:
    /// To be called in order of registration. `is_sent`: whether the parameter gets a turn.
    void add_parameter(int64_t index, bool is_sent);

    /// The next turn; null once all were taken.
    const Turn* next() const;
    void advance() { ++taken_; }
    bool complete() const { return taken_ == turns_.size(); }
    /// The contributions that the parameter's next turn takes; 0 if all its turns were taken.
    int64_t contributions_to(int64_t index) const;

    /// Begins with the first turn, and forgets in which order the previous backward's contributions have arrived.
    void begin_backward();
    /// A contribution to this parameter has arrived.
    void saw(int64_t index);
    /// Called when a sum of earlier backwards is sent for this parameter: the parameter counts as seen.
    void saw_earlier(int64_t index) { unseen_[index] = seen_now; }
    /// A contribution of this backward has come before its turn or after it.
    void came_out_of_turn() { suits_ = false; }
    /// The gradients of a step are complete.
    void end_step();

    /// The order that would have suited this rank's last backward. It has at most two turns for a parameter.
    std::vector<Turn> as_arrived() const;
    /// For how many steps this rank has seen no gradient of a parameter.
    int64_t steps_unseen(int64_t index) const { return unseen_[index]; }
    /// Whether this rank would change the order: a gradient came out of turn, or a turn may be given up.
    bool wants_change() const;
    /// Takes over the order in which gradients arrived on the first rank. A turn whose gradient did not arrive there
    /// keeps its place after the turn that it followed in the old order. A turn is given up if no rank has seen its
    /// parameter for many steps. `steps_unseen`: for each parameter, the smallest number of any rank.
    void take_over(const std::vector<Turn>& first_rank, const std::vector<int64_t>& steps_unseen);

private:
    static constexpr int64_t seen_now = -1;          ///< end_step() makes it 0
    static constexpr int64_t steps_to_give_up = 16;  ///< so that branches may alternate without losing their turns

    std::vector<Turn> turns_;
    size_t taken_ = 0;
    std::vector<int64_t> arrived_;  ///< parameters of the last backward's contributions, as often as these came
    std::vector<int64_t> unseen_;   ///< by parameter: steps without a gradient on this rank
    bool suits_ = true;             ///< no gradient came out of turn in the last backward
};

// The check that all ranks have sent the same. (order.cpp)

/// Events that are mixed into the fingerprint although nothing is sent for them. Without them, ranks that differ only
/// in such an event would look alike.
enum class Marker : int64_t {
    backward_abandoned = -1,  ///< a backward raised
    gradients_replaced = -2,  ///< a backward began the step anew
    step_complete = -3,       ///< the gradients of a step are complete
};

/// Identifies the gradients that were sent, their order and their buckets.
struct Fingerprint {
    int64_t hash = 0;
    int64_t gradients = 0;
    int64_t buckets = 0;

    void mix(int64_t value);
    void mix(Marker marker) { mix(static_cast<int64_t>(marker)); }
    bool operator==(const Fingerprint& other) const
    {
        return hash == other.hash && gradients == other.gradients && buckets == other.buckets;
    }
};

/// The message of a collective that failed for another rank. `purpose` completes "could not".
std::string could_not(const std::string& purpose, const std::string& reason);

/// Raises a process group's error again, with a message that names `purpose`, which completes "could not". An error of
/// this rank's own stays as it is. To be called in the handler that caught the error.
[[noreturn]] void throw_for_other_ranks(const std::string& purpose, const std::exception& error);

/// Checks that all ranks send the same. A process group matches messages by their order alone: if one rank ran another
/// number of backwards, or its backward raised, the process group would add gradients to those of other parameters.
class Agreement {
public:
    /// `identity`: the engine's number. Engines may share a process group, and ranks that send for different engines
    /// have sent different gradients.
    explicit Agreement(int64_t identity) { sent_.hash = identity; }

    /// This rank is about to send a bucket. `between`: how many buckets of other engines have been sent since this
    /// engine's last one in this backward.
    void add_bucket(const Fingerprint& bucket, int64_t between);
    void add(Marker marker) { sent_.mix(marker); }

    /// Compares this rank's fingerprint with the other ranks'. The host waits for the answers. Raises on every rank if
    /// the ranks have sent different gradients, now or earlier. Returns whether some rank `wants_exchange` of orders,
    /// see Reducer::finish_backward(). `purpose` is for the message of throw_for_other_ranks().
    bool compare(const std::deque<PartitionGroup>& groups, const std::string& purpose, bool wants_exchange = false);

private:
    Fingerprint sent_;          ///< since the engine was made
    std::string disagreement_;  ///< the message, once the ranks have disagreed
};

// 2. Reduced: gradients of which each rank gets its shard. (bucket.cpp)

/// Contiguous memory of one group's gradients: several small gradients, packed side by side, or one large gradient.
/// Each is padded to as many elements as its shards have, so shard r of it begins at r times the shard's elements.
struct Segment {
    at::Tensor memory;  ///< 1-D
    PartitionGroup* group;
    bool donated;        ///< the memory is the gradient's own; otherwise the bucket has allocated and counted it
    c10::Stream stream;  ///< the stream on which the memory was allocated or donated
    int64_t used = 0;    ///< elements from the start of `memory`
    /// Once it is sent: this rank's shards of all entries, 1-D, one after the other. With one rank, `memory`.
    at::Tensor shard = {};
    std::optional<c10::Stream> sent_on = {};  ///< the stream on which `shard` was allocated

    struct Entry {
        Shards shards;
        int64_t offset;  ///< elements from the start of `memory`, until it is sent
    };
    std::vector<Entry> entries = {};
};

/// Gradients that are sent together. A bucket is filled, sent once, awaited and destroyed, which drops its memory.
class Bucket {
public:
    Bucket(const Options& options, StreamOrder& streams, Counters& counters)
        : options_(options), streams_(streams), counters_(counters)
    {
    }
    ~Bucket();
    Bucket(const Bucket&) = delete;
    Bucket& operator=(const Bucket&) = delete;

    /// Adds the gradient to an earlier one of the same parameter that this bucket holds. That costs neither memory nor
    /// a message. Returns false if there is no earlier one. Not to be called once the bucket is sent.
    bool add_to_earlier(const ParameterRecord& record, const at::Tensor& gradient);
    /// Adds a gradient. `donated` as in Reducer::reduce().
    void add(const ParameterRecord& record, const at::Tensor& gradient, bool donated);
    /// Sends the gradients, group after group.
    void send(const std::deque<PartitionGroup>& groups);
    /// For targets in host memory, on a GPU: calls arrive() on the stream of copies, while the current stream goes on.
    void copy_to_host();
    /// Waits for the carriers and binds this rank's shards. NCCL: the current stream waits. gloo: the
    /// calling thread does. After copy_to_host(), the current stream waits for the copies instead.
    void arrive();
    /// For a bucket that is dropped before it arrived: on a GPU, makes the current stream wait for its collectives.
    void wait_on_device();

    bool empty() const { return segments_.empty(); }
    int64_t bytes() const { return bytes_; }
    int64_t largest() const { return largest_; }
    const Fingerprint& fingerprint() const { return fingerprint_; }
    /// "reduce the bucket that ...": completes "could not".
    std::string purpose() const;

private:
    Segment& segment_for(const ParameterRecord& record, const at::Tensor& gradient, bool donated);
    /// Returns what is sent for a segment. If it has several gradients, their memory is replaced by one that has shard
    /// 0 of all, then shard 1 of all, and so on.
    Message message_of(Segment& segment);
    void drop_memory(Segment& segment);
    at::Tensor drop_shard(Segment& segment);

    const Options& options_;
    StreamOrder& streams_;
    Counters& counters_;
    std::vector<Segment> segments_;
    Works works_;
    std::optional<c10::Event> copied_;  ///< the end of copy_to_host()
    int64_t bytes_ = 0;                 ///< of gradients
    int64_t largest_ = 0;               ///< bytes of the largest gradient
    std::string first_parameter_;
    Fingerprint fingerprint_;
    /// Until the bucket is sent: a view of each gradient in it, in the parameter's shape.
    std::unordered_map<const ParameterRecord*, at::Tensor> joinable_;
};

/// The bucket that is being filled, and at most one in flight: sent, and not awaited yet.
///
/// If an engine of any rank had `hold_on_cpu` when the last engine was set up, full buckets of all engines wait for the
/// end of the backward, which may run through several engines; see Reducer::hold_on_cpu(). On a CPU a rank that sends a bucket waits for the other
/// ranks. If these wait meanwhile for this rank in another process group, for which the backward has not come far
/// enough, no rank goes on. Which gradients are in which bucket does not depend on that.
class BucketQueue {
public:
    BucketQueue(const Options& options,
                const std::deque<PartitionGroup>& groups,
                StreamOrder& streams,
                Agreement& agreement,
                Counters& counters)
        : options_(options), groups_(groups), streams_(streams), agreement_(agreement), counters_(counters)
    {
    }

    /// Adds a gradient, and sends the bucket if it is full. In a group of one rank, binds the gradient at once.
    void enqueue(const ParameterRecord& record, const at::Tensor& gradient, bool donated);
    /// Adds the gradient to an earlier one of the same parameter in the bucket that is being filled. Returns false if
    /// there is none.
    bool add_to_earlier(const ParameterRecord& record, const at::Tensor& gradient)
    {
        return filling_->add_to_earlier(record, gradient);
    }
    /// Drains the bucket in flight, and sends the one that is being filled, or holds it.
    void launch();
    /// Waits for the bucket in flight, binds this rank's shards and drops the rest.
    void drain();
    /// Drops all buckets.
    void abandon();
    /// From now on, buckets that other reducers of this process send over the same process group count.
    /// `holds`: whether full buckets wait for the backward's end.
    void begin_backward(bool holds);
    /// Called when the backward has run: sends the buckets that were held, and holds none from now on.
    void send_held();
    bool empty() const { return filling_->empty() && held_.empty() && !in_flight_; }

private:
    std::unique_ptr<Bucket> empty_bucket() const { return std::make_unique<Bucket>(options_, streams_, counters_); }
    void send_first();
    void await_in_flight();

    const Options& options_;
    const std::deque<PartitionGroup>& groups_;
    StreamOrder& streams_;
    Agreement& agreement_;
    Counters& counters_;
    std::unique_ptr<Bucket> filling_ = empty_bucket();  ///< never null
    std::deque<std::unique_ptr<Bucket>> held_;          ///< launched, and not sent yet
    std::unique_ptr<Bucket> in_flight_;                 ///< null if no bucket is in flight
    bool failed_ = false;                               ///< until abandon(): sending or awaiting `in_flight_` raised
    bool holds_ = false;                                ///< whether buckets that are launched are held
    /// The bytes of the bucket that was launched last, and of its largest gradient, until the bucket is drained, as if
    /// it had been sent. So all ranks, of which some hold a bucket that others send, fill the same buckets.
    int64_t launched_bytes_ = 0;
    int64_t launched_largest_ = 0;
    int64_t launches_before_ = 0;  ///< `launches_over()` when this reducer last sent a bucket
};

// 3. Bound: averaged gradients of this rank's shards. (bucket.cpp)

/// Averaged gradients by their offset in a partition, in elements; each 1-D, contiguous and of the target dtype.
using Targets = std::map<int64_t, at::Tensor>;

/// The targets of a group, which the optimizer gets when a step is complete and keeps until the reducer forgets them.
/// Until code reads a view, the optimizer itself holds no gradient memory, so that memory is free when a later backward
/// raises. Any thread may call any method.
class HandedOver {
public:
    HandedOver(Targets targets, at::Tensor flat_partition)
        : targets_(std::move(targets)), flat_partition_(std::move(flat_partition))
    {
    }

    /// The tensor in which all targets lie; undefined if each has memory of its own.
    at::Tensor flat_partition() const;
    Targets targets() const;
    /// Whether each of the views, in the order of the targets, has the memory, dtype and number of elements of its
    /// target, and is contiguous. If targets lie in one tensor, they must still lie there. Empty views do not count.
    bool are_views(const std::vector<std::optional<at::Tensor>>& views) const;
    /// Moves the targets to `dropped`.
    void drop(Dropped& dropped);

private:
    mutable std::mutex mutex_;
    Targets targets_;
    at::Tensor flat_partition_;
};

/// The ranks that share a parameter group, and the gradient targets of this rank's partition of it.
struct PartitionGroup {
    c10::intrusive_ptr<c10d::ProcessGroup> process_group;
    double divisor;  ///< of the ranks' sum of a gradient
    int64_t partition_numel;
    at::ScalarType target_dtype;  ///< of targets and of unreduced sums
    at::Device device;
    bool flat;                       ///< whether targets lie in a flat partition
    std::optional<at::Tensor> host;  ///< [partition_numel] on CPU: targets lie there, and not on the device
    Counters& counters;
    std::shared_ptr<Carrier> carrier;
    size_t own_shards = 0;  ///< this rank's shards that have elements, each of which gets a target in every step
    Targets targets = {};   ///< the bound targets
    at::Tensor flat_partition =
        {};  ///< [partition_numel]; one tensor for all targets; undefined if not `flat`, or while nothing is bound
    std::shared_ptr<HandedOver> handed_over = {};  ///< the optimizer's reference to the targets; may be null

    int64_t rank() const { return process_group->getRank(); }
    int64_t world() const { return process_group->getSize(); }

    /// Makes an arrived shard the target at `offset`, or adds the shard to an existing target. `arrived`
    /// is 1-D; if it is donated, the target may keep its memory, see keep_or_copy(). Copies to host memory are put on
    /// the current stream.
    void bind(int64_t offset, const at::Tensor& arrived, bool donated);
    /// Binds this rank's shard of a parameter to zeros, unless it is bound.
    void bind_to_zeros(const Shards& shards);
    /// Allocates the flat partition, zeroed, if targets lie in one and it does not exist yet.
    void allocate_flat_partition();
    std::shared_ptr<HandedOver> hand_over();
    /// Moves all targets, also handed-over ones, to `dropped`.
    void release(Dropped& dropped);
};

/// The group with the most ranks, which are all of the engine's. There ranks agree: on the order of all gradients, also
/// of those that only some ranks share, such as experts'. All ranks have as many of these, in the same shapes.
const PartitionGroup& largest(const std::deque<PartitionGroup>& groups);

// 1. to 6.: the whole life. (reducer.cpp, autograd.cpp, order.cpp)

/// How a gradient came here. The reducer counts both routes, because gradients that do not come from graphs are reduced
/// more slowly, and the results do not show it.
enum class Route { graph, autograd };

/// The state of the backward that began last.
enum class BackwardState {
    none,        ///< no backward has begun, or the last one is finished, or abandoned() has reported it
    running,     ///< autograd runs its graph
    ended,       ///< autograd has run its graph, and finish_backward() was not called yet
    raised,      ///< abandoned: autograd dropped its graph, or its epilogue raised
    unfinished,  ///< abandoned: abandon_unfinished() found that it cannot finish any more
};

/// Reduces the gradients of one engine. Every public method may be called from any thread.
class Reducer : public std::enable_shared_from_this<Reducer> {
public:
    /// The reducer of a new engine, which graphs find by the engine's number until it is closed.
    static std::shared_ptr<Reducer> make(Options options);
    /// The reducer of the engine with this number, or nothing if the engine was destroyed. Any thread.
    static std::shared_ptr<Reducer> find(int64_t identity);
    /// Whether an engine of this process has `hold_on_cpu`, and was neither destroyed nor collected. Ranks may differ,
    /// because Python collects an engine that nobody destroyed at another time on each rank. Any thread.
    static bool some_want_to_hold();
    /// Sets whether all engines of this process hold their buckets, on a CPU, from their next backward on. The ranks
    /// agree on it when an engine is set up. Any thread.
    static void hold_on_cpu(bool holds);
    static bool holds_on_cpu();
    ~Reducer();
    Reducer(const Reducer&) = delete;
    Reducer& operator=(const Reducer&) = delete;

    int64_t identity() const { return options_.identity; }

    /// Returns the index of the group. `process_group`: the ranks that share the parameters, all of the engine's or a
    /// part of them. `divisor`: what the ranks' sum of a gradient is divided by. `partition_numel` is the same on every
    /// rank. All groups of a Reducer are on one device. `flat`: whether targets are to lie in a flat partition. `host`:
    /// host memory [partition_numel] of the target dtype, in which targets are to lie instead; the caller reads and
    /// writes this memory only between a step's last finish_backward() and the next backward.
    int64_t add_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                      double divisor,
                      int64_t partition_numel,
                      at::ScalarType target_dtype,
                      at::Device device,
                      bool flat,
                      std::optional<at::Tensor> host);

    /// In place of the process group's collectives, `carrier` adds up the gradients of a group. To be called before the
    /// first backward.
    void set_carrier(int64_t group, std::shared_ptr<Carrier> carrier);

    /// 1. Called once for each parameter by the engine when it compiles. `shard_numel`: elements of each of its shards,
    /// with padding. `offset`: where these lie in the ranks' partitions.
    void register_parameter(int64_t group,
                            std::string name,
                            at::Tensor parameter,
                            at::ScalarType communication_dtype,
                            int64_t shard_numel,
                            int64_t offset);

    /// Called by `BackwardLife.begin()` when a backward starts, and for each further loss of the same backward.
    /// `reduces`: whether this backward reduces gradients (at the accumulation boundary, or under ZeRO-2) or keeps them
    /// on this rank.
    ///
    /// Autograd does not report a backward that raised. So the reducer queues a Watch with the running graph task,
    /// which calls the watch when the graph has run, or else drops it. A dropped watch makes the reducer abandon the
    /// backward, on the thread that drops the task. Python cannot run there, so the caller must ask: abandoned().
    /// Raises, and begins nothing, if the caller has not asked yet.
    void begin_backward(bool reduces);

    /// Called when a backward begins, with `may_enclose`, and between backwards. Abandons the last backward if it
    /// neither finished nor can finish: it raised and one of autograd's threads still holds its graph task, or an
    /// interrupt came after its graph had run. `may_enclose`: another backward begins, which the last one may enclose;
    /// an enclosing backward goes on. Returns abandoned().
    std::optional<std::string> abandon_unfinished(bool may_enclose);
    /// Returns "raised" or "unfinished" once after a backward was abandoned, and otherwise nothing. The caller drops
    /// its gradients of the backward's step, and then another backward may begin.
    std::optional<std::string> abandoned();
    /// Whether a backward has begun and was neither finished nor abandoned.
    bool in_backward() const
    {
        const BackwardState state = state_;
        return state == BackwardState::running || state == BackwardState::ended;
    }

    /// From now on, `begin` is called when a gradient arrives and no backward has begun. It calls begin_backward() and
    /// returns true, or returns false. In the latter case the gradient stays on this rank, and the next backward takes
    /// it.
    void listen(std::function<bool()> begin);

    /// Called when a backward that the engine's caller has not announced comes through an output of the engine: whether
    /// autograd's running task computes gradients of registered parameters, and its caller wants some of them. Another
    /// backward only passes through the engine. True outside of a task, and where a function of Python may run a
    /// backward of its own.
    bool leads_to_parameters() const;

    /// Called before a forward. Autograd runs an accumulation node on the stream on which the node was made, and the
    /// reducer keeps nodes from one backward to the next. If this forward runs on another stream, makes the nodes
    /// again, so that its backward needs only that stream. Nodes of graphs that are still alive stay as they are.
    void follow_stream();

    /// 2. and 3. Called by the compiled backward (operator `reduce_grad`), and by the parameter's accumulation node for
    /// gradients of code that was not compiled. Contributions to one parameter add up. `donated`: nobody but the
    /// reducer reads or writes the gradient's memory from now on, so the reducer need not copy the gradient.
    ///
    /// If a hook or the caller wants to see a graph's gradient, the reducer keeps it for the parameter's accumulation
    /// node. Autograd runs the node in the same task, after all nodes that compute gradients of the parameter. The node
    /// passes the gradient to this function again, unless autograd returns the gradient to the caller. If several
    /// graphs contribute, the reducer sends zeros in the turns of all contributions but the last: this rank alone may
    /// have the hook, and other ranks wait for it in each turn.
    void reduce(size_t index, const at::Tensor& gradient, Route route, bool donated);

    /// 4. Called by the backward graph that reduces last (operator `end_backward`).
    void end_backward();

    /// 4. and 5. Called by `BackwardLife` after every backward, whichever graphs ran in it. With `reduces`, the turns
    /// that are left are taken, and every shard of this rank is bound on return.
    ///
    /// With `completes`, the gradients of the step are complete on every rank. Then reduces gradients that came after
    /// their turn on some rank, and changes the order on all ranks if it did not suit the first rank. Raises on every
    /// rank if the ranks have sent different gradients. The host waits for the device, to learn whether another rank
    /// has late gradients. Returns each group's targets for the optimizer, and without `completes` nothing.
    std::vector<std::shared_ptr<HandedOver>> finish_backward(bool reduces, bool completes);

    /// 4. Called when a backward restarts the step. Records that this rank discarded unused gradients, so that the
    /// check fails if other ranks did not.
    void replace_gradients();

    /// 4. Called when a backward's epilogue raised: drops pending buckets, every target and every unreduced gradient,
    /// also those of earlier backwards.
    void abandon_backward();

    /// 5. Called by `step.py` on every rank before a step, on the stream on which targets are read. On CPU, ranks
    /// compare once more what they have sent. Otherwise, if another rank began one more backward instead of the step,
    /// gloo would hang or end the process. Then the stream waits for the targets, and the host for copies to host
    /// memory.
    void compare_and_await_targets();

    /// 5. Called on every rank before the host waits for the device in a step: a rank that has died ends in an error here,
    /// and not in the step's own collectives, if ranks wait for each other in another way.
    void await_others();

    /// 6. Forgets the targets of a group or, without one, every target and every unreduced gradient.
    void release(std::optional<int64_t> group);

    /// Unregisters the parameters. The hooks on their accumulation nodes do nothing from then on. The destructor calls
    /// this function.
    void close();

    /// Name -> value, as Counters has them, with the gradients in `parameter.grad` between backwards. Leaves these out
    /// while another thread waits for other ranks. Takes the interpreter's lock, under which users write `.grad`.
    std::map<std::string, int64_t> counters() const;
    void reset_counters() { counters_.reset(); }

private:
    explicit Reducer(Options options);
    /// Called by the watch of the backward with this serial: autograd has run its graph, or has dropped the graph.
    void graph_ended(int64_t serial);
    void graph_dropped(int64_t serial) noexcept;
    void look_at_parameters();
    void watch_accumulation(ParameterRecord& record);
    void on_accumulated(size_t index, const torch::autograd::variable_list& inputs);
    friend class Delivery;
    /// Called before the hooks of a parameter see `gradient`, which may be undefined. Returns its sum with the
    /// gradients that were kept for the node.
    at::Tensor deliver(size_t index, const at::Tensor& gradient);
    /// Called where the accumulation node has run and has left no gradient: a hook may have dropped it.
    void on_nothing_accumulated(size_t index);
    // The functions below need mutex_ held by the caller.
    /// Whether gradients of the parameter that come now have turns.
    bool takes_turns(const ParameterRecord& record) const;
    /// Keeps a graph's gradient until autograd runs the accumulation node.
    KeptForAutograd& keep_for_autograd(ParameterRecord& record, const at::Tensor& gradient, bool donated);
    /// Returns how many graphs of the running task contribute to the parameter; 0 if the accumulation node also gets a
    /// gradient of code that is not compiled.
    int64_t contributions_of_graphs(const ParameterRecord& record);
    /// Takes the sum that was kept in the running task; undefined if there is none.
    at::Tensor take_for_autograd(ParameterRecord& record);
    /// Finds the parameters that the graph of autograd's running task does not reach. Returns whether there are any.
    /// A backward of several losses may have several graphs. `is_first`: whether this is the first.
    bool find_unreachable(bool is_first);
    /// Begins with the first turn, and resets the previous backward's notes in the records.
    void begin_turns();
    void send_due_turns();
    void send_rest_of_turns();
    /// Counts a contribution to the parameter. Before it, sends turns of unreachable parameters.
    void count(ParameterRecord& record);
    /// Counts a contribution whose gradient autograd has, or a hook has dropped. Its turn sends zeros for it.
    void count_without_gradient(ParameterRecord& record);
    /// Adds a gradient that comes before its turn, which takes `awaited` contributions, to the parameter's sum, unless
    /// autograd has it (undefined). If more than one gradient and more than a bucket wait then, sends the turns that
    /// hold them up, unless a turn has some of its contributions.
    void keep_early(ParameterRecord& record, int64_t awaited, const at::Tensor& gradient, bool donated);
    void send_turn(ParameterRecord& record, const Turn& turn);
    /// To be called when the parameter's sum is sent or dropped: the sum no longer counts as early.
    void end_early(ParameterRecord& record);
    /// Enqueues the sum of the gradient and the gradients of the parameter that this rank has kept.
    void enqueue_with_sum(ParameterRecord& record, const at::Tensor& gradient, bool donated);
    /// Enqueues the unreduced sum or, if there is none, zeros.
    void enqueue_sum(ParameterRecord& record);
    /// Ends the gradients of a step; see finish_backward().
    void agree_and_reduce_late();
    void await_carriers(const std::string& purpose);
    /// Agrees on the order of later backwards. Returns the parameters of which some rank has unreduced gradients.
    std::vector<int64_t> exchange_orders();
    /// Queues a Watch with autograd's running task, if there is one.
    void watch_graph_task();
    /// Ends the backward that began last.
    void leave_backward(BackwardState next);
    /// Drops all gradients of a backward that cannot finish, and notes in the fingerprint that this rank did so. Moves
    /// gradients that a user may know of to `dropped`; see Dropped.
    void abandon(BackwardState how, Dropped& dropped);
    bool is_abandoned() const { return state_ == BackwardState::raised || state_ == BackwardState::unfinished; }
    /// Before targets are dropped: a stream besides their own may still add to them, or read them.
    void record_targets() const;
    /// Moves bound and unreduced gradients, and those kept for nodes of other tasks, to `dropped`.
    void forget_gradients(Dropped& dropped);

    const Options options_;
    /// A thread releases the interpreter's lock before it waits for this mutex: bindings.cpp and graph_dropped() ensure
    /// it. So the thread that holds the mutex may wait for the interpreter's lock, as a process group that is written
    /// in Python does. But it must not call or drop objects that may call the reducer; see Dropped.
    mutable std::mutex mutex_;
    // Deques, because other objects hold addresses of groups and records.
    std::deque<PartitionGroup> groups_;
    std::deque<ParameterRecord> records_;

    Counters counters_;
    StreamOrder streams_;
    Agreement agreement_;
    BucketQueue buckets_;
    SendOrder order_;
    int64_t early_count_ = 0;  ///< parameters whose gradients are early
    int64_t early_numel_ = 0;  ///< their elements
    /// contributions_of_graphs() of each accumulation node of a task, for the parameters' hooks.
    std::unordered_map<const torch::autograd::Node*, int64_t> from_graphs_;
    int from_graphs_of_ = -1;  ///< autograd's number of that task

    /// The state of the backward that began last. While in_backward(), `parameter.grad` belongs to autograd, and a
    /// gradient need not announce a backward. Any thread may read the state; a thread that writes it holds mutex_.
    std::atomic<BackwardState> state_ = BackwardState::none;
    int graph_task_ = -1;  ///< autograd's number of the task in which the last backward began; -1: none
    /// Changes when a backward begins or ends, so that watches of earlier backwards know that they are outdated.
    int64_t serial_ = 0;
    bool is_handed_over_ = false;                         ///< whether the optimizer has targets
    bool reduces_ = false;                                ///< whether the running backward reduces
    std::shared_ptr<const std::function<bool()>> begin_;  ///< see listen()
    std::optional<c10::Stream> watched_from_;             ///< the stream on which all accumulation nodes were made
};

/// Whether the graph of autograd's running task has a function of reentrant checkpointing, which runs a backward of its
/// own. Takes the interpreter's lock. (autograd.cpp)
bool leads_to_checkpoints();
/// Whether the task runs a function that AOTAutograd has compiled. Takes the interpreter's lock. (autograd.cpp)
bool leads_to_compiled_code();

}  // namespace deepcompile

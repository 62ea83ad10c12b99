// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

/*
Gradient memory: how much of it there is, who may keep it, and which stream used it last. The life of a gradient is
told in deepcompile.h.
*/

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace deepcompile {

/// Bytes held now, and the most bytes since the last reset_peak(). Any thread may read and reset; a thread that adds
/// and removes holds the reducer's mutex.
class ByteCount {
public:
    void add(int64_t bytes)
    {
        now_ += bytes;
        if (now_ > peak_) { peak_ = now_.load(); }
    }
    void remove(int64_t bytes) { now_ -= bytes; }
    int64_t now() const { return now_; }
    int64_t peak() const { return peak_; }
    void reset_peak() { peak_ = now_.load(); }

private:
    std::atomic<int64_t> now_ = 0;
    std::atomic<int64_t> peak_ = 0;
};

/// Bytes that a reducer holds, and numbers of gradients and messages since the last reset(). Any thread may read and
/// reset; a thread that counts holds the reducer's mutex.
struct Counters {
    ByteCount bound;      ///< targets on the device
    ByteCount on_host;    ///< targets in host memory that the caller owns
    ByteCount pending;    ///< gradients that wait in a bucket or are on their way
    ByteCount bucket;     ///< memory that buckets allocated, because they could not keep a gradient's own
    ByteCount unreduced;  ///< sums that stay on this rank for now
    std::atomic<int64_t> registered = 0;  ///< parameters, since close() or the beginning
    std::atomic<int64_t> from_graphs = 0;
    std::atomic<int64_t> from_autograd = 0;
    std::atomic<int64_t> out_of_turn = 0;  ///< gradients that came before their turn, or after it
    std::atomic<int64_t> buckets_sent = 0;
    std::atomic<int64_t> messages_sent = 0;

    /// Name -> value; the name of a peak begins with `peak_`.
    std::map<std::string, int64_t> values() const;
    void reset();
};

int64_t bytes_of(const at::Tensor& tensor);

/// Tensors to drop after the reducer's mutex is released, so declare it before the lock. Dropping a tensor that Python
/// knows takes the interpreter's lock and may run a user's code, such as a `weakref.finalize()` that calls the engine.
using Dropped = std::vector<at::Tensor>;

/// Marks the stage of the tensor's memory in the trace of a profiler that records operands. Does nothing without a
/// profiler. Readers of traces know the stages by these names.
void mark_stage(const char* stage, const at::Tensor& tensor);

/// "[2, 3]"
std::string shape_of(const at::Tensor& tensor);

/// Whether the tensor is contiguous and its storage holds nothing else. False for memory that torch has not allocated,
/// such as NumPy's: freeing it may run Python code at any place, so the reducer must not keep it; see Dropped.
bool fills_its_storage(const at::Tensor& tensor);

/// A contiguous tensor in another shape, without its autograd graph.
at::Tensor in_shape(const at::Tensor& tensor, at::IntArrayRef sizes);

/// A tensor in the memory of this one, if that memory is donated, holds nothing else, and has the right dtype;
/// otherwise a contiguous copy. From now on only the callee reads or writes donated memory.
at::Tensor keep_or_copy(const at::Tensor& tensor, at::ScalarType dtype, bool donated);

/// Tells the allocator that the calling thread's current stream uses the tensor's memory. Does nothing where the
/// memory was allocated on that stream, or on CPU.
void record_on_current_stream(const at::Tensor& tensor);

/// The calling thread's current stream on a device.
c10::Stream current_stream(c10::Device device);
/// An event that the device reaches when it has done the stream's current work. Not on CPU.
c10::Event record_event(const c10::Stream& stream);

/// Puts the streams that use a reducer's memory into one order. Autograd runs a backward on the streams of its forward,
/// so the gradients of one backward may come from several streams, and all of them use the same buckets, targets and
/// sums. Each stream waits for the stream that used this memory last, so the reducer may read and write the memory as
/// if there were one stream. On CPU nothing here does anything.
class StreamOrder {
public:
    /// The one device on which the memory lies.
    void set_device(c10::Device device) { device_ = device; }
    bool on_cpu() const { return device_.is_cpu(); }
    /// The calling thread's current stream.
    c10::Stream current() const;
    /// The host waits for everything on the device; for debugging.
    void synchronize_device() const;
    /// The host waits for the last use.
    void wait_on_host() const;
    /// The stream on which gradients are copied to the host. Not on CPU.
    c10::Stream copies();

    /// To be called before a use of the memory on the current stream, which waits for the stream of the last use.
    void order_after_last_use();
    /// The stream that used the memory last, if any did.
    const std::optional<c10::Stream>& last() const { return last_; }
    /// Makes `stream` wait for the last use, without making `stream` the last one.
    void let_wait(const c10::Stream& stream) const;
    /// Makes the stream of the last use wait for what `stream` has been given so far.
    void let_last_wait(const c10::Stream& stream) const;

    /// Forgets that several streams used the memory. To be called when the current stream waits for all of them.
    void forget_other_streams() { several_ = false; }
    /// If several streams have used the memory: keeps the allocator of the tensor's stream from reusing the tensor's
    /// memory before the last stream is done with it.
    void record_on_last(const at::Tensor& tensor) const;
    /// The same for memory whose stream is known.
    void record_on_last(const at::Tensor& tensor, const c10::Stream& allocated_on) const;

private:
    c10::Device device_ = c10::Device(c10::kCPU);
    std::optional<c10::Stream> last_;
    std::optional<c10::Stream> copies_;
    bool several_ = false;
};

}  // namespace deepcompile

// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile_copy_engines.h"

#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <algorithm>

// The few functions of the CUDA driver that torch does not offer without CUDA's headers.

namespace deepcompile {

namespace {

// Values of the driver's interface, which never change.
constexpr int success = 0;
constexpr unsigned register_portable = 1, register_for_device = 2;
constexpr unsigned wait_until_reached = 0;  // cyclic: (int32_t)(word - number) >= 0
// After the stream's earlier writes are visible to all.
constexpr unsigned write_in_order = 0;
// A driver was seen to crash with 50,000 copies in a batch. A thousand make the cost of a call as small as it gets.
constexpr size_t most_in_a_batch = 1024;

/// How the copies of a batch are made, as CUDA 12.8 lays it out.
struct Attributes {
    unsigned order = 1;   ///< sources are read in stream order, so not before a signal for which the stream waits
    int places[4] = {};   ///< for managed memory, which none of this is
    unsigned prefer = 1;  ///< copy engines to multiprocessors, where the driver has the choice
};
static_assert(sizeof(Attributes) == 24, "the driver reads so many bytes");

template <typename Function>
void find(void* library, const char* name, Function& function)
{
    function = reinterpret_cast<Function>(dlsym(library, name));
    TORCH_CHECK(function, std::string("the CUDA driver has no function ") + name);
}

}  // namespace

const Driver& Driver::get()
{
    static const Driver one;
    return one;
}

Driver::Driver()
{
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    TORCH_CHECK(library, "there is no CUDA driver (libcuda.so.1)");
    find(library, "cuMemcpyAsync", copy_);
    find(library, "cuStreamWriteValue32_v2", write_);
    find(library, "cuStreamWaitValue32_v2", wait_);
    find(library, "cuMemHostRegister_v2", register_);
    find(library, "cuMemHostGetDevicePointer_v2", address_);
    find(library, "cuMemHostUnregister", unregister_);
    find(library, "cuCtxGetCurrent", context_);
    find(library, "cuCtxSetCurrent", use_);
    find(library, "cuGetErrorString", describe_);
    // The function has other arguments since CUDA 13. The version, 12.8, says which are meant.
    const auto find_version =
        reinterpret_cast<int (*)(const char*, void**, int, uint64_t, int*)>(dlsym(library, "cuGetProcAddress_v2"));
    void* found = nullptr;
    if (find_version && find_version("cuMemcpyBatchAsync", &found, 12080, 0, nullptr) == success) {
        copy_batch_ = reinterpret_cast<decltype(copy_batch_)>(found);
    }
}

void Driver::check(int result, const char* what) const
{
    if (result == success) { return; }
    const char* text = nullptr;
    if (describe_(result, &text) != success || !text) { text = "unknown error"; }
    TORCH_CHECK(false, std::string("the CUDA driver could not ") + what + ": " + text);
}

void Driver::copy(void* stream, const Copies& copies) const
{
    if (!copy_batch_) { return copy_one_by_one(stream, copies); }
    const Attributes attributes;
    const size_t attributes_begin = 0;
    size_t failed = 0;
    for (size_t first = 0; first < copies.to.size(); first += most_in_a_batch) {
        check(copy_batch_(copies.to.data() + first,
                          copies.from.data() + first,
                          copies.bytes.data() + first,
                          std::min(copies.to.size() - first, most_in_a_batch),
                          &attributes,
                          &attributes_begin,
                          1,
                          &failed,
                          stream),
              "copy between GPUs");
    }
}

void Driver::copy_one_by_one(void* stream, const Copies& copies) const
{
    for (size_t index = 0; index < copies.to.size(); ++index) {
        check(copy_(copies.to[index], copies.from[index], copies.bytes[index], stream), "copy between GPUs");
    }
}

void Driver::write(void* stream, uint64_t address, uint32_t number) const
{
    check(write_(stream, address, number, write_in_order), "write a number from a stream");
}

void Driver::wait(void* stream, uint64_t address, uint32_t number) const
{
    check(wait_(stream, address, number, wait_until_reached), "make a stream wait for a number");
}

uint64_t Driver::map(void* host, int64_t bytes) const
{
    check(register_(host, static_cast<size_t>(bytes), register_portable | register_for_device),
          "register shared host memory");
    uint64_t address = 0;
    check(address_(&address, host, 0), "map shared host memory");
    return address;
}

void Driver::unmap(void* host) const noexcept
{
    // At the end of a process the context may be gone, and the mapping with it.
    unregister_(host);
}

void* Driver::context() const
{
    void* context = nullptr;
    check(context_(&context), "tell the current context");
    return context;
}

void Driver::use(void* context) const
{
    check(use_(context), "use a context");
}

}  // namespace deepcompile

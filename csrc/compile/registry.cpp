// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <shared_mutex>
#include <unordered_map>

namespace deepcompile {

namespace {

// A compiled graph may serve many layers and engines, so it names a parameter only by passing it. The
// address of its data leads from there to the engine, in this one map for the process.
struct Entry {
    const Reducer* identity;
    std::weak_ptr<Reducer> reducer;
    size_t index;
};

std::shared_mutex& registry_mutex()
{
    static std::shared_mutex mutex;
    return mutex;
}

std::unordered_map<const void*, Entry>& registry()
{
    static std::unordered_map<const void*, Entry> entries;
    return entries;
}

}  // namespace

std::optional<Registration> find_registration(const void* data)
{
    std::shared_lock lock(registry_mutex());
    const auto found = registry().find(data);
    if (found == registry().end()) { return std::nullopt; }
    auto reducer = found->second.reducer.lock();
    if (!reducer) { return std::nullopt; }
    return Registration{std::move(reducer), found->second.index};
}

void add_registration(const void* data, const std::shared_ptr<Reducer>& reducer, size_t index)
{
    std::unique_lock lock(registry_mutex());
    registry()[data] = {reducer.get(), reducer, index};
}

void remove_registration(const void* data, const Reducer* reducer)
{
    std::unique_lock lock(registry_mutex());
    const auto found = registry().find(data);
    // The address may have been given to another engine's parameter since.
    if (found != registry().end() && found->second.identity == reducer) { registry().erase(found); }
}

}  // namespace deepcompile

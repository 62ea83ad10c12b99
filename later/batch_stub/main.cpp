#include "deepcompile_copy_engines.h"
#include <dlfcn.h>
#include <cstdio>
#include <random>
using namespace deepcompile;
int main()
{
    const auto& driver = Driver::get();
    void* lib = dlopen("libcuda.so.1", RTLD_NOW);
    auto at = [&](const char* n) { return (int*)dlsym(lib, n); };
    for (size_t count : {0, 1, 16, 1024, 1025, 2500}) {
        std::vector<char> from(count * 64 + 1), to(count * 64 + 1, 1);
        std::mt19937 r(count); for (auto& c : from) c = r();
        Copies copies;
        for (size_t i = 0; i < count; ++i) { copies.add((uint64_t)&to[(count - 1 - i) * 64], (uint64_t)&from[i * 64], 64); copies.add(0, 0, 0); }
        *at("singles") = *at("batches") = 0;
        try { driver.copy((void*)0x77, copies); } catch (const std::exception& e) { printf("%zu raised: %.70s\n", count, e.what()); continue; }
        bool right = true; for (size_t i = 0; i < count * 64; ++i) right &= to[(count - 1 - i / 64) * 64 + i % 64] == from[i];
        printf("%zu: %s singles %d batches %d longest %zu\n", count, right ? "right" : "WRONG", *at("singles"), *at("batches"), *(size_t*)dlsym(lib, "longest"));
    }
}

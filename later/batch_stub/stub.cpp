#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
extern "C" {
int singles = 0, batches = 0, looked = 0; size_t longest = 0;
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, void*) { ++singles; memcpy((void*)to, (void*)from, n); return 0; }
int cuMemcpyBatchAsync(uint64_t* to, uint64_t* from, size_t* n, size_t count, const unsigned* a, size_t* first, size_t attrs, size_t* failed, void* stream)
{
    if (!count || attrs != 1 || first[0] != 0 || a[0] != 1 || a[1] || a[2] || a[3] || a[4] || a[5] != 1 || !failed || stream != (void*)0x77) return 1;
    ++batches; if (count > longest) longest = count;
    for (size_t i = count; i-- > 0;) { if (!n[i]) return 1; memcpy((void*)to[i], (void*)from[i], n[i]); }
    return getenv("FAIL") ? 1 : 0;
}
int cuMemcpyBatchAsync_v2() { abort(); }
int cuGetProcAddress_v2(const char* name, void** p, int version, uint64_t flags, int*)
{
    ++looked;
    if (strcmp(name, "cuMemcpyBatchAsync") || version != 12080 || flags) abort();
    const char* old = getenv("OLD");
    if (old && *old == 'i') return 1;
    *p = old ? nullptr : (void*)cuMemcpyBatchAsync;
    return 0;
}
int cuStreamWriteValue32_v2() { return 0; } int cuStreamWaitValue32_v2() { return 0; } int cuMemHostRegister_v2() { return 0; }
int cuMemHostGetDevicePointer_v2() { return 0; } int cuMemHostUnregister() { return 0; } int cuCtxGetCurrent() { return 0; } int cuCtxSetCurrent() { return 0; }
int cuGetErrorString(int, const char** t) { *t = "invalid argument"; return 0; }
}

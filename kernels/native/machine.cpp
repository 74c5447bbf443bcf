#include "machine.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

struct Findings {
    const char* missing[HR_NUM_ISAS];  // null: usable
};

#if defined(__x86_64__)

thread_local bool is_trying = false;
thread_local sigjmp_buf after_fault;
constexpr int kFaults[] = {SIGILL, SIGSEGV, SIGBUS};
constexpr int kNumFaults = sizeof kFaults / sizeof *kFaults;
struct sigaction former_actions[kNumFaults];

// Leaves the trial; a fault of another thread goes to whom it would have gone to.
void leave_trial(int signal) {
    if (is_trying) siglongjmp(after_fault, 1);
    for (int i = 0; i < kNumFaults; ++i)
        if (kFaults[i] == signal) sigaction(signal, &former_actions[i], nullptr);
}

enum class Trial { kPassed, kFailed, kFaulted };

Trial try_out(bool (*function)()) {
    struct sigaction action = {};
    action.sa_handler = leave_trial;
    action.sa_flags = SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < kNumFaults; ++i) sigaction(kFaults[i], &action, &former_actions[i]);
    volatile Trial result = Trial::kFaulted;
    if (sigsetjmp(after_fault, 1) == 0) {
        is_trying = true;
        result = function() ? Trial::kPassed : Trial::kFailed;
    }
    is_trying = false;
    for (int i = 0; i < kNumFaults; ++i) sigaction(kFaults[i], &former_actions[i], nullptr);
    return result;
}

// HR_AMX_EMULATED: tiles are emulated, see tiles.h. HR_AMX_ASSUMED: they are tried at once, to test
// what a fault comes to.
#if !defined(HR_AMX_EMULATED) && !defined(HR_AMX_ASSUMED)

bool has_amx_instructions() {
    unsigned a, b, c, d;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    constexpr unsigned kAll = kBf16 | kTile | kInt8;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAll) == kAll;
}

bool does_system_save_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return false;  // no xgetbv
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr unsigned kTileState = 3u << 17;
    return (low & kTileState) == kTileState;
}

// Linux gives tiles to processes that ask, once for all threads.
const char* ask_for_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return nullptr;
    switch (errno) {
        case ENOSPC: return "a thread's signal stack is too small to save tiles on";
        case EPERM: return "the system does not permit tiles";
        default: return "the system's kernel knows no permission for tiles (Linux 5.16 does)";
    }
}

#endif

const char* why_no_tiles() {
#if defined(HR_WITHOUT_AMX)
    return "the compiler of this build did not know it";
#else
#if !defined(HR_AMX_EMULATED) && !defined(HR_AMX_ASSUMED)
    if (!has_amx_instructions()) return "the processor has no AMX with bf16 and int8";
    if (!__builtin_cpu_supports("avx512bf16")) return "the processor has no AVX-512 BF16";
    if (!does_system_save_tiles()) return "the system does not save tiles";
    if (const char* denied = ask_for_tiles()) return denied;
#endif
    switch (try_out(hr_are_tiles_right)) {
        case Trial::kPassed: return nullptr;
        case Trial::kFailed: return "products of tiles are not those of the rules of arithmetic";
        default: return "a product of tiles raised a fault";
    }
#endif
}

Findings find_out() {
    Findings f = {};
    __builtin_cpu_init();
    f.missing[HR_NEON] = f.missing[HR_NEON_DOTPROD] = "the processor is not an Arm one";
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        f.missing[HR_AVX2] = "the processor has no AVX2 with FMA";
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        f.missing[HR_AVX512] = "the processor has no AVX-512 F, BW, DQ and VL";
    else
        f.missing[HR_AVX512] = f.missing[HR_AVX2];
    f.missing[HR_AVX512_VNNI] = f.missing[HR_AVX512];
    if (!f.missing[HR_AVX512_VNNI] && !__builtin_cpu_supports("avx512vnni"))
        f.missing[HR_AVX512_VNNI] = "the processor has no AVX-512 VNNI";
    f.missing[HR_AVX512_BF16] = f.missing[HR_AMX] = f.missing[HR_AVX512_VNNI];
    if (f.missing[HR_AVX512_VNNI]) return f;
    if (!__builtin_cpu_supports("avx512bf16"))
        f.missing[HR_AVX512_BF16] = "the processor has no AVX-512 BF16";
    f.missing[HR_AMX] = why_no_tiles();
    return f;
}

#else

Findings find_out() {
    Findings f = {};
    for (const char*& missing : f.missing) missing = "the processor is not an x86-64 one";
#if defined(__aarch64__)
    const unsigned long has = getauxval(AT_HWCAP);
    f.missing[HR_NEON] = has & HWCAP_ASIMD ? nullptr : "the processor has no NEON";
    f.missing[HR_NEON_DOTPROD] = f.missing[HR_NEON];
    if (!f.missing[HR_NEON_DOTPROD] && !(has & HWCAP_ASIMDDP))
        f.missing[HR_NEON_DOTPROD] = "the processor has no dot products of bytes";
#endif
    return f;
}

#endif

const Findings& findings() {
    static const Findings found = find_out();
    return found;
}

}  // namespace

int32_t usable_isas() {
    int32_t usable = 0;
    for (int32_t isa = 0; isa < HR_NUM_ISAS; ++isa)
        if (why_not(isa) == nullptr) usable |= 1 << isa;
    return usable;
}

const char* why_not(int32_t isa) { return findings().missing[isa]; }

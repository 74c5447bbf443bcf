#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>
#include <system_error>

namespace {

constexpr int kSpins = 2000;       // pauses before others get the processor
constexpr int kIdleSpins = 4000;   // pauses after a call before a thread sleeps: about 0.1 ms

#if defined(__aarch64__)

constexpr unsigned kFlushDenormals = 1u << 24;  // FPCR: of operands and of results

unsigned arithmetic_mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return (unsigned)mode;
}

void set_arithmetic_mode(unsigned mode) {
    asm volatile("msr fpcr, %0" : : "r"((uint64_t)mode) : "memory");
}

// Takes about as long as x86's pause; yield takes no time on most processors.
void spin_once() { asm volatile("isb" : : : "memory"); }

#else

constexpr unsigned kFlushDenormals = 0x8040;  // MXCSR: flush to zero, denormals are zero

unsigned arithmetic_mode() { return _mm_getcsr(); }

void set_arithmetic_mode(unsigned mode) { _mm_setcsr(mode); }

void spin_once() { _mm_pause(); }

#endif

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

void pin(std::thread& thread, int cpu) {
    cpu_set_t* cpus = CPU_ALLOC(cpu + 1);
    if (cpus == nullptr) throw std::bad_alloc();
    const size_t size = CPU_ALLOC_SIZE(cpu + 1);
    CPU_ZERO_S(size, cpus);
    CPU_SET_S(cpu, size, cpus);
    const int error = pthread_setaffinity_np(thread.native_handle(), size, cpus);
    CPU_FREE(cpus);
    if (error != 0) throw std::system_error(error, std::generic_category());
}

}  // namespace

DenormalsAreZero::DenormalsAreZero() : before_(arithmetic_mode()) {
    set_arithmetic_mode(before_ | kFlushDenormals);
}

DenormalsAreZero::~DenormalsAreZero() { set_arithmetic_mode(before_); }

void Barrier::wait() {
    if (num_threads_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
        if (spins < kSpins) {
            spin_once();
        } else {
            sched_yield();
        }
    }
}

ThreadPool::ThreadPool(int num_threads, const int32_t* cpus)
    : num_threads(num_threads), barrier(num_threads) {
    try {
        for (int thread = 1; thread < num_threads; ++thread) {
            threads_.emplace_back([this, thread] { serve(thread); });
            if (cpus != nullptr) pin(threads_.back(), cpus[thread - 1]);
        }
    } catch (...) {
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    function_ = nullptr;
    call_.fetch_add(1, std::memory_order_seq_cst);
    wake_all(call_);
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(Function function, void* argument) {
    const DenormalsAreZero guard;
    if (num_threads > 1) {
        function_ = function;
        argument_ = argument;
        num_running_.store(num_threads - 1, std::memory_order_relaxed);
        call_.fetch_add(1, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst) > 0) wake_all(call_);
    }
    function(argument, 0, num_threads);
    for (int spins = 0; num_running_.load(std::memory_order_acquire) > 0; ++spins) {
        if (spins < kSpins) {
            spin_once();
        } else {
            sched_yield();
        }
    }
}

void ThreadPool::run_alone(Function function, void* argument) {
    const DenormalsAreZero guard;
    function(argument, 0, 1);
}

void ThreadPool::serve(int thread) {
    const DenormalsAreZero guard;
    uint32_t seen = 0;
    while (true) {
        for (int spins = 0; call_.load(std::memory_order_acquire) == seen; ++spins) {
            if (spins < kIdleSpins) {
                spin_once();
                continue;
            }
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            sleep_while(call_, seen);  // returns at once if a call has begun
            num_asleep_.fetch_sub(1, std::memory_order_relaxed);
        }
        ++seen;
        if (function_ == nullptr) return;
        function_(argument_, thread, num_threads);
        num_running_.fetch_sub(1, std::memory_order_release);
    }
}

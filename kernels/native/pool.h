// A pool of threads that run one function together and meet at barriers inside it.
//
// Threads spin while a call runs and for a moment after it, then sleep: an idle pool takes no CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

// While it lives, denormals are zero to this thread: as operands and as results.
class DenormalsAreZero {
  public:
    DenormalsAreZero();
    ~DenormalsAreZero();
    DenormalsAreZero(const DenormalsAreZero&) = delete;

  private:
    const unsigned before_;
};

// All threads of a call meet here. Waiting spins, and lets others run when that takes long.
class Barrier {
  public:
    explicit Barrier(int num_threads) : num_threads_(num_threads) {}
    void wait();

  private:
    const int num_threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

class ThreadPool {
  public:
    using Function = void (*)(void* argument, int thread, int num_threads);

    // `cpus` [num_threads - 1]: where the threads but the caller's stay; null: anywhere. May throw
    // std::system_error.
    ThreadPool(int num_threads, const int32_t* cpus);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;

    // Returns when all threads have run `function`; the caller is thread 0.
    void run(Function function, void* argument);

    // As `run` with one thread: the caller, with denormals flushed as in the others.
    void run_alone(Function function, void* argument);

    const int num_threads;
    Barrier barrier;

  private:
    void serve(int thread);
    void stop();

    Function function_ = nullptr;  // null: end
    void* argument_ = nullptr;
    alignas(64) std::atomic<uint32_t> call_{0};
    alignas(64) std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<int> num_running_{0};
    std::vector<std::thread> threads_;
};

// Threads that share a loop. OpenMP divides a loop into equal parts. Beside another program, its threads then
// wait for one that is not running: either spinning, which keeps that thread from running, or asleep, which
// costs some ten microseconds a loop. Here a thread takes the next part when it has done one, so that a
// thread that is not running delays little, and threads spin between loops only while none is preempted.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <strings.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace eagle_kit_cpp {

#ifdef __cpp_lib_atomic_wait

class Threads {
 public:
  // Call work(begin, end) for parts of 0 .. count - 1, of at least `grain` except the last, by as many
  // threads as torch is set to. `work` must not share a loop itself. OpenMP does it for a second caller at
  // the same time, and if its threads are bound to cores: ours would all be bound to the caller's core.
  template <typename Work>
  static void share(int64_t count, int64_t grain, const Work& work) {
    grain = std::max<int64_t>(1, grain);
    const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), (count + grain - 1) / grain);
    if (count <= 0) return;
    if (threads < 2 || count > MOST) return work(0, count);
    Threads& mine = of_process();
    std::unique_lock<std::mutex> turn(mine.busy_, std::defer_lock);
    if (are_bound() || !turn.try_lock()) return torch::stable::parallel_for(0, count, grain, work);
    const Call call = [](const void* it, int64_t begin, int64_t end) { (*(const Work*)it)(begin, end); };
    mine.run(call, &work, count, grain, threads);
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Call = void (*)(const void*, int64_t, int64_t);
  static constexpr uint64_t PLACES = uint64_t{1} << 32;
  static constexpr uint64_t NONE = PLACES - 1;
  static constexpr int64_t MOST = INT32_MAX;
  // How long a thread spins for the next loop.
  static constexpr std::chrono::microseconds SPIN{200};
  // A gap between two readings of the clock by which a spinning thread was preempted.
  static constexpr std::chrono::microseconds GAP{100};
  // How long a thread does not spin after that.
  static constexpr std::chrono::microseconds REST{50'000};
  // Turns in which the caller spins, then turns in which it yields, before it sleeps.
  static constexpr int SPINS = 64;
  static constexpr int YIELDS = 256;

  struct alignas(64) Worker {
    std::atomic<int> is_asleep{0};
  };

  // The number of the loop, times PLACES, plus the first place that no thread has taken, or NONE after its
  // end. A thread that has read call_, work_, count_ or grain_ of the next loop cannot take a place of this
  // one: its compare_exchange fails.
  alignas(64) std::atomic<uint64_t> ticket_{NONE};
  alignas(64) std::atomic<int> finished_{0};
  alignas(64) std::atomic<int> called_{0};
  alignas(64) std::atomic<Call> call_{nullptr};
  std::atomic<const void*> work_{nullptr};
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> grain_{1};
  std::atomic<int64_t> sharers_{0};
  std::atomic<bool> is_waiting_{false};
  std::atomic<bool> has_failed_{false};
  std::exception_ptr failure_;
  alignas(64) std::mutex busy_;
  std::deque<Worker> workers_;
  bool may_start_ = true;

  // The threads of this process. They do not survive a fork, and are never destroyed.
  static Threads& of_process() {
    static std::atomic<Threads*> all{nullptr};
    static const int registered = pthread_atfork(nullptr, nullptr, [] { all.store(nullptr); });
    (void)registered;
    Threads* existing = all.load(std::memory_order_acquire);
    if (existing) return *existing;
    Threads* created = new Threads;
    if (all.compare_exchange_strong(existing, created)) return *created;
    delete created;
    return *existing;
  }

  static bool are_bound() {
    static const bool bound = [] {
      for (const char* name : {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}) {
        const char* value = std::getenv(name);
        bool is_bound = value && *value;
        for (const char* none : {"false", "none", "disabled"}) is_bound = is_bound && strcasecmp(value, none);
        if (is_bound) return true;
      }
      return false;
    }();
    return bound;
  }

  // Whether threads may spin at all.
  static bool may_spin() {
    static const bool may = [] {
      const char* policy = std::getenv("OMP_WAIT_POLICY");
      return !policy || strcasecmp(policy, "passive");
    }();
    return may;
  }

  void run(Call call, const void* work, int64_t count, int64_t grain, int64_t threads) {
    while ((int64_t)workers_.size() < threads - 1 && may_start_) may_start_ = start();

    // Publish the loop.
    const uint64_t number = ticket_.load(std::memory_order_relaxed) / PLACES + 1;
    finished_.store(0, std::memory_order_relaxed);
    call_.store(call, std::memory_order_release);
    work_.store(work, std::memory_order_release);
    count_.store(count, std::memory_order_release);
    grain_.store(grain, std::memory_order_release);
    sharers_.store(threads, std::memory_order_release);
    ticket_.store(number * PLACES);
    called_.fetch_add(1);

    // Wake the workers that sleep, take part, and wait for the others.
    const int64_t others = std::min<int64_t>(threads - 1, workers_.size());
    for (int64_t i = 0; i < others; ++i)
      if (workers_[i].is_asleep.load()) {
        workers_[i].is_asleep.store(0);
        workers_[i].is_asleep.notify_one();
      }
    take_places();
    wait_for_others(count);
    ticket_.store(number * PLACES + NONE);

    // Raise the first error of any thread.
    if (has_failed_.load(std::memory_order_relaxed)) {
      has_failed_.store(false, std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
  }

  // Wait until all `count` places are done.
  void wait_for_others(int64_t count) {
    for (int turn = may_spin() ? 0 : SPINS; turn < SPINS + YIELDS; ++turn) {
      if (finished_.load(std::memory_order_acquire) == count) return;
      turn < SPINS ? relax() : (void)sched_yield();
    }
    is_waiting_.store(true);
    for (int done; (done = finished_.load()) != count;) finished_.wait(done);
    is_waiting_.store(false);
  }

  // Start a thread. Returns false if the system gives no more; the existing threads then do its part.
  bool start() {
    Worker& worker = workers_.emplace_back();
    // Python's threads handle signals, except those of an error, which go to the thread that made it.
    sigset_t held, before;
    sigfillset(&held);
    for (int error : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&held, error);
    pthread_sigmask(SIG_SETMASK, &held, &before);
    bool is_there = true;
    try {
      std::thread([this, &worker, place = (int64_t)workers_.size()] { serve(worker, place); }).detach();
    } catch (...) {
      workers_.pop_back();
      is_there = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return is_there;
  }

  // Take places of the current loop until none is left: the more are left, the more at a time.
  void take_places() {
    uint64_t ticket = ticket_.load();
    while (true) {
      const int64_t place = ticket % PLACES;
      const int64_t count = count_.load(std::memory_order_acquire);
      if (place >= count) return;
      const int64_t grain = grain_.load(std::memory_order_acquire);
      const int64_t sharers = sharers_.load(std::memory_order_acquire);
      const Call call = call_.load(std::memory_order_acquire);
      const void* work = work_.load(std::memory_order_acquire);
      const int64_t taken = std::min(std::max(grain, (count - place) * 3 / (4 * sharers)), count - place);
      if (!ticket_.compare_exchange_strong(ticket, ticket + taken)) continue;
      try {
        call(work, place, place + taken);
      } catch (...) {
        if (!has_failed_.exchange(true)) failure_ = std::current_exception();
      }
      if (finished_.fetch_add((int)taken) + taken == count && is_waiting_.load()) finished_.notify_one();
      ticket = ticket_.load();
    }
  }

  // Take places of one loop after another, in thread number `place`.
  [[noreturn]] void serve(Worker& worker, int64_t place) {
    auto rested = Clock::time_point{};
    auto since = Clock::now();
    for (int known = 0;;) {
      if (!spin(known, since, rested)) {
        worker.is_asleep.store(1);
        if (called_.load() == known) worker.is_asleep.wait(1);
        worker.is_asleep.store(0);
      }
      known = called_.load();
      if (place < sharers_.load(std::memory_order_acquire)) {
        take_places();
        since = Clock::now();
      }
    }
  }

  // Spin until the next call, for a while `since` the last loop that this thread took part in. Returns false
  // if none came.
  bool spin(int known, Clock::time_point since, Clock::time_point& rested) const {
    const auto stop = since + (may_spin() && since >= rested ? Clock::duration{SPIN} : Clock::duration{0});
    for (auto now = Clock::now(); called_.load(std::memory_order_acquire) == known;) {
      for (int i = 0; i < 8; ++i) relax();
      const auto next = Clock::now();
      if (next - now > GAP) rested = next + REST;
      if (next >= stop || next < rested) return called_.load(std::memory_order_acquire) != known;
      now = next;
    }
    return true;
  }

  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }
};

#else  // a library of C++ from before 2021

struct Threads {
  template <typename Work>
  static void share(int64_t count, int64_t grain, const Work& work) {
    torch::stable::parallel_for(0, count, std::max<int64_t>(1, grain), work);
  }
};

#endif

}  // namespace eagle_kit_cpp

using eagle_kit_cpp::Threads;

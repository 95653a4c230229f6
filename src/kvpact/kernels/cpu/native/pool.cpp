#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "abi.h"

namespace {

// Rounds follow each other closely in a decode step, and waking a thread takes longer than a short
// round: who waits looks for a few microseconds, then for some more in which it gives way to any
// other thread, and sleeps after that.
constexpr int64_t SMALL_WORK = 1 << 16, AWAKE_WORK = 1 << 13; // numbers
constexpr int LOOKS = 400, YIELDS = 200, LAST_LOOKS = 2000;

void rest() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Round {
    const kvp_work work;
    void *const context;
    const int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};

    void take() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            if (!work(context, i)) failed.store(true, std::memory_order_relaxed);
    }
};

// ThreadSanitizer does not see the barriers of an OpenMP library that was built without it.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void *);
extern "C" void __tsan_release(void *);
void before(Round &round) { __tsan_acquire(&round); }
void after(Round &round) { __tsan_release(&round); }
#else
void before(Round &) {}
void after(Round &) {}
#endif

void part_of(Round &round) {
    before(round);
    round.take();
    after(round);
}

// A round on OpenMP's threads. Always all of them: libgomp ends those that a smaller team leaves over.
struct OpenMP {
    std::atomic<void (*)(void (*)(void *), void *, unsigned, unsigned)> gomp{nullptr};
    std::atomic<void (*)(void *, int32_t, void *, ...)> fork{nullptr};
    std::atomic<int32_t (*)(void *)> caller{nullptr};
    std::atomic<void (*)(void *, int32_t, int32_t)> threads{nullptr};

    bool run(int64_t wanted, Round &round) {
        if (const auto parallel = gomp.load()) {
            after(round);
            parallel([](void *data) { part_of(*(Round *)data); }, &round, (unsigned)wanted, 0);
            before(round);
            return true;
        }
        if (!fork) return false;
        static struct {
            int32_t reserved, flags, more, size;
            const char *source;
        } here = {0, 2, 0, 0, ";kvpact;kvp_parallel;0;0;;"};
        threads.load()(&here, caller.load()(&here), (int32_t)wanted);
        void (*part)(int32_t *, int32_t *, void *) = [](int32_t *, int32_t *, void *data) { part_of(*(Round *)data); };
        fork.load()(&here, 1, (void *)part, &round);
        return true;
    }
} openmp;

struct Pool {
    std::mutex owner; // held by the call that uses the threads, OpenMP's among them
    std::mutex lock;
    std::condition_variable wake, done;
    std::vector<std::thread> threads;
    std::atomic<uint64_t> number{0};
    std::atomic<int64_t> running{0}; // threads that are in the round
    Round *round = nullptr; // which threads may still join
    int64_t wanted = 0;

    void serve(int64_t index) {
        uint64_t seen = 0;
        for (;;) {
            for (int i = 0; i < LOOKS + YIELDS && number.load(std::memory_order_relaxed) == seen; i++) {
                if (i < LOOKS) rest();
                else std::this_thread::yield();
            }
            std::unique_lock<std::mutex> guard(lock);
            wake.wait(guard, [&] { return number != seen; });
            seen = number;
            // A thread that wakes late is not waited for.
            if (index >= wanted || !round) continue;
            Round &mine = *round;
            running++;
            guard.unlock();
            mine.take();
            guard.lock();
            if (--running == 0) done.notify_one();
        }
    }

    void run(int64_t others, Round &all) {
        {
            std::lock_guard<std::mutex> guard(lock);
            while ((int64_t)threads.size() < others) {
                const int64_t index = (int64_t)threads.size();
                try {
                    threads.emplace_back([this, index] { serve(index); });
                } catch (...) {
                    others = index; // the system gives no more threads
                }
            }
            wanted = others;
            round = &all;
            number++;
        }
        wake.notify_all();
        all.take();
        std::unique_lock<std::mutex> guard(lock);
        round = nullptr;
        if (running == 0) return;
        guard.unlock();
        for (int i = 0; i < LAST_LOOKS && running.load(std::memory_order_relaxed) != 0; i++) rest();
        guard.lock();
        done.wait(guard, [&] { return running == 0; });
    }
};

// Never destroyed: its threads sleep until the process ends. A child of fork has none of them, nor of
// OpenMP's, so it begins with a new pool and goes on without OpenMP.
std::atomic<Pool *> pool{nullptr};

void watch_forks() {
#if !defined(_WIN32)
    static std::once_flag once;
    std::call_once(once, [] {
        pthread_atfork(nullptr, nullptr, [] {
            pool.store(nullptr);
            openmp.gomp = nullptr;
            openmp.fork = nullptr;
        });
    });
#endif
}

Pool *current() {
    watch_forks();
    Pool *p = pool.load();
    if (p) return p;
    Pool *made = new Pool;
    if (pool.compare_exchange_strong(p, made)) return made;
    delete made;
    return p;
}
} // namespace

int kvp_openmp(void *gomp, void *fork, void *caller, void *threads) {
    watch_forks();
    openmp.caller = (int32_t(*)(void *))caller;
    openmp.threads = (void (*)(void *, int32_t, int32_t))threads;
    openmp.fork = (void (*)(void *, int32_t, void *, ...))fork;
    openmp.gomp = (void (*)(void (*)(void *), void *, unsigned, unsigned))gomp;
    return gomp || fork;
}

bool kvp_parallel(int64_t threads, int64_t count, kvp_work work, void *context) {
    Round round{work, context, count};
    if (threads > 1 && count > 1) {
        Pool *p = current();
        if (p->owner.try_lock()) {
            if (!openmp.run(threads, round)) p->run((threads < count ? threads : count) - 1, round);
            p->owner.unlock();
            return !round.failed;
        }
    }
    round.take();
    return !round.failed;
}

int64_t kvp_threads(int64_t threads, int64_t numbers) {
    const bool awake = openmp.gomp.load() || openmp.fork.load();
    return numbers < (awake ? AWAKE_WORK : SMALL_WORK) ? 1 : threads;
}

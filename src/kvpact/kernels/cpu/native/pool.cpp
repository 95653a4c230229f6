#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace {

// Rounds follow each other closely in a decode step, and waking a thread takes longer than a short
// round: who waits looks for a few microseconds, then for some more in which it gives way to any
// other thread, and sleeps after that.
constexpr int LOOKS = 400, YIELDS = 200, LAST_LOOKS = 2000;

void rest() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Pool {
    std::mutex owner; // held by the call that uses the threads
    std::mutex lock;
    std::condition_variable wake, done;
    std::vector<std::thread> threads;
    std::atomic<uint64_t> round{0};
    std::atomic<int64_t> running{0}; // threads that are in the round
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    bool open = false; // threads may still join the round
    int64_t wanted = 0, count = 0;
    kvp_work work = nullptr;
    void *context = nullptr;

    void take() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            if (!work(context, i)) failed.store(true, std::memory_order_relaxed);
    }

    void serve(int64_t index) {
        uint64_t seen = 0;
        for (;;) {
            for (int i = 0; i < LOOKS + YIELDS && round.load(std::memory_order_relaxed) == seen; i++) {
                if (i < LOOKS) rest();
                else std::this_thread::yield();
            }
            std::unique_lock<std::mutex> guard(lock);
            wake.wait(guard, [&] { return round != seen; });
            seen = round;
            // A thread that wakes late is not waited for.
            if (index >= wanted || !open) continue;
            running++;
            guard.unlock();
            take();
            guard.lock();
            if (--running == 0) done.notify_one();
        }
    }

    bool run(int64_t others, int64_t n, kvp_work f, void *c) {
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
            count = n;
            work = f;
            context = c;
            next.store(0, std::memory_order_relaxed);
            failed.store(false, std::memory_order_relaxed);
            open = true;
            round++;
        }
        wake.notify_all();
        take();
        std::unique_lock<std::mutex> guard(lock);
        open = false;
        if (running == 0) return !failed;
        guard.unlock();
        for (int i = 0; i < LAST_LOOKS && running.load(std::memory_order_relaxed) != 0; i++) rest();
        guard.lock();
        done.wait(guard, [&] { return running == 0; });
        return !failed;
    }
};

// Never destroyed: its threads sleep until the process ends. A child of fork has none of them, so
// it begins with a new pool.
std::atomic<Pool *> pool{nullptr};

Pool *current() {
    Pool *p = pool.load();
    if (p) return p;
    Pool *made = new Pool;
    if (pool.compare_exchange_strong(p, made)) {
#if !defined(_WIN32)
        static std::once_flag once;
        std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); }); });
#endif
        return made;
    }
    delete made;
    return p;
}
} // namespace

bool kvp_parallel(int64_t threads, int64_t count, kvp_work work, void *context) {
    if (threads > count) threads = count;
    if (threads > 1) {
        Pool *p = current();
        if (p->owner.try_lock()) {
            const bool done = p->run(threads - 1, count, work, context);
            p->owner.unlock();
            return done;
        }
    }
    bool done = true;
    for (int64_t i = 0; i < count; i++) done = work(context, i) && done;
    return done;
}

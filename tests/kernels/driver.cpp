// Runs recorded calls of the native library without Python: under an emulator, valgrind, sanitizers.
//
//     driver FILE [--level none|neon|avx2|avx512|avx512vbmi] [--case I] [--run compare|once|steps] [--openmp LIB]
//
// FILE is written by record.py; recorder.py documents the layout. Every case is run at every level that
// was compiled in and that the processor has (or at the one named). `compare`: results are compared,
// and a JSON line is printed per level. `once`: nothing is compared, for profilers. `steps`: a line
// per case with its instructions, counted by stepping through them. `--openmp libgomp.so.1`: calls run on that
// library's threads, as beside torch; else on kvpact's own.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#include <malloc.h>
#elif defined(__linux__)
#include <dlfcn.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <string>
#include <vector>

#include "abi.h"

namespace {

enum Check { INPUT = 0, EQUAL = 1, NEAR = 2 };
constexpr size_t GUARD = 64;
constexpr unsigned char FILL = 0x55;

struct Name {
    const char *name;
    int bit;
};
constexpr Name LEVELS[] = {{"none", 1}, {"neon", 8}, {"avx2", 2}, {"avx512", 4}, {"avx512vbmi", 16}};

[[noreturn]] void fail(const std::string &why) {
    fprintf(stderr, "driver: %s\n", why.c_str());
    exit(2);
}

#if defined(_WIN32)
char *aligned(size_t bytes) { return (char *)_aligned_malloc(bytes, 64); }
void release(char *memory) { _aligned_free(memory); }
#else
char *aligned(size_t bytes) {
    void *made = nullptr;
    return posix_memalign(&made, 64, bytes) ? nullptr : (char *)made;
}
void release(char *memory) { free(memory); }
#endif

struct Reader {
    FILE *file;
    explicit Reader(const char *path) : file(fopen(path, "rb")) {
        if (!file) fail(std::string("can't open ") + path);
    }
    ~Reader() { fclose(file); }
    void bytes(void *to, size_t count) {
        if (count && fread(to, 1, count, file) != count) fail("the file is cut");
    }
    template <class T> T one() {
        T x;
        bytes(&x, sizeof x);
        return x;
    }
    uint64_t number() { return one<uint64_t>(); }
    std::string text(size_t count) {
        std::vector<char> x(count + 1);
        bytes(x.data(), count);
        return x.data();
    }
};

// Memory of its own for each block, at the alignment that was recorded; results between guards.
struct Block {
    uint64_t check;
    std::vector<char> contents, expected;
    size_t before, after;
    char *memory = nullptr, *data = nullptr;
    explicit Block(Reader &in) {
        const size_t size = in.number(), shift = in.number();
        check = in.number();
        contents.resize(size);
        in.bytes(contents.data(), size);
        if (check != INPUT) {
            expected.resize(size);
            in.bytes(expected.data(), size);
        }
        before = shift + (check != INPUT ? GUARD : 0);
        after = check != INPUT ? GUARD : 0;
        memory = aligned(before + size + after + (size == 0));
        if (!memory) fail("no memory");
        data = memory + before;
    }
    Block(Block &&other)
        : check(other.check), contents(std::move(other.contents)), expected(std::move(other.expected)),
          before(other.before), after(other.after), memory(other.memory), data(other.data) {
        other.memory = nullptr;
    }
    ~Block() { release(memory); }
    void fill() {
        memset(memory, FILL, before + contents.size() + after);
        if (!contents.empty()) memcpy(data, contents.data(), contents.size());
    }
    bool guarded() const {
        for (size_t i = 0; i < before; i++)
            if ((unsigned char)memory[i] != FILL) return false;
        for (size_t i = 0; i < after; i++)
            if ((unsigned char)data[contents.size() + i] != FILL) return false;
        return true;
    }
    // The norm of the difference over that of the expected numbers; or, of bytes, 0 or infinity.
    double error() const {
        const size_t size = contents.size();
        if (check == EQUAL) return memcmp(data, expected.data(), size) ? INFINITY : 0;
        double difference = 0, norm = 0;
        for (size_t i = 0; i + 4 <= size; i += 4) {
            float a, b;
            memcpy(&a, expected.data() + i, 4);
            memcpy(&b, data + i, 4);
            difference += ((double)a - b) * ((double)a - b);
            norm += (double)a * a;
        }
        const double found = sqrt(difference) / fmax(sqrt(norm), 1e-30);
        return found == found ? found : INFINITY;
    }
};

struct Relocation {
    uint64_t block, offset, target, inside;
};

struct Case {
    std::string operation, label;
    double bound;
    std::vector<Block> blocks;
    std::vector<Relocation> relocations;
    explicit Case(Reader &in) : operation(in.text(16)), label(in.text(112)), bound(in.one<double>()) {
        for (uint64_t n = in.number(); n; n--) blocks.emplace_back(in);
        for (uint64_t n = in.number(); n; n--) {
            const Relocation r = in.one<Relocation>();
            if (r.block >= blocks.size() || r.target >= blocks.size() ||
                r.offset + sizeof(char *) > blocks[r.block].contents.size())
                fail("a pointer lies outside of its block");
            relocations.push_back(r);
        }
    }
    void fill() {
        for (Block &block : blocks) block.fill();
        for (const Relocation &r : relocations) {
            const char *pointer = blocks[r.target].data + r.inside;
            memcpy(blocks[r.block].data + r.offset, &pointer, sizeof pointer);
        }
    }
    void run(int level) const {
        const void *args = blocks[0].data;
        int status = -1;
        if (operation == "attend") status = kvp_attend(level, (const kvp_attend_args *)args, 1);
        if (operation == "attend_rows") status = kvp_attend_rows(level, (const kvp_attend_args *)args, 0);
        if (operation == "encode") status = kvp_encode(level, (const kvp_encode_args *)args, 1);
        if (operation == "step")
            status = kvp_step(level, (const kvp_step_args *)args, blocks[0].contents.size() / sizeof(kvp_step_args));
        if (operation == "prompt") status = kvp_prompt(level, (const kvp_prompt_args *)args);
        if (operation == "decode") status = kvp_decode(level, (const kvp_decode_args *)args);
        if (operation == "scan") status = kvp_scan(level, (const kvp_scan_args *)args);
        if (operation == "gather") status = kvp_gather((const kvp_gather_args *)args);
        if (status) fail(operation + " of " + label + " returned " + std::to_string(status));
    }
    // The largest error; infinity where a guard was overwritten.
    double check() const {
        double worst = 0;
        for (const Block &block : blocks)
            if (block.check != INPUT) worst = fmax(worst, block.guarded() ? block.error() : INFINITY);
        return worst;
    }
};

// Returns how many cases failed.
int compare(std::vector<Case> &cases, const Name &level) {
    double worst = 0;
    std::string failed;
    int failures = 0;
    for (Case &one : cases) {
        one.fill();
        one.run(level.bit);
        const double found = one.check();
        if (one.bound <= 1e-5 && found < INFINITY) worst = fmax(worst, found);
        if (found <= one.bound) continue;
        failures++;
        char error[32];
        snprintf(error, sizeof error, " (%.2g)", found);
        failed += (failed.empty() ? "\"" : ", \"") + one.operation + " " + one.label + error + "\"";
    }
    printf("{\"level\": \"%s\", \"cases\": %zu, \"worst\": %.3g, \"failed\": [%s]}\n", level.name, cases.size(), worst,
           failed.c_str());
    fflush(stdout);
    return failures;
}

// Instructions of one call in a process of its own, and of little else: the call stands between two
// signals. For instruction sets that profilers don't know.
#if defined(__linux__)
long steps(Case &one, const Name &level) {
    one.fill();
    const pid_t child = fork();
    if (child < 0) fail("can't fork");
    if (!child) {
        if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr)) _exit(1);
        raise(SIGSTOP);
        one.run(level.bit);
        raise(SIGSTOP);
        _exit(0);
    }
    long count = 0;
    int status = 0;
    for (int stops = 0;; count++) {
        if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) fail("the call did not end");
        if (WSTOPSIG(status) == SIGSTOP && stops++) break;
        if (WSTOPSIG(status) != SIGSTOP && WSTOPSIG(status) != SIGTRAP) fail("the call was stopped by a signal");
        if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr)) fail("the process can't be stepped through");
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return count;
}
#else
long steps(Case &, const Name &) { fail("instructions are counted on Linux"); }
#endif

} // namespace

int main(int count, char **words) {
    if (count < 2 || count % 2) fail("usage: driver FILE [--level NAME] [--case I] [--run compare|once|steps]");
    std::string named, how = "compare";
    long chosen = -1;
    for (int i = 2; i < count; i += 2) {
        const std::string option = words[i];
        if (option == "--level") named = words[i + 1];
        else if (option == "--case") chosen = atol(words[i + 1]);
        else if (option == "--run") how = words[i + 1];
#if defined(__linux__)
        else if (option == "--openmp") {
            void *const library = dlopen(words[i + 1], RTLD_NOW);
            void *const parallel = library ? dlsym(library, "GOMP_parallel") : nullptr;
            if (!parallel || !kvp_openmp(parallel, nullptr, nullptr, nullptr)) fail("no GOMP_parallel in " + std::string(words[i + 1]));
        }
#endif
        else fail("no option " + option);
    }
    if (how != "compare" && how != "once" && how != "steps") fail("--run " + how + " is not known");
    Reader in(words[1]);
    if (in.text(8) != "KVPCASE1") fail("not a file of cases");
    std::vector<Case> cases;
    for (uint64_t i = 0, n = in.number(); i < n; i++) {
        Case one(in);
        if (chosen < 0 || (uint64_t)chosen == i) cases.push_back(std::move(one));
    }
    if (cases.empty()) fail("no such case");
    int failures = 0, levels = 0;
    for (const Name &level : LEVELS) {
        if (!(kvp_levels() & level.bit) || (!named.empty() && named != level.name)) continue;
        levels++;
        if (how == "compare") failures += compare(cases, level);
        for (Case &one : cases) {
            if (how == "once") {
                one.fill();
                one.run(level.bit);
            } else if (how == "steps") {
                printf("%ld\n", steps(one, level));
                fflush(stdout);
            }
        }
    }
    if (!levels) fail("level " + named + " is not there");
    return failures ? 1 : 0;
}

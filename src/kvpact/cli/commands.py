"""The table of commands: module, summary, and the examples that ``--help`` shows.

A command's own module is imported when the command is used, so ``kvpact --help`` and the shell's
completion need not wait for torch.
"""

from typing import NamedTuple


class CommandInfo(NamedTuple):
    """One command, or a group of them: a group has no target and no examples."""

    summary: str  # the first line of the function's docstring
    target: str = ""  # ``module:function`` below ``kvpact.cli``
    examples: tuple[str, ...] = ()  # whole command lines


COMMANDS = {
    "size": CommandInfo(
        "Print the bytes that caches of a model take; no weights are loaded.",
        "size:size",
        (
            "kvpact size qwen3-8b",
            "kvpact size path/to/model turboquant:bits=4 --tokens 64k --batch 8",
            "kvpact size none q8_0 --layers 32 --kv-heads 8 --head-dim 128",
            "kvpact size qwen3-8b --budget 2GB",
        ),
    ),
    "recommend": CommandInfo(
        "Recommend a spec, or a recipe by layer: gradients predict KL, one evaluation verifies.",
        "recommend:recommend_command",
        ("kvpact recommend smollm2 --budget 30% --context 32768 --out smollm2-recipe",),
    ),
    "recipes": CommandInfo(
        "List the recipes that kvpact ships, or print one.",
        "recipes:recipes",
        ("kvpact recipes", "kvpact recipes smollm2-3bit"),
    ),
    "eval": CommandInfo(
        "Measure perplexity, KL and top-1 agreement against the exact cache.",
        "eval:evaluate_command",
        (
            "kvpact eval trellis:bits=4 int:bits=8 --model smollm2",
            "kvpact eval kivi:bits=2 --text notes.txt --out results",
            "kvpact eval --budget 24MB,12MB --tokens 6144",
        ),
    ),
    "generate": CommandInfo(
        "Generate text on a compressed cache; prints memory and speed.",
        "generate:generate",
        ('kvpact generate "And the moral is" --file @book --prompt-tokens 2000',),
    ),
    "chat": CommandInfo(
        "Chat with a model on one compressed cache; prints its bytes after each answer.",
        "chat:chat",
        ("kvpact chat smollm2", "kvpact chat path/to/model --spec trellis:bits=3"),
    ),
    "demo": CommandInfo(
        "Let a model recite a book out of the exact cache and two compressed ones, side by side.",
        "demo:demo",
        ("kvpact demo --tokens 4000",),
    ),
    "methods": CommandInfo(
        "List the methods, or explain one.",
        "methods:methods",
        ("kvpact methods", "kvpact methods turboquant:bits=3"),
    ),
    "doctor": CommandInfo(
        "Print versions, processor, backends and optional packages; always exits with 0.",
        "doctor:doctor",
        ("kvpact doctor --json",),
    ),
    "llama-cpp": CommandInfo(
        "Print the line that loads kvpact into llama.cpp's programs.",
        "llama_cpp:line",
        ("kvpact llama-cpp", "kvpact llama-cpp check path/to/build"),
    ),
    "llama-cpp check": CommandInfo(
        "Load kvpact into a llama.cpp: what loads it, whether it is right, what it saves.",
        "llama_cpp:check",
        (
            "kvpact llama-cpp check llama.cpp/build --model model.gguf",
            "kvpact llama-cpp check xllamacpp",
        ),
    ),
    "calibrate": CommandInfo(
        "Calibrate methods to a model, for prefixes, pages, engines and pca.",
        "calibrate:calibrate_command",
        ("kvpact calibrate smollm2 --text notes.txt --out smollm2.calibration",),
    ),
    "snapshot": CommandInfo("Save caches as files; show, verify and restore them."),
    "snapshot save": CommandInfo(
        "Run a text through a model and save the cache.",
        "snapshot:save",
        ("kvpact snapshot save --file notes.txt --out notes.kv --spec trellis:bits=4",),
    ),
    "snapshot show": CommandInfo(
        "Print what a snapshot holds; only its header is read.",
        "snapshot:show",
        ("kvpact snapshot show notes.kv",),
    ),
    "snapshot verify": CommandInfo(
        "Verify every checksum; exit with code 2 at the first damaged file.",
        "snapshot:verify",
        ("kvpact snapshot verify notes.kv more.kv",),
    ),
    "snapshot restore": CommandInfo(
        "Continue a snapshot by greedy decoding, with the model that it was made with.",
        "snapshot:restore",
        ('kvpact snapshot restore notes.kv "In short:" --max-new-tokens 64',),
    ),
    "store": CommandInfo("List, measure and clean stores of cache entries."),
    "store ls": CommandInfo(
        "Print every key, one per line.", "store:list_keys", ("kvpact store ls kv",)
    ),
    "store stats": CommandInfo(
        "Print the number of entries and their bytes.",
        "store:stats",
        ("kvpact store stats redis://localhost:6379",),
    ),
    "store gc": CommandInfo(
        "Remove expired and surplus entries, leftovers and, with --verify, damaged entries.",
        "store:gc",
        ("kvpact store gc kv --verify --max-bytes 1000000000",),
    ),
}
"""By the words that call them; a group stands before its commands."""

_UNCHANGED = "models stay as they are, their caches are packed: kvpact chat MODEL --spec SPEC"
_COMPARED = "kvpact eval SPEC SPEC compares quality and bytes, with --out FOLDER as a plot, too"
_MACHINE = "kvpact doctor shows this machine and all versions, kvpact methods a method"
_LISTED = "kvpact size --list lists models, kvpact methods methods"
_FETCHED = "kvpact chat owner/name fetches a model of the hub; smollm2 comes with pip"
_FIRST = "a command stands first, as in kvpact chat MODEL or kvpact size MODEL SPEC"
ELSEWHERE = {
    **dict.fromkeys(("compress", "convert", "quantize"), _UNCHANGED),
    **dict.fromkeys(("bench", "benchmark", "compare", "leaderboard", "plot"), _COMPARED),
    **dict.fromkeys(("config", "env", "info", "install", "test", "version"), _MACHINE),
    **dict.fromkeys(("list", "ls", "models", "specs"), _LISTED),
    **dict.fromkeys(("download", "login", "pull"), _FETCHED),
    **dict.fromkeys(("cache", "scan-cache"), "kvpact store ls lists a store, kvpact doctor models"),
    **dict.fromkeys(("gemma3", "smollm2"), _FIRST),
    "calibrations": "files in the folder of KVPACT_CACHE, by kvpact calibrate; delete them there",
    "prefix": "kvpact snapshot save saves a text's cache, kvpact generate --prefix-store prefixes",
    "help": "kvpact size --help shows the help of size, and so of every command",
    "run": "kvpact chat MODEL talks to a model, kvpact generate PROMPT continues a text",
    "serve": "vLLM, SGLang, LMCache (docs/serving.md), llama.cpp (kvpact llama-cpp) serve with it",
}
"""Words that are looked for as commands, and which commands do that."""

_MEANT = {
    "MODEL --model": "--model -m --model-path --model-args --pretrained",
    "SPECS SPEC --spec": "--spec --specs --kv-cache-dtype --cache-dtype --cache-type-k -ctk "
    "--method --bits",
    "PROMPT TEXT": "--prompt -p --text",
    "--text --file": "--dataset --data --corpus --file --text -f",
    "--tokens --context": "--context --ctx-size -c --max-model-len --seq-len --max-cache-len",
    "--batch": "--batch-size -b --max-num-seqs --parallel",
    "--task-samples": "--limit --num-samples",
    "--budget": "--memory --max-memory --size",
    "--max-new-tokens --new-tokens": "--max-tokens --n-predict --num-tokens -n",
    "--out": "--output --output-dir --output-path --outfile",
    "--threads": "--n-threads --num-threads -t",
    "--prefix-store": "--enable-prefix-caching --prompt-cache --store",
}
MEANT = {
    name: " ".join(here for here, other in _MEANT.items() if name in other.split()).split()
    for names in _MEANT.values()
    for name in names.split()
}
"""Options of other tools and commands -> arguments and options that may be meant."""
NEEDLESS = {
    **dict.fromkeys(("-c", "--ctx-size", "--max-model-len"), "the cache grows as needed"),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--device"), "commands run on the CPU"),
    **dict.fromkeys(("-sys", "--system", "--system-prompt"), "begin your first line with it"),
    **dict.fromkeys(("-b", "--batch-size", "--num-fewshot"), "texts run one by one"),
}
"""Options of other tools that have no place here, and why."""

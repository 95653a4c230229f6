"""Who stands in the leaderboard: kvpact's own methods, other packages, and entry points' ones."""

import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import resolve_name as there

from kvpact.errors import RegistrationError
from kvpact.evaluate import Contender
from kvpact.evaluate.contender import LEADERBOARD_GROUP

INSTALLED = Path(__file__).parents[1] / "build" / "peers"

# What can't stand in the table, and why.
LEFT_OUT = {
    "tri-tier": "no cache of transformers: it takes the place of Llama's attention, of batch 1",
    "spectralquant": "compresses a prompt once, after it was computed, and holds dense K and V",
    "aither-kvcache": "a codec and a plug-in of vLLM; it has no cache of transformers",
    "turboquantcpu": "keeps a compressed copy that no attention reads",
    "turboquant-vllm": "needs vLLM on a GPU, and Python 3.12",
    "kvpress": "drops tokens; what it keeps is exact, or QuantizedCache's, which is in the table",
}


SPECS = ("int:bits=8", "trellis:bits=4", "turboquant:bits=4")
SPECS += ("kvarn:bits=3", "trellis:bits=3", "trellis:bits=2")
CHANGED = (
    "QuantizedCache refuses models with sliding windows: on Gemma 3 its layers stand in those with "
    "full attention, and the others keep transformers' own, which are exact"
)
DENSE = "Dense K and V are held: nothing is saved. "
CODED = "New tokens are coded before they are attended."
ALL_ANEW = "All tokens are quantised anew whenever 128 exact ones have come together."
NO_WINDOWS = (
    " On Gemma 3 layers with sliding windows keep all tokens, coded, and not exact ones of the "
    "window."
)


def quantized(backend, kind, model, **options):
    """Return transformers' QuantizedCache; beside sliding windows, its layers and exact ones.

    `kind` is the name of the class of a layer that `backend` stands for.
    """
    from transformers import Cache, DynamicCache, QuantizedCache, cache_utils

    exact = DynamicCache(config=model.config)
    if not any(exact.is_sliding):
        return QuantizedCache(backend, model.config, **options)
    make = getattr(cache_utils, kind)
    pairs = zip(exact.layers, exact.is_sliding, strict=True)
    return Cache(layers=[layer if sliding else make(**options) for layer, sliding in pairs])


def kakeya(model):
    """Return an empty cache."""
    config = model.config.get_text_config(decoder=True)
    sizes = {"num_hidden_layers": config.num_hidden_layers, "head_dim": config.head_dim}
    make = there("kakeyalattice.hf.cache:KakeyaLatticeCache")
    return make(q_range=38, device="cpu", **sizes)


def tqai(model):
    """Return an empty cache that tells transformers how many tokens it holds."""

    class Counting(there("tqai.cache.hf:TurboQuantDynamicCache")):
        def get_mask_sizes(self, query_length, layer_idx):
            return self.get_seq_length(layer_idx) + query_length, 0

    config = there("tqai.config:TurboQuantConfig")
    return Counting(config(bits_k=4, bits_v=2, backend="torch", device="cpu"))


def turboquant(model):
    """Return an empty cache."""
    import numpy

    # turboquant 0.2.0 calls what NumPy 2.4 took out under this name.
    if not hasattr(numpy, "trapz"):
        numpy.trapz = numpy.trapezoid
    return there("turboquant.cache:TurboQuantCache")(bits=4)


def turboquant_torch(model):
    """Return an empty cache that passes each layer's new tokens through the package's codec."""
    from transformers import DynamicCache

    head_dim = model.config.get_text_config(decoder=True).head_dim
    codec = there("turboquant.kv_cache:TurboQuantKVCache")(head_dim=head_dim, bit_width=4)

    class RoundTrip(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            packed = codec.compress(key_states.float(), value_states.float())
            k = codec.decompress_keys(packed).to(key_states.dtype)
            v = codec.decompress_values(packed).to(value_states.dtype)
            return super().update(k, v, layer_idx, *args, **kwargs)

    return RoundTrip()


def ggml(kind, model):
    """Return an empty cache whose layers with full attention hold blocks of one of ggml's types."""
    import torch
    from transformers import Cache, DynamicCache
    from transformers.cache_utils import DynamicLayer

    quants, block = there("gguf.quants"), there(f"gguf:GGMLQuantizationType.{kind}")

    class Blocks(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            packed = [
                torch.from_numpy(quants.quantize(x.numpy(), block))
                for x in (key_states.contiguous(), value_states.contiguous())
            ]
            held = super().update(*packed)
            return tuple(torch.from_numpy(quants.dequantize(x.numpy(), block)) for x in held)

    exact = DynamicCache(config=model.config)
    pairs = zip(exact.layers, exact.is_sliding, strict=True)
    return Cache(layers=[layer if sliding else Blocks() for layer, sliding in pairs])


def called(path, attribute="", **options):
    """Return what makes an empty cache by a call of a package, given the model or its attribute."""

    def make(model):
        given = {"": (), "model": (model,), "config": (model.config,)}[attribute]
        return there(path)(*given, **options)

    return make


def peer(package, requires="", changed="", note="", **caches):
    """Return a contender; the keywords are its caches."""
    named = {"requires": tuple(requires.split()), "changed": changed, "note": note}
    return Contender(package=package, caches=caches, **named)


PEERS = {
    "fp8": peer(
        "transformers", changed=CHANGED,
        **{"QuantizedCache, fp8": partial(quantized, "fp8", "Fp8QuantizedLayer")},
    ),
    "ggml": peer(
        "gguf", "gguf==0.19.0",
        "its quantize and dequantize, in a cache of transformers",
        f"The blocks of llama.cpp's `-ctk`, `-ctv`, by `gguf`; numpy's times. {CODED} llama.cpp "
        "itself was not run: it rounds queries, too, and codes layers with sliding windows, which "
        "stay exact here. No token is held exactly.",
        **{f"{kind.lower()}, as llama.cpp's": partial(ggml, kind) for kind in ("Q8_0", "Q4_0")},
    ),
    "hqq": peer(
        "hqq", "hqq==0.2.8 termcolor==3.1.0 einops==0.8.1", CHANGED,
        f"Groups along axis 1, as transformers recommends for hqq. {ALL_ANEW}",
        **{"QuantizedCache, hqq, 4 bits": partial(
            quantized, "hqq", "HQQQuantizedLayer", nbits=4, axis_key=1, axis_value=1)},
    ),
    "kakeya": peer(
        "kakeyalattice", "kakeyalattice==1.5.0", note=DENSE + CODED + NO_WINDOWS,
        **{"KakeyaLatticeCache, E8, range 38": kakeya},
    ),
    "nexus": peer(
        "nexusquant-kv", "nexusquant-kv==0.6.3 zstandard==0.25.0",
        note=f"{DENSE}Prompts are coded before they are attended, single tokens are never coded.",
        **{"E8QuantizedCache, K 3, V 2 bits": called(
            "nexusquant.integrations.quantized_cache:E8QuantizedCache.from_model", "model",
            key_bits=3, value_bits=2)},
    ),
    "own": peer(
        "kvpact", note="Layers with a sliding window stay exact, and count.",
        **{spec: called("kvpact.integrations.transformers:CompressedCache", "model", spec=spec)
           for spec in SPECS},
    ),
    "quantcore": peer(
        "quantcore-ai", "quantcore-ai==0.4.2",
        note=f"{CODED} V is coded, too, not so by default.",
        **{"make_turboquant_cache, 4 bits": called(
            "turboquant.hf_integration:make_turboquant_cache", "config",
            bits=4, compress_values=True, verbose=False)},
    ),
    "quanto": peer(
        "optimum-quanto", "optimum-quanto==0.2.7 ninja==1.13.2", CHANGED, ALL_ANEW,
        **{"QuantizedCache, quanto, 4 bits": partial(
            quantized, "quanto", "QuantoQuantizedLayer", nbits=4)},
    ),
    "tiny": peer(
        "tiny-turboquant", "tiny-turboquant==0.18.0",
        note=f"128 to 255 tokens are exact, most of what short contexts hold.{NO_WINDOWS}",
        **{"TinyKVCache, safe (4 bits)": called(
            "tiny_turboquant.cache:TinyKVCache.for_model", "model", compression="safe")},
    ),
    "tqai_cache": peer(
        "tqai", "tqai==0.6.1",
        "get_mask_sizes, by which transformers 5 makes masks, is written for it: as it comes, "
        "chunks see no earlier token",
        DENSE + CODED, **{"TurboQuantDynamicCache, K 4, V 2 bits": tqai},
    ),
    "turbokv": peer(
        "turbokv", "turbokv==0.1.0",
        note="Layer 0 is exact, and all tokens of the others are quantised anew whenever 128 exact "
        f"ones have come together.{NO_WINDOWS}",
        **{"TurboQuantCache, 4 bits": called(
            "turboquant:TurboQuantCache", "config", nbits=4, device="cpu")},
    ),
    "turboquant_cache": peer(
        "turboquant", "turboquant==0.2.0",
        "numpy.trapz, which NumPy 2.4 no longer has, is put in its place",
        "Decompressed K and V are held beside the codes, so it holds more than no compression.",
        **{"TurboQuantCache, 4 bits": turboquant},
    ),
    "turboquant_torch": peer(
        "turboquant-torch", "turboquant-torch==0.4.0",
        "its own cache codes all tokens anew at each compress_all(), called by hand: here its "
        "codec takes each token once, when it comes",
        DENSE + CODED, **{"TurboQuantKVCache, 4 bits": turboquant_torch},
    ),
    "turboquantdc": peer(
        "turboquantdc", "turboquantdc==0.2.0",
        **{"TurboQuantCache, 4 bits": called(
            "turboquantdc.hf_integration:TurboQuantCache", bits=4)},
    ),
    "vllm_fp8": peer(
        "kvpact",
        note="kvpact's codec with the arithmetic of vLLM's `--kv-cache-dtype fp8` without scales: "
        "e4m3, no exact tokens, new ones coded before they are attended. vLLM itself was not run.",
        **{"fp8:scale=none, as vLLM's fp8": called(
            "kvpact.integrations.transformers:CompressedCache", "model",
            spec="fp8:scale=none,sinks=0,window=0", exact_new=False)},
    ),
}  # fmt: skip


def points() -> dict[str, EntryPoint | Contender]:
    """Return all contenders by name; nothing of other packages is imported."""
    found: dict[str, EntryPoint | Contender] = dict(PEERS)
    for point in entry_points(group=LEADERBOARD_GROUP):
        if point.name in found:
            raise RegistrationError(
                f"contender {point.name!r} of {point.value} is there already; choose another name"
            )
        found[point.name] = point
    return found


def contender(name: str) -> Contender:
    """Return a contender by name.

    Raises `RegistrationError` where nothing has that name, or what has it is no `Contender`.
    """
    known = points()
    if name not in known:
        raise RegistrationError(f"no contender {name!r}; there are {', '.join(known)}")
    point = known[name]
    found = point.load() if isinstance(point, EntryPoint) else point
    if not isinstance(found, Contender):
        raise RegistrationError(f"{point.value} is no kvpact.evaluate.Contender: {found!r}")
    return found


def installed(name: str, requires: tuple[str, ...]) -> Path | None:
    """Install what a contender requires into a folder of its own; return the folder."""
    if not requires:
        return None
    folder = INSTALLED / name
    mark, wanted = folder / "requires.txt", "\n".join(requires) + "\n"
    if not mark.is_file() or mark.read_text("utf-8") != wanted:
        print(f"installing {', '.join(requires)} …", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        where = ["--target", str(folder), "--upgrade", "--no-deps"]
        subprocess.run([*pip, *where, *requires], check=True)
        mark.write_text(wanted, "utf-8")
    return folder

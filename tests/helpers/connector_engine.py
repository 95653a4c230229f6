"""A scheduler and a worker of the connector, between pages of random bytes: vLLM's part of it."""

from types import SimpleNamespace

import torch

from kvpact.geometry import CacheGeometry
from kvpact.integrations.calibrated import NOTHING
from kvpact.integrations.pages.page import PageForm
from kvpact.integrations.vllm.connector_form import StoredForm
from kvpact.integrations.vllm.connector_pages import PackedPages
from kvpact.integrations.vllm.connector_scheduler import PrefixScheduler
from kvpact.integrations.vllm.connector_store import ConnectorCounts, options_of
from kvpact.integrations.vllm.connector_worker import PrefixWorker
from kvpact.spec import parse_spec

PAGE, HEADS, DIM, LAYERS = 32, 2, 64, ("layers.0", "layers.1")


def request(name, tokens, **more):
    plain = {
        "prompt_embeds": None, "cache_salt": None, "mm_features": [], "lora_request": None,
        "skip_reading_prefix_cache": False,
    }  # fmt: skip
    ids = list(tokens)
    return SimpleNamespace(
        request_id=name, all_token_ids=ids, num_tokens=len(ids), **{**plain, **more}
    )


class Engine:
    """Pages of two layers; `serve` does what vLLM does with a request, but for its tokens."""

    def __init__(
        self,
        store,
        spec="turboquant:bits=4,sinks=0",
        model="toy",
        rank=0,
        ranks=1,
        seed=0,
        roles=(True, True),
        learnt=NOTHING,
        **extra,
    ):
        spec = parse_spec(spec)
        geometry = CacheGeometry(len(LAYERS), HEADS, DIM, dtype=torch.bfloat16)
        form = StoredForm(LAYERS, (spec,) * len(LAYERS), geometry, PAGE, rank, ranks, (learnt,) * 2)
        options = options_of({"store": "memory://", "timeout": 5, **extra})
        page = PageForm(*form.codecs[0], PAGE)
        generator = torch.Generator().manual_seed(seed)
        shape = (40, HEADS, PAGE, page.content)
        draw = {"dtype": torch.uint8, "generator": generator}
        self.memory = {name: torch.randint(0, 256, shape, **draw) for name in LAYERS}
        self.counts, self.told = ConnectorCounts(), []
        self.scheduler = PrefixScheduler(
            form, options, store, model, lambda request: request.lora_request, self.counts,
            loads=roles[0], saves=roles[1],
        )  # fmt: skip
        self.worker = PrefixWorker(form, options, store, self.counts)
        pages = {name: PackedPages(page, self.memory[name]) for name in LAYERS}
        self.damaged = set()
        self.worker.register(
            pages, self.told.extend, lambda pages: not self.damaged.isdisjoint(pages)
        )

    def matched(self, one, computed=0):
        """Ask until the scheduler's side knows."""
        for _ in range(2000):
            more, later = self.scheduler.matched(one, computed)
            if more is not None:
                assert later == (more > 0)
                return more
            self.step([])
        raise AssertionError("the lookup never ends")

    def step(self, new, cached=(), resumed=()):
        """One step, of (request, new pages, computed, scheduled) each: loads done, bad pages."""
        scheduled = [*new, *cached]
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=one.request_id, block_ids=(pages,), num_computed_tokens=at)
                for one, pages, at, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.request_id for one, *_ in cached],
                new_block_ids=[(pages,) if pages else None for _, pages, _, _ in cached],
                num_computed_tokens=[computed for _, _, computed, _ in cached],
                resumed_req_ids=set(resumed),
            ),
            num_scheduled_tokens={one.request_id: count for one, _, _, count in scheduled},
            total_num_scheduled_tokens=sum(count for *_, count in scheduled),
        )
        plan = self.scheduler.plan(output)
        self.worker.begin(plan)
        for name in LAYERS if scheduled else ():
            self.worker.save_layer(name)
        self.worker.start_loads(plan)
        self.worker.end()
        done, bad = self.worker.loaded(plan), self.worker.failed_pages()
        self.scheduler.came_back(done, bad)
        return done, bad

    def load(self, one, pages, computed=0):
        """Load what can be loaded; return its tokens, and the pages that failed."""
        more = self.matched(one, computed)
        self.scheduler.allocated(one, pages, more)
        if not more:
            return 0, set()
        bad = set()
        for _ in range(2000):
            done, failed = self.step([])
            bad |= failed
            if done:
                return more, bad
        raise AssertionError("the load never ends")

    def serve(self, one, pages):
        """Compute a request that nothing is loaded for, and save it."""
        assert self.load(one, pages) == (0, set())
        self.step([(one, pages, 0, one.num_tokens)])
        self.scheduler.finished(one)
        assert self.worker._saves_lane.submit(lambda job: True).result(30)

    def rows(self, pages):
        """The bytes of some pages, of all layers."""
        return [self.memory[name][list(pages)] for name in LAYERS]

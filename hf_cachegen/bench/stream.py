"""``hf-cachegen bench stream``: time to first token of every policy, on real links and clocks."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_cachegen.artifact import Manifest
from hf_cachegen.bench.dumps import DUMPS
from hf_cachegen.bench.kernel_link import check_kernel_links
from hf_cachegen.bench.link import LinkServer
from hf_cachegen.bench.loopback import Shaper
from hf_cachegen.bench.overlap import Overlap, measure_overlap
from hf_cachegen.bench.quality import compare
from hf_cachegen.config import CHUNK_TOKENS
from hf_cachegen.hf.cache import CompressedStreamingCache
from hf_cachegen.hf.calibration import calibrate
from hf_cachegen.hf.compat import cache_argument, new_cache
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.policies import resolve_policy
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.hf.saving import save_cache
from hf_cachegen.hf.settings import check_chunks, choose
from hf_cachegen.stores import HttpStore
from hf_cachegen.streaming.controller import OF_A_LEVEL, OF_A_TARGET, for_each_level
from hf_cachegen.streaming.policy import TEXT
from hf_cachegen.streaming.steps import StreamStep
from hf_cachegen.tables import ModelTable

SCHEMA = 3

SOURCES = ("text", *DUMPS, "fixed", "paper", "robust", "layered")
"""Where the context comes from; ``fixed`` stands for every level."""


@dataclass(frozen=True)
class BenchLink:
    """A link to measure on.

    Attributes
    ----------
    name
        For the table.
    trace
        As :class:`~hf_cachegen.bench.loopback.Link` takes it; it begins anew with every run.
    latency_s
        As :class:`~hf_cachegen.bench.link.LinkServer` takes it.
    """

    name: str
    trace: Sequence[tuple[float, float]]
    latency_s: float = 0.0

    @classmethod
    def constant(cls, mbps: float, latency_s: float = 0.0) -> BenchLink:
        """A link of constant rate."""
        return cls(f"{mbps:g} Mbit/s", [(0.0, mbps * 1e6 / 8)], latency_s)


@dataclass(frozen=True)
class Row:
    """One source of the context over one link, over all runs and clients.

    Attributes
    ----------
    ttft_p50_s, ttft_p90_s
        Time to the first token, from the request for the cache.
    missed
        Share of runs that came after the target.
    size_bytes
        Mean bytes that travelled to a client, all that is needed but the model's table.
    shares
        Share of chunks by the level that they ended with, ``text`` among them; of streams only.
    kl_mean
        Divergence of the next predictions from those of the exact cache, nats per token.
    ttft_s
        Of each client of each run.
    """

    link: str
    source: str
    ttft_p50_s: float
    ttft_p90_s: float
    missed: float
    size_bytes: float
    shares: dict[str, float]
    kl_mean: float
    ttft_s: tuple[float, ...]


@dataclass(frozen=True)
class StreamBench:
    """Everything measured, and on what."""

    model: str
    dtype: str
    threads: int
    context_tokens: int
    ahead_tokens: int
    target_s: float
    runs: int
    clients: int
    shaper: Shaper
    rows: tuple[Row, ...]
    overlap: tuple[Overlap, ...]

    def to_json(self) -> dict[str, Any]:
        """The benchmark's JSON document."""
        return {"schema": SCHEMA, **asdict(self)}


@dataclass(frozen=True)
class _Answer:
    ttft_s: float
    logits: Tensor
    steps: Sequence[StreamStep]


@dataclass(frozen=True)
class _Run:
    ttft_s: float
    size_bytes: float
    kl: float
    steps: Sequence[StreamStep]


def bench_stream(
    model: PreTrainedModel,
    table: ModelTable,
    context: Tensor,
    ahead: Tensor,
    links: Sequence[BenchLink],
    *,
    sources: Sequence[str] = SOURCES,
    levels: Sequence[str] | None = None,
    target_s: float = 2.0,
    runs: int = 5,
    clients: int = 1,
    overlap: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
    shaper: Shaper = Shaper.bucket,
    progress: bool = True,
) -> StreamBench:
    """Measure how soon a model continues a context that comes from different sources.

    What follows the context is how the document goes on: the pass over it gives the first token,
    and its predictions the quality. Sources take turns, so that whatever else the machine does
    strikes all of them; streams know the link from the streams before.

    Parameters
    ----------
    model, table
        What to measure. The table is at hand.
    context, ahead
        Token ids ``[T]``: what is cached, and how it goes on.
    links
        Each is measured by itself.
    sources
        Some of :data:`SOURCES`, ``fixed:<level>``, or ``soonest`` and ``soonest:<level>`` likewise.
    levels
        Levels of the artefact, by default what ``encode`` stores.
    target_s
        What the policies are to meet.
    runs
        How often to measure each source.
    clients
        How many ask at once. They share the link, the processor and the model, and each plans with
        what it measures.
    overlap
        Also measure each level's transfer and decoding alone.
    chunk_tokens
        Tokens per chunk.
    shaper
        Who keeps the rates of the links.
    progress
        Show a progress bar.

    Raises
    ------
    ValueError, OSError
        There are no runs or clients, or as for :func:`expand_sources`.
    """
    if runs < 1 or clients < 1:
        raise ValueError(f"expected at least one run and client, got {runs} and {clients}")
    names = expand_sources(
        table, links, sources=sources, levels=levels, target_s=target_s,
        chunk_tokens=chunk_tokens, shaper=shaper, model=model,
    )  # fmt: skip
    rows: list[Row] = []
    overlaps: list[Overlap] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        cache = prefill(model, context, progress=progress)
        manifest = save_cache(
            model, None, context, folder, cache=cache, tables=table, levels=levels,
            chunk_tokens=chunk_tokens, progress=progress,
        )  # fmt: skip
        dumps = [dump for name, dump in DUMPS.items() if name in sources]
        for dump in dumps:
            dump.save(Path(folder), cached_layers(cache))
        exact = _continue(model, cache, ahead, keep=len(ahead))
        del cache
        pool = stack.enter_context(ThreadPoolExecutor(clients))
        bench = _Bench(model, table, context, ahead, exact, Path(folder), target_s, clients, pool)
        bench.warm_up(manifest)
        bar = tqdm(total=len(links) * runs * len(names), unit="run", disable=not progress)
        for link in links:
            found: dict[str, list[_Run]] = {name: [] for name in names}
            with LinkServer(
                folder, trace=link.trace, latency_s=link.latency_s, shaper=shaper
            ) as server:
                for _ in range(runs):
                    for name in names:
                        bar.set_description(f"{link.name}, {name}")
                        found[name] += bench.run(server, name)
                        bar.update()
                for level in manifest.levels if overlap else ():
                    bar.set_description(f"{link.name}, overlap of {level.name}")
                    overlaps.append(
                        measure_overlap(model, table, server, link.name, level.name, runs=runs)
                    )
            rows += [_row(link, name, found[name], manifest, target_s) for name in names]
        bar.close()
    return StreamBench(
        model=model.name_or_path,
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        context_tokens=len(context),
        ahead_tokens=len(ahead),
        target_s=target_s,
        runs=runs,
        clients=clients,
        shaper=shaper,
        rows=tuple(rows),
        overlap=tuple(overlaps),
    )


def expand_sources(
    table: ModelTable,
    links: Sequence[BenchLink],
    *,
    sources: Sequence[str] = SOURCES,
    levels: Sequence[str] | None = None,
    target_s: float = 2.0,
    chunk_tokens: int = CHUNK_TOKENS,
    shaper: Shaper = Shaper.bucket,
    model: PreTrainedModel | None = None,
) -> list[str]:
    """What :func:`bench_stream` would measure: each source, and of each level where one means all.

    What is wrong with its arguments, which these are, is told without a model.

    Raises
    ------
    ValueError
        A source or a level is unknown, or a number is out of range.
    OSError
        ``tc`` cannot shape such links here.
    """
    check_chunks(chunk_tokens)
    if shaper is Shaper.tc:
        check_kernel_links(delays=any(link.latency_s > 0 for link in links))
    chosen = choose(table, levels, model).levels
    known = [level.name for level in chosen]
    names = []
    for source in sources:
        if source.partition(":")[0] not in (*SOURCES, *OF_A_LEVEL):
            raise ValueError(
                f"unknown source {source!r}; expected some of {', '.join(SOURCES)}, fixed:LEVEL or "
                f"soonest:LEVEL with a level of {', '.join(known)}"
            )
        for name in for_each_level(source, known):
            if name not in DUMPS:
                resolve_policy(chosen, policy=name, ttft_target_s=_target(name, target_s))
            names.append(name)
    return names


def _target(source: str, target_s: float) -> float | None:
    """The target for a source that meets one."""
    return target_s if source in OF_A_TARGET else None


@dataclass(frozen=True)
class _Bench:
    """Opens a context and times the pass that follows it."""

    model: PreTrainedModel
    table: ModelTable
    context: Tensor
    ahead: Tensor
    exact: Tensor
    folder: Path
    target_s: float
    clients: int
    pool: ThreadPoolExecutor

    def warm_up(self, manifest: Manifest) -> None:
        """Have compiled what is compiled once, and the machine's speed measured."""
        calibrate(self.model)
        for level in (manifest.levels[0], manifest.levels[-1]):
            cache = self._stream(self.folder, f"fixed:{level.name}")
            cache.wait()
            cache.close()

    def run(self, server: LinkServer, source: str) -> list[_Run]:
        """One measurement of each client, from the beginning of the link's trace on."""
        n_requests = len(server.requests)
        server.link.restart()
        answer = partial(self._answer, server.url)
        answers = list(self.pool.map(answer, [source] * self.clients))
        sent = sum(request.sent_bytes for request in server.requests[n_requests:])
        return [
            _Run(
                answer.ttft_s,
                sent / self.clients,
                compare(self.exact, answer.logits, self.ahead).kl_mean,
                answer.steps,
            )
            for answer in answers
        ]

    def _answer(self, url: str, source: str) -> _Answer:
        """What one client sees."""
        started = time.perf_counter()
        cache, ids = self._open(source, url)
        logits = _continue(self.model, cache, ids, keep=len(self.ahead))
        ttft_s = time.perf_counter() - started
        steps = []
        if isinstance(cache, CompressedStreamingCache):
            steps = cache.stream_report()
            cache.close()
        return _Answer(ttft_s, logits, steps)

    def _open(self, source: str, url: str) -> tuple[Cache, Tensor]:
        """The cache, filled or about to be, and the token ids to go on with."""
        if source == "text":
            return new_cache(self.model), torch.cat((self.context, self.ahead))
        if source in DUMPS:
            dump = DUMPS[source]
            size = (self.folder / dump.path).stat().st_size
            with HttpStore(url) as store:
                return dump.load(store, size, self.model), self.ahead
        cache = self._stream(url, source)
        cache.inputs(input_ids=self.ahead)  # tells it how many tokens will follow
        return cache, self.ahead

    def _stream(self, location: str | Path, source: str) -> CompressedStreamingCache:
        return CompressedStreamingCache.from_pretrained(
            location,
            model=self.model,
            policy=source,
            ttft_target_s=_target(source, self.target_s),
            tables=self.table,
        )


@torch.no_grad()
def _continue(model: PreTrainedModel, cache: Cache, ids: Tensor, keep: int) -> Tensor:
    """The last ``keep`` logits ``[T, V]`` of one pass over ids ``[T]`` that follow a cache."""
    arguments: dict[str, Any] = {cache_argument(model): cache}
    output = model(input_ids=ids[None].to(model.device), logits_to_keep=keep, **arguments)
    logits: Tensor = output.logits[0].float().cpu()
    return logits


def _row(
    link: BenchLink, source: str, runs: Sequence[_Run], manifest: Manifest, target_s: float
) -> Row:
    ttft_s = [run.ttft_s for run in runs]
    p50, p90 = np.percentile(ttft_s, (50, 90)).tolist()
    names = {TEXT: "text", **{i: level.name for i, level in enumerate(manifest.levels)}}
    # Later steps of a chunk refine it.
    ended = [{step.chunk: step.level for step in run.steps if step.finished} for run in runs]
    counts = Counter(names[level] for levels in ended for level in levels.values())
    return Row(
        link=link.name,
        source=source,
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        missed=float(np.mean([seconds > target_s for seconds in ttft_s])),
        size_bytes=float(np.mean([run.size_bytes for run in runs])),
        shares={name: count / counts.total() for name, count in counts.items()},
        kl_mean=float(np.mean([run.kl for run in runs])),
        ttft_s=tuple(ttft_s),
    )

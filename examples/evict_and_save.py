"""Evict half of a context's tokens as H2O does, and encode what is kept with its positions.

python examples/evict_and_save.py contract.txt contract-kv --tables model_tables/...

Prints what each level takes, and how far its predictions of the text's next tokens are from those
of the whole cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from hf_cachegen import CompressedStreamingCache, save_cache
from hf_cachegen.hf.compat import cache_argument

PIECE_TOKENS = 128
"""Tokens per pass: attention weights are large."""


def run(model: PreTrainedModel, ids: Tensor) -> tuple[DynamicCache, list[Tensor]]:
    """The cache of ids ``[T]``, and by layer how much each head attends to each, ``[H, T]``."""
    heads, cache = model.config.num_key_value_heads, DynamicCache(config=model.config)
    scores = [torch.zeros(heads, len(ids)) for _ in range(model.config.num_hidden_layers)]
    for piece in ids.split(PIECE_TOKENS):
        arguments = {cache_argument(model): cache, "output_attentions": True, "logits_to_keep": 1}
        attentions = model(piece[None], **arguments).attentions
        for score, attention in zip(scores, attentions, strict=True):  # [1, query heads, t, T]
            score[:, : attention.shape[-1]] += attention[0].sum(1).unflatten(0, (heads, -1)).sum(1)
    return cache, scores


def evict(cache: DynamicCache, scores: list[Tensor], kept: int) -> list[Tensor]:
    """Leave the last tokens and those most attended to, half and half; returns their positions."""
    positions = []
    for layer, score in zip(cache.layers, scores, strict=True):
        score[:, -(kept // 2) :] = torch.inf
        place = score.topk(kept).indices.sort().values  # [H, kept]
        positions.append(place)
        index = place[None, ..., None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
    return positions


parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("document", type=Path, help="text file")
parser.add_argument("out", help="folder to write")
parser.add_argument(
    "--model", default=".cache/models/SmolLM2-135M", help="folder or Hub repository"
)
parser.add_argument("--dtype", default="auto", help="of model and cache: float32, bfloat16, ...")
parser.add_argument("--tables", default="auto", help="folder or Hub repository of a model table")
parser.add_argument("--tokens", type=int, default=1500, help="length of the context")
parser.add_argument("--ahead", type=int, default=256, help="next tokens to predict")
parser.add_argument("--keep", type=float, default=0.5, help="share of the tokens to keep")
parser.add_argument("--same", action="store_true", help="the same tokens for all layers and heads")
parser.add_argument("--levels", nargs="*", help="to store; by default those of the best codec")
args = parser.parse_args()
torch.set_grad_enabled(False)

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
ids = tokenizer(args.document.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0]
ids, ahead = ids[: args.tokens], ids[None, args.tokens : args.tokens + args.ahead]

model.set_attn_implementation("eager")  # the one that tells its weights
cache, scores = run(model, ids)
model.set_attn_implementation("sdpa")
if args.same:
    scores = [torch.stack(scores).sum((0, 1)).expand_as(score).clone() for score in scores]
positions = evict(cache, scores, round(args.keep * len(ids)))
manifest = save_cache(
    model, None, ids, args.out, cache=cache, positions=positions, tables=args.tables,
    levels=args.levels,
)  # fmt: skip


def predictions(cache: CompressedStreamingCache | DynamicCache) -> Tensor:
    """Log probabilities ``[T, V]`` of what follows each token ahead."""
    return model(ahead, **{cache_argument(model): cache}).logits[0].float().log_softmax(-1)


whole = DynamicCache(config=model.config)
model(ids[None], logits_to_keep=1, **{cache_argument(model): whole})
expected = predictions(whole)
print(f"{manifest.n_cached} of {manifest.tokens.n} tokens kept by each head")
for index, level in enumerate(manifest.levels):
    streamed = CompressedStreamingCache.from_pretrained(args.out, model=model, level=level.name)
    size_bytes = sum(manifest.read_bytes(chunk)[index] for chunk in range(len(manifest.chunks)))
    kl = kl_div(predictions(streamed), expected, reduction="batchmean", log_target=True)
    print(f"{level.name:>12}  {size_bytes / 1e3:9.0f} kB  KL {kl:.5f}")

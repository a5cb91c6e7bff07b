"""Encode a document's KV cache into a folder, and optionally push it to the Hub.

python examples/save_context.py contract.txt contract-kv --push me/contract-kv
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cachegen import save_cache

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("document", type=Path, help="text file")
parser.add_argument("out", help="folder to write")
parser.add_argument(
    "--model", default=".cache/models/SmolLM2-135M", help="folder or Hub repository"
)
parser.add_argument("--dtype", default="auto", help="of model and cache: float32, bfloat16, ...")
parser.add_argument("--tables", default="auto", help="folder or Hub repository of a model table")
parser.add_argument("--max-tokens", type=int, help="cut the context here")
parser.add_argument("--push", metavar="ORG/NAME", help="Hub repository to upload to")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)

# The context is a chat's beginning: a user's turn that is still open after the document.
document = args.document.read_text(encoding="utf-8").strip()
chat = tokenizer.apply_chat_template([{"role": "user", "content": document}], tokenize=False)
context = chat[: chat.index(document) + len(document)]
ids = tokenizer(context, add_special_tokens=False)["input_ids"][: args.max_tokens]

manifest = save_cache(model, None, ids, args.out, tables=args.tables, push_to_hub=args.push)

print(f"{manifest.tokens.n} tokens in {len(manifest.chunks)} chunks")
for index, level in enumerate(manifest.levels):
    size_bytes = sum(chunk.level_bytes[index] for chunk in manifest.chunks)
    print(f"{level.name:>10}  {size_bytes / 1e6:6.2f} MB  {'exact' if level.exact else ''}")

"""Answer a question from a saved KV cache, without running the model over the document.

python examples/load_and_generate.py me/contract-kv "Who signed it?"
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cachegen import CompressedStreamingCache

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("location", help="folder, URL or Hub repository of the cache")
parser.add_argument("question")
parser.add_argument("--model", default=".cache/models/SmolLM2-135M", help="the one that made it")
parser.add_argument("--dtype", default="auto", help="as when it was saved")
parser.add_argument("--level", help="by default the finest lossy one")
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)

cache = CompressedStreamingCache.from_pretrained(args.location, model=model, level=args.level)

# The cached context ends inside a user's turn: the question and the turn's end follow it.
turn = [{"role": "user", "content": args.question}]
chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
prompt = cache.inputs(tokenizer, "\n\n" + chat[chat.index(args.question) :])
output = model.generate(**prompt, max_new_tokens=args.max_new_tokens, do_sample=False)

print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))

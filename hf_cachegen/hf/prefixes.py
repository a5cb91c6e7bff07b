"""Continue a prompt from the longest beginning of it that is stored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from hf_cachegen.artifact import Identity, check_identity
from hf_cachegen.artifact.prefixes import open_longest_prefix
from hf_cachegen.errors import IdentityError
from hf_cachegen.hf.cache import CompressedStreamingCache
from hf_cachegen.hf.describe import expected_identity
from hf_cachegen.hf.policies import resolve_policy
from hf_cachegen.hf.saving import one_sequence
from hf_cachegen.streaming.policy import Policy


def load_longest_prefix(
    folder: str | os.PathLike[str],
    prompt: Tensor | Sequence[int],
    *,
    model: PreTrainedModel,
    level: str | None = None,
    policy: str | Policy | None = None,
    ttft_target_s: float | None = None,
) -> CompressedStreamingCache | None:
    """Stream the artefact below a folder that begins a prompt with the most tokens.

    ``model.generate(prompt, cache=cache)`` then computes only the rest of the prompt.

    Parameters
    ----------
    folder
        A folder with artefacts in it, at any depth; those of other models are passed over.
    prompt
        Token ids ``[T]`` or ``[1, T]``.
    model
        The model that will use the cache.
    level, policy, ttft_target_s
        As for :meth:`CompressedStreamingCache.from_pretrained`.

    Returns
    -------
    CompressedStreamingCache or None
        None if nothing that is stored begins the prompt.

    Raises
    ------
    FileNotFoundError
        There is no such folder.
    ValueError
        The prompt is not token ids, or the policy is not as for ``from_pretrained``.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"expected a folder with artefacts, found none at {folder}")

    def is_of_model(identity: Identity) -> bool:
        try:
            check_identity(expected_identity(model, identity), identity)
        except IdentityError:
            return False
        return True

    ids = one_sequence(prompt).numpy().astype(np.int32)
    artifact = open_longest_prefix(folder, ids, is_of_model)
    if artifact is None:
        return None
    chosen = resolve_policy(
        artifact.manifest.levels, level=level, policy=policy, ttft_target_s=ttft_target_s
    )
    return CompressedStreamingCache(artifact, model, chosen)

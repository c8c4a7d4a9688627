"""Rows of TRL's padded batches, unpadded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longstraw_sdk.errors import InputError


@dataclass(frozen=True)
class Row:
    """One unpadded sample: prompt [P], response [R], and the columns [R] of the padded batch it came from."""

    index: int
    prompt: torch.Tensor
    response: torch.Tensor
    columns: torch.Tensor


def unpadded(input_ids: torch.Tensor, attention_mask: torch.Tensor, n_completion: int) -> list[Row]:
    """Rows of a padded batch [B, T] whose last `n_completion` columns are completions; all-masked rows are left out."""
    rows = []
    for i, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
        prompt, response = ids[:-n_completion][mask[:-n_completion]], ids[-n_completion:][mask[-n_completion:]]
        columns = mask[-n_completion:].nonzero()[:, 0]
        if not len(response):
            continue
        if not len(prompt):
            raise InputError(f"row {i} of the micro-batch has an empty prompt")
        if int(columns[-1]) != len(columns) - 1:
            raise InputError(
                f"row {i} of the micro-batch has masked tokens inside its completion; attention masks may pad the "
                "right of a completion only (mask tool output with tool_mask)"
            )
        rows.append(Row(i, prompt, response, columns))
    return rows

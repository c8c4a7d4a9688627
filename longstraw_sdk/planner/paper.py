"""Figures of arXiv 2607.14952 ("LongStraw"), by geometry, context size and prompt, and by row of the table."""

from __future__ import annotations

PAPER: dict[tuple[str, int, int], dict[str, str]] = {
    ("qwen3.6-27b", 8, 2_097_152): {
        "capture": "4,656 s",
        "replay response": "264.4 s (G=8 less G=2)",
        "step response 2": "5,198.8 s",
        "step response 8": "6,785.2 s",
        "peak response": "97.503 GB, G=8: 97.711",
    },
    ("qwen3.6-27b", 8, 4_456_448): {"peak response": "83.894 GB, frozen prefix"},
    ("glm-5.2", 32, 2_097_152): {"step response 2": "2,975 s", "peak response": "112.6 to 145.1 GB"},
}

PAPER_SETTING = (
    "Paper: Qwen3.6-27B in NF4 with LoRA r16 on 8 x H20, GLM-5.2 on 32 x H20 with its experts on 32 ranks; gradient of "
    "response scope, whole steps with communication; 64 replays on the one capture of the frozen prefix. An H20 does "
    "148 TFLOP/s (bf16, dense), an H200 989: seconds of the two do not compare as they stand."
)

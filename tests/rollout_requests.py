"""What a sampler is asked, with the values that most tests take."""

from longstraw_sdk.rollout import RolloutRequest

PROMPTS = ((5, 9, 20, 33, 4), (7, 7, 61))


def request_to(adapter, **options):
    given = {
        "request_id": "1-0",
        "prompts": PROMPTS,
        "n_completions": 3,
        "max_new_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 11,
        "stop_token_ids": (1,),
        "vocab_size": 97,
    }
    return RolloutRequest(adapter=adapter, **(given | options))

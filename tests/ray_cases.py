"""What the ranks of a Ray cluster import, and the same run in one process."""

import os
import signal
from pathlib import Path

import torch

from longstraw_sdk import LongStrawSession
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.placement import PromptGroup, Timeouts

SESSION = {"chunk_tokens": 16, "page_tokens": 4, "poison": True}
LR = 1e-2
TIMEOUTS = Timeouts(connect=60, group=60, actors=150, phase=90, grace=20, release=30)
"""On a busy machine two ranks start in half a minute."""


def tokens(n, seed):
    return tuple(torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def groups(n_closed):
    """Unequal lengths and a response of one token first; then another prompt, and responses drawn from the first."""
    given = PromptGroup(prompt_ids=tokens(41 + n_closed, n_closed), responses=tuple(tokens(n, n) for n in (7, 12, 1)))
    drawn = PromptGroup(prompt_ids=tokens(37, 5), n_samples=2, max_new_tokens=4, seed=n_closed)
    return [given, drawn] if n_closed else [given]


def advantages(group, rows):
    return [(-1) ** i * (0.5 + sum(row) / 97 / len(row)) for i, row in enumerate(rows)]


def loss(out, old, advantage):
    """GRPO's clipped objective of one response."""
    ratio = torch.exp(out.logps - old)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() / 3


def whole_glm():
    """Latent attention and, in two of four layers, eight experts with LoRA, in float64."""
    return tiny_model("glm52", n_layers=4).double()


def glm_of_rank(n_parts):
    """`whole_glm` with this rank's part of the experts, under `float64_upcasts` as `model_of_rank`."""
    from longstraw_sdk.models.glm52.expert_shards import keep_expert_shard

    torch.set_num_threads(1)
    float64_upcasts().__enter__()
    return keep_expert_shard(whole_glm(), int(os.environ["RANK"]) % n_parts, n_parts)


def new_model():
    """Attention between two Gated DeltaNet layers that remember for long, in float64; LoRA B is not zero."""
    layers = ["linear_attention", "full_attention", "linear_attention"]
    model = tiny_model("qwen36", n_layers=3, layer_types=layers)
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.A_log.data.fill_(-5.0)
    return model.double()


def model_of_rank():
    """`new_model`, in a process that is one rank and from then on computes in float64 what asks for float32."""
    torch.set_num_threads(1)
    float64_upcasts().__enter__()
    return new_model()


class RecordingAdamW(torch.optim.AdamW):
    """Writes the gradients that it steps on to `<folder>/<rank>-<steps before>.pt`."""

    def __init__(self, parameters, folder=None, **options):
        super().__init__(parameters, **options)
        self.folder = folder
        for group in self.param_groups:
            group["folder"] = folder

    def step(self, closure=None):
        (group,) = self.param_groups
        done = int(self.state[group["params"][0]].get("step", 0)) if self.state else 0
        found = [p.grad.clone() for p in group["params"]]
        torch.save(found, Path(group["folder"]) / f"{os.environ.get('RANK', 0)}-{done}.pt")
        return super().step(closure)


def run_in_one_process(n_updates, make_model=new_model):
    """By update, its gradients in parameter order, and the adapter after it, by name."""
    with float64_upcasts():
        model = make_model()
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LR)
        gradients, adapters = [], []
        with LongStrawSession(model, **SESSION) as session:
            for n_closed in range(n_updates):
                for group in groups(n_closed):
                    with session.capture(torch.tensor(group.prompt_ids)) as prefix:
                        rows = [torch.tensor(row) for row in group.responses]
                        if group.n_samples:
                            rows = prefix.sample(group.n_samples, max_new_tokens=group.max_new_tokens, seed=group.seed)
                        old = prefix.score(rows)
                        weights = advantages(group, [row.tolist() for row in rows])
                        for row, before, advantage in zip(rows, old, weights, strict=True):
                            loss(prefix.replay(row), before, advantage).backward()
                session.finalize()
                gradients.append([p.grad.clone() for p in trained])
                optimizer.step()
                optimizer.zero_grad()
                adapters.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
    return gradients, adapters


def deadly_loss(out, old, advantage):
    """`loss`; but while the file that LONGSTRAW_TEST_KILL names is there, rank 1 removes it and dies, in its replay."""
    victim = Path(os.environ["LONGSTRAW_TEST_KILL"])
    if os.environ["RANK"] == "1" and victim.exists():
        victim.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(out, old, advantage)

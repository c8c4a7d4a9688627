"""What LongStrawGRPOTrainer adds to TRL: captures and their lifetime, metrics, refusals, resuming."""

import inspect
import math

import pytest
import torch
import trl_setup
from accelerate import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from longstraw_sdk import ConfigurationError, InputError, LongStrawError, NumericsError, UnsupportedModelError
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.trainers import LongStrawGRPOConfig, LongStrawGRPOTrainer, prompt_lengths


def histories(trainer):
    return [h for h in trainer.state.log_history if "reward" in h]


def n_prefix_tokens(dataset, n_prompts):
    return sum(len(text.split()) - 1 for text in dataset["prompt"][:n_prompts])


def test_signature_is_trls_plus_adapter_and_sampler():
    ours = inspect.signature(LongStrawGRPOTrainer.__init__).parameters
    assert list(ours) == [*inspect.signature(GRPOTrainer.__init__).parameters, "adapter", "sampler"]
    assert ours["adapter"].default is ours["sampler"].default is None


def test_config_adds_fewer_than_ten_fields():
    from dataclasses import fields

    added = {f.name for f in fields(LongStrawGRPOConfig)} - {f.name for f in fields(GRPOConfig)}
    assert added == {
        "gradient_scope",
        "prefix_adapter",
        "chunk_tokens",
        "page_tokens",
        "state_device",
        "replay_tokens",
        "context_parallel_size",
        "expert_parallel_size",
        "sharding",
    }


@pytest.mark.parametrize(
    ("options", "captures", "sweeps"),
    [({}, 1, 1), ({"beta": 0.1}, 2, 1), ({"gradient_scope": "response"}, 1, 0), ({"prefix_adapter": "frozen"}, 1, 0)],
    ids=["full", "beta", "response", "frozen"],
)
def test_each_prompt_is_forwarded_once_per_group_and_phase(tmp_path, options, captures, sweeps):
    """One capture serves sampling, scoring and replay; beta adds one for the reference; full scope one sweep."""
    dataset = trl_setup.prompts(8)
    trainer = trl_setup.our_trainer(tmp_path, dataset=dataset, shuffle_dataset=False, **options)
    trainer.train()
    prefix_tokens = n_prefix_tokens(dataset, 8)
    assert trainer.longstraw.stats.captured_tokens == captures * prefix_tokens
    assert trainer.longstraw.stats.swept_tokens == sweeps * prefix_tokens
    forwarded = [h["longstraw/prompt_tokens_forwarded"] for h in histories(trainer)]
    assert sum(forwarded) == (captures + sweeps) * prefix_tokens


def test_frozen_prefix_shares_its_capture_with_the_reference(tmp_path):
    dataset = trl_setup.prompts(8)
    trainer = trl_setup.our_trainer(tmp_path, dataset=dataset, shuffle_dataset=False, prefix_adapter="frozen", beta=0.1)
    trainer.train()
    assert trainer.longstraw.stats.captured_tokens == n_prefix_tokens(dataset, 8)
    assert histories(trainer)[-1]["kl"] > 0


def test_frozen_capture_outlives_optimizer_steps_and_reports_its_age(tmp_path):
    dataset = trl_setup.prompts(8)
    options = {"num_iterations": 4, "gradient_accumulation_steps": 1, "max_steps": 8, "shuffle_dataset": False}
    frozen = trl_setup.our_trainer(tmp_path / "a", dataset=dataset, prefix_adapter="frozen", **options)
    frozen.train()
    assert frozen.longstraw.stats.captured_tokens == n_prefix_tokens(dataset, 2)
    assert [h["longstraw/stale_age"] for h in frozen.state.log_history if "loss" in h] == [0, 1, 2, 3] * 2
    live = trl_setup.our_trainer(tmp_path / "b", dataset=dataset, **options)
    live.train()
    assert live.longstraw.stats.captured_tokens == 4 * n_prefix_tokens(dataset, 2)
    assert [h["longstraw/stale_age"] for h in live.state.log_history if "loss" in h] == [0] * 8


def test_captures_are_gone_after_every_step_and_the_pool_audits_clean(tmp_path):
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append((len(trainer._prefixes), trainer.longstraw.pool.live_bytes, trainer.longstraw.pool.audit()))

    trainer = trl_setup.our_trainer(tmp_path, callbacks=[Watch()], beta=0.1)
    trainer.train()
    assert seen == [(0, 0, [])] * 4


def test_metrics(tmp_path):
    trainer = trl_setup.our_trainer(tmp_path)
    trainer.train()
    for history in histories(trainer):
        for phase in ("capture", "sample", "score", "replay", "sweep"):
            assert history[f"longstraw/{phase}_seconds"] > 0
        assert history["longstraw/resident_bytes"] > 0
        assert history["longstraw/gradient_scope_full"] == 1.0
        phases = sum(v for k, v in history.items() if k.startswith("longstraw/") and k.endswith("_seconds"))
        assert phases <= history["step_time"] * 1.01


def test_equal_rewards_are_not_replayed(tmp_path):
    def constant(completions, **kwargs):
        return [1.0] * len(completions)

    trainer = trl_setup.our_trainer(tmp_path / "a", reward=constant, max_steps=1)
    before = trl_setup.lora(trainer.model).clone()
    trainer.train()
    assert trainer.longstraw.stats.replayed_tokens == 0
    assert trainer.longstraw.stats.swept_tokens == 0
    assert histories(trainer)[0]["longstraw/rows_not_replayed"] == 8
    assert torch.equal(trl_setup.lora(trainer.model), before)
    with_entropy = trl_setup.our_trainer(tmp_path / "b", reward=constant, max_steps=1, entropy_coef=0.1)
    with_entropy.train()
    assert with_entropy.longstraw.stats.replayed_tokens > 0


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "gradient_accumulation_steps": 1}], ids=["plain", "mid"])
def test_resume_continues_exactly(tmp_path, options):
    """`mid` stops inside a generation batch, whose rollouts the checkpoint must carry."""
    unbroken = trl_setup.our_trainer(tmp_path / "a", max_steps=6, save_strategy="steps", save_steps=3, **options)
    unbroken.train()
    resumed = trl_setup.our_trainer(tmp_path / "b", max_steps=6, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert torch.equal(trl_setup.lora(resumed.model), trl_setup.lora(unbroken.model))
    last = [h["loss"] for h in unbroken.state.log_history if "loss" in h][3:]
    assert [h["loss"] for h in resumed.state.log_history if "loss" in h][3:] == last


def test_checkpoint_is_an_ordinary_peft_folder_and_the_card_names_the_scope(tmp_path):
    from peft import PeftModel

    trainer = trl_setup.our_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    base = tiny_model("qwen36").unload()
    loaded = PeftModel.from_pretrained(base, folder)
    ids = torch.arange(2, 30)[None]
    trainer.model.eval()
    torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, trainer.model(input_ids=ids).logits)
    card = (tmp_path / "README.md").read_text()
    assert "longstraw-gradient-scope-full" in card
    assert "- longstraw\n" in card


def test_evaluation_runs_and_leaves_nothing_behind(tmp_path):
    trainer = trl_setup.our_trainer(tmp_path, per_device_eval_batch_size=4)
    trainer.eval_dataset = trl_setup.prompts(3, shortest=20)
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    assert "eval_reward" in trainer.state.log_history[-1]
    assert trainer.longstraw.pool.live_bytes == 0


REFUSED = {
    "context_parallel_size": {"context_parallel_size": 2},
    "expert_parallel_size": {"expert_parallel_size": 2},
    "sharding": {"sharding": "deepspeed"},
    "cp_size=2": {"parallelism_config": lambda: ParallelismConfig(cp_size=2)},
    "sp_size=2": {"parallelism_config": lambda: ParallelismConfig(sp_size=2)},
    "tp_size=2": {"parallelism_config": lambda: ParallelismConfig(tp_size=2)},
    "dp_shard_size=2": {"parallelism_config": lambda: ParallelismConfig(dp_shard_size=2)},
    "fsdp": {"fsdp": True},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "vllm_mode='merged' is not known": {"use_vllm": True, "vllm_mode": "merged"},
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "cache_implementation": {"cache_implementation": "static"},
    "use_liger_kernel": {"use_liger_kernel": True},
    "router_aux_loss_coef": {"router_aux_loss_coef": 0.1},
    "use_reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "torch_compile": {"torch_compile": True},
}


@pytest.mark.parametrize(("name", "options"), REFUSED.items(), ids=REFUSED.keys())
def test_options_that_cannot_work_are_refused_by_name(tmp_path, name, options):
    options = {key: value() if callable(value) else value for key, value in options.items()}
    with pytest.raises(ConfigurationError, match=name):
        LongStrawGRPOConfig(str(tmp_path), **(trl_setup.COMMON | options))


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size=2"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}, "cp_size=2"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "MEGATRON_LM"),
    ],
    ids=str,
)
def test_what_a_launcher_asks_for_is_refused_too(tmp_path, monkeypatch, variables, name):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=name):
        LongStrawGRPOConfig(str(tmp_path), **trl_setup.COMMON)


def test_plain_trl_config_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="LongStrawGRPOConfig"):
        LongStrawGRPOTrainer(
            tiny_model("qwen36"), trl_setup.checksum_reward, GRPOConfig(str(tmp_path), **trl_setup.COMMON)
        )


def test_lora_dropout_is_refused_unless_disabled(tmp_path):
    def build(folder, **options):
        config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "in_proj_qkv"])
        return LongStrawGRPOTrainer(
            tiny_model("qwen36").unload(),
            trl_setup.checksum_reward,
            LongStrawGRPOConfig(str(folder), **(trl_setup.COMMON | trl_setup.OURS | options)),
            train_dataset=trl_setup.prompts(),
            processing_class=trl_setup.word_tokenizer(),
            peft_config=config,
        )

    with pytest.raises(UnsupportedModelError, match=r"dropout.*0\.1"):
        build(tmp_path / "a")
    build(tmp_path / "b", disable_dropout=True)


def test_model_without_lora_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no LoRA"):
        trl_setup.our_trainer(tmp_path, model=tiny_model("qwen36").unload())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_rewards_raise_and_name_the_function_and_completion(tmp_path, bad):
    def broken_reward(completions, **kwargs):
        return [0.0, bad, 1.0, 2.0]

    trainer = trl_setup.our_trainer(tmp_path, reward=broken_reward)
    before = trl_setup.lora(trainer.model).clone()
    with pytest.raises(InputError, match=r"broken_reward returned .* for completion 1"):
        trainer.train()
    assert torch.equal(trl_setup.lora(trainer.model), before)
    assert trainer.longstraw.pool.live_bytes == 0


def test_async_reward_objects_are_awaited_and_checked(tmp_path):
    class Judge:
        async def __call__(self, completions, **kwargs):
            return [float("nan") if i == 2 else 1.0 for i in range(len(completions))]

    trainer = trl_setup.our_trainer(tmp_path, reward=Judge(), max_steps=1)
    with pytest.raises(InputError, match=r"Judge returned nan for completion 2"):
        trainer.train()


def test_a_reward_of_none_stays_trls_missing_reward(tmp_path):
    def partial_reward(completions, **kwargs):
        return [None, 1.0, 2.0, 3.0]

    trainer = trl_setup.our_trainer(tmp_path, reward=partial_reward, max_steps=1)
    trainer.train()
    assert histories(trainer)[0]["reward"] == 2.0


def test_nan_in_the_loss_stops_before_any_replay(tmp_path):
    trainer = trl_setup.our_trainer(tmp_path)
    ids = torch.randint(2, 97, (1, 12))
    logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 4)
    with pytest.raises(NumericsError, match="row 0"):
        (logps * float("nan")).sum().backward()
    assert trl_setup.lora_gradient(trainer.model).abs().sum() == 0


def test_a_prompt_beyond_the_positions_is_named_and_not_truncated(tmp_path, monkeypatch):
    """Before the first step if it is among the longest of the dataset, else when it is sampled."""
    long = " ".join(f"t{2 + i % 90}" for i in range(510))
    options = {"shuffle_dataset": False, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    dataset = Dataset.from_dict({"prompt": ["t5 t6 t7", long]})
    trainer = trl_setup.our_trainer(tmp_path, dataset=dataset, **options)
    with pytest.raises(InputError, match=r"more than the 504 tokens .*: row 1 of 510 tokens, among the 2 longest"):
        trainer.train()
    assert trainer.longstraw.stats.captured_tokens == 0
    monkeypatch.setattr(prompt_lengths, "N_LONGEST", 0)
    with pytest.raises(InputError, match=r"sample 4 .*510 tokens.*512"):
        trainer.train()


def test_a_conversation_is_measured_as_it_is_sampled(tmp_path):
    prompts = [[{"role": "user", "content": "t5 " * n}] for n in (3, 40, 20)]
    trainer = trl_setup.our_trainer(
        tmp_path, dataset=Dataset.from_dict({"prompt": prompts}), per_device_train_batch_size=8
    )
    trainer.processing_class.chat_template = "{% for m in messages %}t9 {{ m['content'] }}{% endfor %}"
    lengths = []

    def n_tokens(prompt):
        lengths.append(len(trainer._tokenize_prompts([prompt])[0][0]))
        return lengths[-1]

    prompt_lengths.check_longest_prompts(trainer.train_dataset["prompt"], n_tokens, 41)
    assert lengths == [4, 41, 21]
    with pytest.raises(InputError, match="row 1 of 41 tokens, among the 3 longest"):
        prompt_lengths.check_longest_prompts(trainer.train_dataset["prompt"], n_tokens, 40)


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_padded_on_either_side_score_the_same(tmp_path, side):
    trainer = trl_setup.our_trainer(tmp_path)
    prompt, response = torch.randint(2, 97, (9,)), torch.randint(2, 97, (4,))
    bare = torch.cat([prompt, response])[None]
    wanted, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, bare, torch.ones_like(bare), 4)
    pads = torch.zeros(3, dtype=torch.long)
    ids = torch.cat([pads, prompt, response] if side == "left" else [prompt, pads, response])[None]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0 if side == "left" else 1
    mask[0, 9:12] = 0 if side == "right" else 1
    found, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4)
    assert torch.equal(found, wanted)


def test_holes_in_a_completion_mask_are_refused(tmp_path):
    trainer = trl_setup.our_trainer(tmp_path)
    ids = torch.randint(2, 97, (1, 12))
    mask = torch.ones_like(ids)
    mask[0, 9] = 0
    with pytest.raises(InputError, match="masked tokens inside"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4)


def test_an_all_masked_batch_is_a_no_op(tmp_path):
    trainer = trl_setup.our_trainer(tmp_path)
    ids = torch.randint(2, 97, (2, 12))
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4, compute_entropy=True)
    assert logps.abs().sum() == 0
    (logps.sum() + entropies.sum()).backward()
    assert trainer.longstraw.stats.captured_tokens == 0


def test_a_window_of_masked_rows_steps_with_a_zero_gradient(tmp_path):
    """With `mask_truncated_completions` and rollouts reused over several steps, a whole window can be masked."""
    trainer = trl_setup.our_trainer(
        tmp_path, mask_truncated_completions=True, steps_per_generation=2, gradient_accumulation_steps=1, max_steps=2
    )
    generate = trainer._generate_single_turn
    trainer._generate_single_turn = lambda *a, **k: ([[5] * len(ids) for ids in generate(*a, **k)[0]], None)
    before = trl_setup.lora(trainer.model).clone()
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.longstraw.stats.replayed_tokens == 0
    assert torch.equal(trl_setup.lora(trainer.model), before)


def test_multimodal_inputs_are_refused(tmp_path):
    trainer = trl_setup.our_trainer(tmp_path)
    ids = torch.randint(2, 97, (1, 12))
    with pytest.raises(ConfigurationError, match="pixel_values"):
        trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), 4, pixel_values=torch.zeros(1)
        )


def test_every_error_is_a_longstraw_error():
    for error in (ConfigurationError, InputError, NumericsError, UnsupportedModelError):
        assert issubclass(error, LongStrawError)


def test_frozen_training_equals_live_training_of_response_only_lora(tmp_path):
    """Under a frozen prefix both scopes are the same gradient."""
    ends = []
    for scope in ("full", "response"):
        trainer = trl_setup.our_trainer(tmp_path / scope, prefix_adapter="frozen", gradient_scope=scope)
        start = trl_setup.lora(trainer.model).clone()
        trainer.train()
        ends.append(trl_setup.lora(trainer.model) - start)
    assert ends[0].norm() > 0
    assert relative_l2(ends[0], ends[1]) < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "glm52"])
def test_mixed_precision_training_runs_the_operators_in_their_own_dtypes(tmp_path, architecture):
    """The sweep's backward runs inside the trainer's autocast."""
    model = tiny_model(architecture, n_layers=3)
    trainer = trl_setup.our_trainer(tmp_path, model=model, bf16=True, max_steps=2)
    before = trl_setup.lora(trainer.model).clone()
    trainer.train()
    assert (trl_setup.lora(trainer.model) - before).norm() > 0

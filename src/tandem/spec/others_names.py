"""Names of settings in TRL, verl, Unsloth, prime-rl, SkyRL and NeMo-RL, and how each is written in a spec."""

from __future__ import annotations

_RL_BATCH = "groups_per_step tasks with group_size answers each"
_LORA = "a table: [model] lora = { rank = 16, alpha = 32 }"

_REWARD = 'reward in environment.params, with environment.name = "prompts" (docs/your_data.md)'

FIELDS = {
    # model
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "model_id": "model.path",
    "tokenizer_name": "nothing: the tokenizer comes with model.path",
    "tokenizer_name_or_path": "nothing: the tokenizer comes with model.path",
    "trust_remote_code": "nothing: code of a model is never run",
    "attn_implementation": 'model.attention, "sdpa" or "packed"',
    "gradient_checkpointing": 'model.activations = "recompute"',
    "use_gradient_checkpointing": 'model.activations = "recompute"',
    "enable_gradient_checkpointing": 'model.activations = "recompute"',
    "torch_compile": "model.compile",
    "enable_thinking": "model.thinking",
    "fp16": 'precision.weights = "bfloat16": float16 is not trained with',
    "bf16": 'precision.weights = "bfloat16"',
    "dtype": 'precision.weights, "float32" or "bfloat16"',
    "torch_dtype": 'precision.weights, "float32" or "bfloat16"',
    "load_in_4bit": 'model.lora.base = "nf4"',
    "load_in_8bit": 'model.lora.base = "int8"',
    "peft_config": _LORA,
    "use_peft": _LORA,
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.targets",
    "target_modules": "model.lora.targets",
    "lora_dropout": "nothing: adapters have no dropout",
    # optimizer
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "total_training_steps": "train.steps",
    "num_train_epochs": "train.steps: a stage is a number of steps, not of epochs",
    "total_epochs": "train.steps: a stage is a number of steps, not of epochs",
    "epochs": "train.steps: a stage is a number of steps, not of epochs",
    "max_grad_norm": "train.clip_norm",
    "grad_clip": "train.clip_norm",
    "weight_decay": "train.optimizer.weight_decay",
    "adam_beta1": "train.optimizer.betas, a list of two",
    "adam_beta2": "train.optimizer.betas, a list of two",
    "adam_epsilon": "train.optimizer.eps",
    "optim": "train.optimizer.kind",
    "lr_scheduler_type": "train.schedule.kind",
    "lr_scheduler": "train.schedule.kind",
    "warmup_steps": "train.schedule.warmup_steps",
    "warmup_ratio": "train.schedule.warmup_steps, a number of steps",
    "lr_warmup_steps_ratio": "train.schedule.warmup_steps, a number of steps",
    # batches
    "per_device_train_batch_size": f"train.batch_size; in RL, train.groups_per_step and train.group_size: {_RL_BATCH}",
    "train_batch_size": f"train.batch_size; in RL, train.groups_per_step and train.group_size: {_RL_BATCH}",
    "global_batch_size": f"train.batch_size; in RL, train.groups_per_step and train.group_size: {_RL_BATCH}",
    "gradient_accumulation_steps": "train.micro_tokens: a step is cut into micro-batches of so many tokens",
    "micro_batch_size": "train.micro_tokens: a step is cut into micro-batches of so many tokens",
    "ppo_micro_batch_size_per_gpu": "train.micro_tokens: a step is cut into micro-batches of so many tokens",
    "num_prompts_per_step": "train.groups_per_step",
    "ppo_mini_batch_size": "train.groups_per_step: each batch is one step",
    "num_generations": "train.group_size",
    "num_generations_per_prompt": "train.group_size",
    "n_samples_per_prompt": "train.group_size",
    "rollouts_per_example": "train.group_size",
    "rollout_n": "train.group_size",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens; in RL, train.max_tokens for an answer and engine.max_context for all",
    "max_seq_len": "data.max_tokens; in RL, train.max_tokens for an answer and engine.max_context for all",
    "dataset_name": "data.name for a data set of the hub, data.path for a file",
    "dataset_path": "data.name for a data set of the hub, data.path for a file",
    # rollouts
    "max_completion_length": "train.max_tokens",
    "max_new_tokens": "train.max_tokens",
    "max_response_length": "train.max_tokens",
    "max_generate_length": "train.max_tokens",
    "max_prompt_length": "nothing: engine.max_context bounds prompt and answer together",
    "max_model_len": "engine.max_context",
    "use_vllm": 'engine.kind = "vllm"',
    "vllm_mode": 'engine.kind = "vllm", with sync.bridge = "shared" on one GPU, "broadcast" between GPUs',
    "vllm_gpu_memory_utilization": "engine.memory_share",
    "gpu_memory_utilization": "engine.memory_share",
    "max_off_policy_steps": "train.max_lag",
    "max_async_level": "train.max_lag",
    "async_level": "train.max_lag",
    "staleness_threshold": "train.max_lag",
    # algorithm
    "beta": "algorithm.kl_coef; in DPO algorithm.beta",
    "kl_coef": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "reference_policy_kl_penalty": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low and algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "ratio_clip_min": "algorithm.clip_low",
    "ratio_clip_max": "algorithm.clip_high",
    "loss_type": "algorithm.kind",
    "adv_estimator": "algorithm.kind",
    "advantage_estimator": "algorithm.kind",
    "scale_rewards": 'algorithm.kind: "grpo" divides by the spread of the rewards, "dr_grpo" does not',
    "importance_sampling_level": 'algorithm.kind = "gspo" for whole sequences',
    # evaluation, saving, logging
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "val_period": "eval.every",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "report_to": "track.to",
    "logger": "track.to",
    "wandb_project": "track.project",
    "project_name": "track.project",
    "experiment_name": "name",
    "run_name": "name",
    "output_dir": "--run-dir of `tandem train`",
    "n_gpus_per_node": "parallel.ranks",
    "num_processes": "parallel.ranks",
    "gpus_per_node": "parallel.ranks",
    # tables
    "trainer": "tables [train], [eval] and [checkpoint]",
    "training": "a table [train]",
    "actor_rollout_ref": "tables [model], [train] and [engine]",
    "policy": "tables [model] and [train]",
    "generation": "tables [engine] and [train]",
    "orchestrator": "tables [environment] and [train]",
    "generator": "a table [engine]",
    "dataset": "a table [data]; in RL, [environment]",
    "env": "a table [environment]",
    "reward_funcs": _REWARD,
    "reward_model": _REWARD,
}

VALUES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": "adamw_offload",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "reinforce_plus_plus": "reinforce_pp",
    "dr.grpo": "dr_grpo",
    "drgrpo": "dr_grpo",
    "opd": "distill",
    "raft": "rejection_sampling",
    "best_of_n": "rejection_sampling",
    "huggingface": "hf",
    "transformers": "hf",
    "sglang": "remote",
}

REWARDS = {  # TRL's ready functions
    "accuracy_reward": '{ fn = "maths", answer = "solution" }',
    "reasoning_accuracy_reward": '{ fn = "maths", answer = "solution" }, with model.thinking = true',
    "think_format_reward": '"tags"',
    "get_soft_overlong_punishment": '{ fn = "length", most = 200 }',
}

RECIPES = {
    "rl": (
        "grpo",
        "ppo",
        "rloo",
        "dapo",
        "gspo",
        "cispo",
        "dr_grpo",
        "reinforce",
        "reinforce_pp",
        "gkd",
        "reinforce++",
        "raft",
        "best_of_n",
        "rejection_sampling",
    ),
    "sft": ("supervised", "finetune", "fine-tune", "fine_tune", "lora", "qlora", "cpt"),
    "preference": ("dpo", "ipo", "orpo", "kto", "pairs", "reward"),
}


def of_field(name: str) -> str:
    """Return how another library's setting is written here; empty if it is not known."""
    return FIELDS.get(name.lower().replace("-", "_"), "")


def of_value(value: object, allowed: list[str]) -> str:
    """Return the allowed value that is meant; empty if none is."""
    name = str(value).lower().replace("-", "_")
    meant = VALUES.get(name, name)
    return meant if meant in allowed else ""


def of_recipe(value: object) -> str:
    """Return the recipe that is meant by an algorithm's name; empty if none is."""
    name = str(value).lower()
    return next((recipe for recipe, names in RECIPES.items() if name == recipe or name in names), "")

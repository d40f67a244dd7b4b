"""Suggests a flag for one that does not exist."""

import difflib
from collections.abc import Collection

# Names of our flags in other programs.
_ALIASES = {
    "model_dir": "output output_dir out out_dir outdir log_dir logdir logs save_dir "
    "checkpoint checkpoints checkpoint_dir ckpt ckpt_dir job_dir workdir work_dir "
    "run_dir resume resume_from",
    "data_dir": "data_root tfds_dir",
    "dataset": "data dataset_name data_path train_data train_dataset train_dir input "
    "source",
    "eval_dataset": "val_data val_dataset val_dir test_data test_dataset eval_data "
    "validation_data validation_dataset",
    "image_size": "size img_size imgsz resolution input_size resize",
    "num_classes": "classes n_classes nb_classes",
    "model": "arch architecture net network backbone model_name",
    "train_epochs": "epochs epoch num_epochs n_epochs max_epochs",
    "max_train_steps": "steps max_steps num_steps train_steps num_batches",
    "batch_size": "bs batch b global_batch_size train_batch_size",
    "optimizer": "opt optim",
    "learning_rate": "lr base_lr init_lr learn_rate",
    "lr_schedule": "schedule scheduler lr_scheduler lr_decay sched",
    "weight_decay": "wd decay l2",
    "dtype": "precision mixed_precision amp fp16 bf16 use_fp16 half floatx",
    "num_gpus": "gpus gpu n_gpus ngpus num_devices devices towers num_towers "
    "nproc_per_node world_size",
    "gpu_indices": "gpu_ids gpu_id device_ids visible_devices",
    "recipe": "augment augmentation aug transforms preprocessing",
    "randaugment": "rand_augment autoaugment auto_augment",
    "mix": "mixup cutmix",
    "seed": "random_seed rng_seed tf_random_seed",
    "eval_only": "eval evaluate evaluate_only test test_only validate",
    "clean": "overwrite force fresh restart",
    "overwrite": "force clean",
    "variable_update": "strategy distribution_strategy distribute builder",
    "split_ratios": "tower_shares shares",
    "enable_xla": "xla jit jit_compile use_xla",
    "steps_per_loop": "steps_per_execution iterations_per_loop",
    "log_steps": "log_every log_interval print_freq log_every_n_steps display_every",
    "profile_steps": "profile profiler trace",
    "save_every": "save_interval save_freq save_checkpoints_steps",
    "keep_checkpoints": "max_to_keep keep save_total_limit",
    "bad_records": "skip_errors ignore_errors",
    "shuffle_mb": "shuffle_buffer shuffle_buffer_size buffer_size",
    "shards": "num_shards",
    "verbosity": "verbose quiet log_level",
    "output": "out out_file file",
}


def unknown_flag(name: str, known: Collection[str]) -> str:
    """Returns an error message for an unknown flag, with a flag that may be meant.

    Args:
        name: The received flag, without dashes.
        known: The existing flags.
    """
    plain = name.replace("-", "_").lower()
    meant = [plain] if plain in known else _by_alias(plain, known)
    meant = meant or difflib.get_close_matches(plain, known, n=1, cutoff=0.7)
    hint = ""
    if meant:
        hint = f" (did you mean {' or '.join(f'--{flag}' for flag in meant)}?)"
    return f"Received --{name}, but there is no such flag{hint}; see --help."


def _by_alias(name, known):
    return [
        flag
        for flag, aliases in _ALIASES.items()
        if flag in known and name in aliases.split()
    ]

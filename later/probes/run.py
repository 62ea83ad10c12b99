import sys, os
from h import *
import h, p1, p2, p3, p4, p5
first = """batch_size_changed gradcache gan_two_engines head_replaced_new_engine unfreezing lora_alternate deepcopy_pickle_between swa functional_call_stacked post_accumulate_and_tensor_hooks activation_hooks
autograd_grad_params selective_checkpoint_within custom_function_in_block odd_parameters stochastic_depth_by_rank early_exit_by_batch mixture_idle_rank fork_workers prune_mid_training parametrize_mid_training layer_removed_mid_training
annealed_attribute aux_loss_global_list features_hooked_inside retain_grad_gradcam tied_after_first_steps tied_after_initialize compiled_whole_by_user compiled_function_inside custom_op dataclass_between_blocks t5_like rollback rollback_in_accumulation
eval_and_save_mid_accumulation oom_in_forward_halved oom_in_backward_retry keyboard_interrupt_in_backward load_other_optimizer lr_finder skip_after_forward_all dummy_loss_on_a_rank parts_called module_called_directly anomaly_profiler_deterministic
embedding_gradient_freelb weight_norm_spectral sched_plateau packed_sequence""".split()
order = first + [c for c in CASES if c not in first]
os.makedirs("claim", exist_ok=True)
def nxt():
    for c in order:
        try: os.mkdir(f"claim/{c}"); return c
        except FileExistsError: pass
argv = sys.argv[:1]
while (c := nxt()):
    sys.argv[:] = [argv[0], c]; main()

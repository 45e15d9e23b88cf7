"""The tests over torch's list of optimizers (optim_db.py) stand for all of torch's own, and for every optimizer of ours."""

import unittest

import test_optim_db_loops  # noqa: F401  (each says which of torch's tests it covers)
import test_optim_db_state  # noqa: F401
import test_optim_db_steps  # noqa: F401
from optim_db import COVERED, ENTRIES
from support import KINDS, Case

# Those of torch's tests that do not apply, and why: nothing but these four reasons.
REASONS = ("differentiable", "sparse", "foreach and fused", "float64")
INAPPLICABLE = {
    "TestDifferentiableOptimizer": "differentiable: a step runs outside autograd; refused at construction",
    "rosenbrock_sparse": "sparse: such gradients are refused; its dense half is test_rosenbrock",
    "peak_memory_foreach": "foreach and fused: the switches change nothing",
    "foreach_large_tensor": "foreach and fused: the switches change nothing",
    "fused_large_tensor": "foreach and fused: the switches change nothing",
    "defaults_changed_to_foreach": "foreach and fused: there is one implementation",
    "errors of options beside a switch": "foreach and fused: what torch refuses beside one works here",
    "foreach_matches_forloop, in float64": "float64: refused where it trains; the other dtypes are here",
}
# All of TestOptimRenewed.
TORCHS_TESTS = """
can_load_from_to_named_state_dict can_load_older_state_dict complex complex_2d cpu_load_state_dict
deepcopy_copies_all_public_attrs defaults_changed_to_foreach errors foreach_large_tensor
foreach_matches_forloop forloop_goes_right_direction forloop_goes_right_direction_multigpu
fused_cpu_matches_cuda fused_does_not_step_if_foundinf fused_error_on_params_on_meta fused_large_tensor
fused_matches_forloop grad_scaling_autocast_fused_optimizers load_nontensor_step load_state_dict_post_hook
load_state_dict_pre_hook_and_prepend load_state_dict_pre_post_hook mixed_device_dtype non_empty_state
optim_infos_do_not_specify_global_cliquey_kwargs optimizer_can_be_printed
param_group_with_lrscheduler_goes_right_direction param_groups_lr param_groups_weight_decay
peak_memory_foreach rosenbrock_sparse save_load_equality_with_weights_only
second_order_optims_return_consistent_types set_default_dtype_works_with_foreach state_dict_deterministic
state_dict_post_hook state_dict_pre_hook state_dict_pre_post_hook state_dict_with_cuda_params step_all_hooks
step_is_noop_for_zero_grads step_is_noop_when_params_have_no_grad step_post_hook step_pre_hook tensor_lr
""".split()


class Coverage(Case):
    def test_only_four_things_do_not_apply(self):
        for name, reason in INAPPLICABLE.items():
            self.assertTrue(reason.startswith(REASONS), name)

    def test_every_test_of_torch(self):
        self.assertEqual(set(TORCHS_TESTS) - COVERED, set(TORCHS_TESTS) & set(INAPPLICABLE))

    def test_every_optimizer_of_ours(self):
        self.assertEqual({info.name for info in ENTRIES}, {kind.__name__ for kind in KINDS})


if __name__ == "__main__":
    unittest.main()

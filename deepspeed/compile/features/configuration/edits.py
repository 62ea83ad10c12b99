# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (
        "deepspeed/runtime/config.py",
        "section compile",
        "CompileConfig(**param_dict.get('compile', {}))",
        "CompileConfig.of(param_dict.get('compile', {}))",
    ),
    (
        ENGINE,
        "import of configuration",
        IMPORT,
        f"from deepspeed.compile.features.configuration import calls as configuration\n{IMPORT}",
    ),
    (
        ENGINE,
        "beginning of an engine",
        "        self._do_sanity_check()\n        if self.log_level() is not None:\n",
        "        self._do_sanity_check()\n        configuration.refuse_at_the_beginning(self, model)\n"
        "        if self.log_level() is not None:\n",
    ),
    (
        ENGINE,
        "models that differ by rank",
        "        # zero.Init() handles device placement of model\n",
        "        configuration.refuse_other_models(self)\n        # zero.Init() handles device placement of model\n",
    ),
    (
        ENGINE,
        "optimizers that differ by rank",
        "            log_dist(f'Creating {model_dtype} ZeRO stage {zero_stage} optimizer', ranks=[0])\n\n"
        "            if isinstance(self.module, PipelineModule):\n",
        "            log_dist(f'Creating {model_dtype} ZeRO stage {zero_stage} optimizer', ranks=[0])\n"
        "            configuration.refuse_other_optimizers(self, optimizer)\n\n"
        "            if isinstance(self.module, PipelineModule):\n",
    ),
    (
        ENGINE,
        "end of deepspeed.initialize()",
        "        if self.dist_backend is None:\n            self.enable_backward_allreduce = False\n\n"
        "    def _optimized_linear_offload_setup",
        "        if self.dist_backend is None:\n            self.enable_backward_allreduce = False\n"
        "        configuration.refuse_at_the_end(self)\n\n"
        "    def _optimized_linear_offload_setup",
    ),
)

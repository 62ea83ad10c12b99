# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (
        "deepspeed/runtime/config.py",
        "beginning of a configuration",
        "        self._initialize_params(param_dict)\n",
        "        CompileConfig.refuse_elsewhere(param_dict)\n        self._initialize_params(param_dict)\n",
    ),
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
        f"from deepspeed.compile.features.configuration import initialize as configuration\n{IMPORT}",
    ),
    (
        ENGINE,
        "beginning of an engine",
        "        self._do_sanity_check()\n        if self.log_level() is not None:\n",
        "        self._do_sanity_check()\n        configuration.refuse_at_the_beginning(self, model, args)\n"
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
    (
        ENGINE,
        "refusal of a backend",
        'f"Backend {backend} is not supported for DeepCompile."',
        "f\"Backend {backend} is not supported for DeepCompile; use 'inductor' or 'eager'\"",
    ),
    # Only the text changes: it says what to do.
    (
        ENGINE,
        "refusal of an engine without an optimizer",
        '"zero stage {} requires an optimizer".format(zero_stage)',
        '"zero stage {} requires an optimizer; give deepspeed.initialize() an optimizer, or, for an engine "\\\n'
        '                "that does not train, set zero_optimization.stage to 0".format(zero_stage)',
    ),
    (
        ENGINE,
        "import of self_compile",
        IMPORT,
        f"from deepspeed.compile.features.configuration import self_compile\n{IMPORT}",
    ),
    (
        ENGINE,
        "warning in forward()",
        "if self.is_deepcompile_enabled() and not self.is_deepcompile_active() and not self.is_compiled:",
        "if self_compile.awaits_its_user(self):",
    ),
    # setup.py itself has added the next two anchors.
    (
        ENGINE,
        "beginning of forward()",
        "        around = deepcompile.around_forward(self, inputs, kwargs)\n",
        "        self_compile.before_forward(self)\n"
        "        around = deepcompile.around_forward(self, inputs, kwargs)\n",
    ),
    (
        ENGINE,
        "end of a step",
        "            deepcompile.after_step(self)\n",
        "            deepcompile.after_step(self)\n            self_compile.after_step(self)\n",
    ),
    (
        ENGINE,
        "beginning of compile()",
        "        if self.is_compiled:\n            if self._compile_mode == compile_mode:\n",
        "        compile_kwargs = self_compile.note_arguments(self, backend, compile_kwargs, schedule)\n"
        "        if self.is_compiled:\n            if self._compile_mode == compile_mode:\n",
    ),
)

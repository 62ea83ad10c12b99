# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: {file: {anchor: new text}}. In the text, ``...`` stands for the anchor."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = {
    "deepspeed/runtime/config.py": {
        "        self._initialize_params(param_dict)\n": "        CompileConfig.refuse_elsewhere(param_dict)\n...",
        "CompileConfig(**param_dict.get('compile', {}))": "CompileConfig.of(param_dict.get('compile', {}))",
    },
    ENGINE: {
        IMPORT: (
            "from deepspeed.compile.features.configuration import initialize as configuration\n"
            "from deepspeed.compile.features.configuration import self_compile\n..."
        ),
        "        self._do_sanity_check()\n": "...        configuration.refuse_at_the_beginning(self, model, args)\n",
        "        # zero.Init() handles device placement of model\n": (
            "        configuration.refuse_other_models(self)\n..."
        ),
        "\n            if isinstance(self.module, PipelineModule):\n": (
            "            configuration.refuse_other_optimizers(self, optimizer)\n..."
        ),
        "\n    def _optimized_linear_offload_setup": "        configuration.refuse_at_the_end(self)\n...",
        'f"Backend {backend} is not supported for DeepCompile."': (
            "f\"Backend {backend} is not supported for DeepCompile; use 'inductor' or 'eager'\""
        ),
        # Only the text changes: it says what to do.
        '"zero stage {} requires an optimizer".format(zero_stage)': (
            '"zero stage {} requires an optimizer; give deepspeed.initialize() an optimizer, or, for an engine "\\\n'
            '                "that does not train, set zero_optimization.stage to 0".format(zero_stage)'
        ),
        "if self.is_deepcompile_enabled() and not self.is_deepcompile_active() and not self.is_compiled:": (
            "if self_compile.awaits_its_user(self):"
        ),
        # Ask the parsed section, of the stage that has the pass: the configuration may be a path, and a value None.
        '(("zero_optimization" in self.config and "offload_optimizer" in self.config["zero_optimization"]': (
            "((self.zero_optimization_stage() == ZeroStageEnum.weights and self._config.zero_config.offload_optimizer"
        ),
        'and "offload_param" in self.config["zero_optimization"])': "and self._config.zero_config.offload_param)",
        # setup.py itself has added the next two anchors.
        "        around = deepcompile.around_forward(self, inputs, kwargs)\n": (
            "        self_compile.before_forward(self)\n..."
        ),
        "            deepcompile.after_step(self)\n": "...            self_compile.after_step(self)\n",
        "        if self.is_compiled:\n            if self._compile_mode == compile_mode:\n": (
            "        compile_kwargs = self_compile.note_arguments(self, backend, compile_kwargs, schedule)\n..."
        ),
    },
}

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How Inductor calls the reducer's operators, and which gradients the generated code donates.

Inductor reuses a buffer's memory once the buffer's last user has been called. The reducer reads a gradient later, so
it has to copy the gradient unless the gradient is donated. For a donated gradient, the generated code drops the buffer
right after the call, and Inductor gives the buffer's memory to no other buffer.
"""

from typing import Any, Sequence, Tuple

import torch
from torch._inductor import config, ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.lowering import add_needs_realized_inputs, make_fallback, register_lowering
from torch._inductor.virtualized import V

# Generated code calls this function in place of the operator: a call through torch's dispatcher takes several times as
# long as the rest of a small gradient's reduction.
_IMPORTS = (
    "from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module",
    "reduce_grad = reducer_module().reduce_grad",
)


class ReduceGradKernel(ir.FallbackKernel):
    """A call of ``reduce_grad`` in generated code."""

    constant_args: Tuple
    inputs: Sequence[Any]

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        # Decide here and not in the lowering, because only now all users of the buffer are known.
        donated = self._may_donate_gradient()
        self.constant_args = (*self.constant_args[:-1], donated)
        gradient = self.inputs[0]
        if donated and isinstance(gradient, ir.ReinterpretView):
            # A view of the buffer in another shape. Rebind the buffer's name, so that the reducer finds it unused.
            wrapper.writeline(f"{gradient.get_name()} = {gradient.codegen_reference()}")
            self.inputs = [V.graph.scheduler.name_to_buf[gradient.get_name()].node, *self.inputs[1:]]
        if not V.graph.cpp_wrapper:
            self.python_kernel_name = "reduce_grad"
            for line in _IMPORTS:
                wrapper.add_import_once(line)
        super().codegen(wrapper)
        if donated:
            name = self.inputs[0].get_name()
            wrapper.writeline(f"del {name}  # donated: its memory belongs to the reducer now")
            # Mark the buffer as freed, so that Inductor neither frees it again nor reuses its memory.
            wrapper.freed.add(name)

    def codegen_size_asserts(self, wrapper: PythonWrapperCodegen) -> None:
        """Does nothing: the function returns no tensor of the operator's shape and dtype, and nothing reads it."""

    def _may_donate_gradient(self):
        gradient = self.inputs[0]
        # With memory planning, buffers are parts of a pool, so donating one would donate its neighbours' memory too.
        if V.graph.cpp_wrapper or config.memory_planning:
            return False
        name = gradient.get_name()
        buffer = V.graph.scheduler.name_to_buf.get(name)
        if buffer is None or name in V.graph.mutated_buffers or buffer.get_aliases() or buffer.get_mutations():
            return False
        if not V.graph.sizevars.statically_known_equals(gradient.get_numel(), buffer.node.get_numel()):
            return False
        users = [user.node for user in buffer.users if not user.is_weak]
        return len(users) == 1 and getattr(users[0], "node", None) is self


def lower_reduce_grad(
    gradient: ir.TensorBox, registrations: ir.TensorBox, position: int, donated: bool = False
) -> Any:
    """Lowers one call of ``reduce_grad``. :class:`ReduceGradKernel` decides later whether the gradient is donated."""
    operator = torch.ops.deepcompile.reduce_grad.default
    return ir.TensorBox.create(ReduceGradKernel.create(operator, gradient, registrations, position, donated))


def register() -> None:
    """Makes Inductor call the operators. ``reducer_module()`` must have loaded them."""
    reduce_grad = torch.ops.deepcompile.reduce_grad.default
    add_needs_realized_inputs(reduce_grad)
    register_lowering(reduce_grad, type_promotion_kind=None)(lower_reduce_grad)
    # The scheduler puts all reductions before the call.
    make_fallback(torch.ops.deepcompile.end_backward.default)

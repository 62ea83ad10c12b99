# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How Inductor calls the reducer's operators: without a copy, where a gradient's memory is nobody else's.

Inductor uses a buffer's memory again once the buffer's last user has been called. A reduction reads its gradient
later than that, so the reducer copies, unless the gradient is donated: then the generated code forgets the buffer
right behind the call, and Inductor gives its memory to no other buffer.
"""

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import add_needs_realized_inputs, make_fallback, register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree


class ReduceGradKernel(ir.FallbackKernel):
    """A call of ``reduce_grad`` in generated code."""

    def codegen(self, wrapper):
        # Decided here and not when lowering, since only now every user of the buffer is known.
        donated = self._may_donate_gradient()
        self.constant_args = (*self.constant_args[:-1], donated)
        super().codegen(wrapper)
        if donated:
            name = self.inputs[0].get_name()
            wrapper.writeline(f"del {name}  # donated: its memory belongs to the reducer now")
            # So Inductor neither frees the buffer a second time nor uses its memory for another one.
            wrapper.freed.add(name)

    def _may_donate_gradient(self):
        gradient = self.inputs[0]
        # Memory planning cuts buffers out of pools, where giving one away would give its neighbours' memory too.
        if V.graph.cpp_wrapper or config.memory_planning or isinstance(gradient, ir.ReinterpretView):
            return False
        name = gradient.get_name()
        buffer = V.graph.scheduler.name_to_buf.get(name)
        if buffer is None or name in V.graph.mutated_buffers or buffer.get_aliases() or buffer.get_mutations():
            return False
        users = [user.node for user in buffer.users if not user.is_weak]
        return len(users) == 1 and getattr(users[0], "node", None) is self


def lower_reduce_grad(gradient, registrations, slot, after=None, donated=False):
    """Lowers one call. Whether the gradient is donated is up to :class:`ReduceGradKernel`."""
    operator = torch.ops.deepcompile.reduce_grad.default
    outputs = ReduceGradKernel.create(operator, gradient, registrations, slot, after, donated)
    return pytree.tree_map(lambda node: ir.TensorBox.create(node) if isinstance(node, ir.IRNode) else node, outputs)


def register():
    """Makes Inductor use these lowerings. The operators must have been loaded."""
    operator = torch.ops.deepcompile.reduce_grad.default
    add_needs_realized_inputs(operator)
    register_lowering(operator, type_promotion_kind=None)(lower_reduce_grad)
    # Without a lowering Inductor calls the operator as well, but torch 2.11 first writes a message with all operands,
    # each with what it was made of. Reductions follow each other, so with many layers that takes longer than all the
    # rest of the compilation.
    make_fallback(torch.ops.deepcompile.end_backward.default)

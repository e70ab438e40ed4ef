"""TMA descriptors of operands: the constant part, and the address of a call.

A descriptor (CUtensorMap) is encoded for each address by `torch_attn.driver`. The rest is prepared
with the launch's other arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class TensorMap(NamedTuple):
    """A kernel's argument that is a TMA descriptor of a launch's tensor number `operand`.

    `fields` are those of Triton's `TensorDescriptor` except `base`.
    """

    operand: int
    fields: dict[str, Any]

    @classmethod
    def of(
        cls,
        operand: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, int],
        layout: Any,
    ) -> TensorMap:
        """Describe the heads of a [B, S, H, D] tensor, as the kernel's [B, H, S, D].

        Args:
            shape, strides: the tensor's. Strides are multiples of 16 bytes.
            box: rows and columns of a tile.
            layout: the tile's in shared memory.
        """
        order = 0, 2, 1, 3
        shape, strides = (tuple(x[i] for i in order) for x in (shape, strides))
        return cls.of_boxes(operand, shape, strides, (1, 1, *box), layout)

    @classmethod
    def of_boxes(
        cls,
        operand: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        layout: Any,
    ) -> TensorMap:
        """Describe a tensor unchanged; `box` is the shape that one instruction loads."""
        *outer, last = zip(shape, strides, strict=True)
        # The stride of an axis with one element may be anything; TMA wants it aligned.
        aligned = [stride if size > 1 else shape[-1] for size, stride in outer]
        fields = {
            "shape": list(shape),
            "strides": [*aligned, last[1]],
            "block_shape": list(box),
            "layout": layout,
        }
        return cls(operand, fields)

    def bind(self, base: Any) -> Any:
        """Return Triton's `TensorDescriptor` of a tensor, or of anything with a `data_ptr`.

        Triton's checks are skipped: they take as long as the rest of a launch.
        """
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        descriptor = TensorDescriptor.__new__(TensorDescriptor)
        descriptor.__dict__.update(self.fields, base=base)
        return descriptor

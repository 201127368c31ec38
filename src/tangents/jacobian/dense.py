"""The dense way: J itself, for few parameters or few inputs, such as a last layer."""

from torch import Tensor

from tangents.jacobian.factors import Factor
from tangents.parameters import Columns


class DenseBlock:
    """J of one batch as a matrix, ``(n * o, p)``."""

    factors: dict[str, list[Factor]] = {}  # noqa: RUF012  # none: all rows are there

    def __init__(self, matrix: Tensor, outputs: Tensor, columns: Columns) -> None:
        self.matrix, self.outputs, self.columns = matrix, outputs, columns
        self.n, self.o = outputs.shape

    @property
    def nbytes(self) -> int:
        return self.matrix.numel() * self.matrix.element_size()

    def jvp(self, V: Tensor) -> Tensor:
        """``(p, k) -> (n, o, k)``."""
        return (self.matrix.to(V.dtype) @ V).reshape(self.n, self.o, -1)

    def vjp(self, U: Tensor) -> Tensor:
        """``(n, o, k) -> (p, k)``."""
        return self.matrix.to(U.dtype).T @ U.reshape(self.n * self.o, -1)

    def generic_rows(self) -> dict[str, Tensor]:
        return dict(zip(self.columns.names, self.matrix.split(list(self.columns.sizes), 1), strict=True))

    def release(self, graph: bool = True) -> None:
        """Nothing is held that could be made again."""

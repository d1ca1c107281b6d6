"""What the products of one weight need under a recipe: how each operand is rounded, and by what they are multiplied (report section 5.3).

Every product is taken as rows times rows: both operands [..., R, S] are quantised along S, the dimension that is summed over, which is
how matrix units read them. So of x [T, K], weight [N, K] and gradient [T, N] the forward takes x and the weight as they are, the input
gradient the gradient and the weight's transpose, the weight gradient the transposes of gradient and x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.architecture import SWIGLU
from core.config.recipe import WHOLE, Operand, Recipe
from core.kernels.activation import rounded_forward
from core.precision.activation import runs_kernels, swiglu_amax, swiglu_quantised
from core.precision.formats import NVFP4_ROWS, Quantised, is_symmetric, quantise
from core.precision.grouped import Grouped, largest_of_experts, quantise_grouped, quantise_grouped_columns
from core.precision.hadamard import POINTS, hadamard
from core.precision.history import AmaxHistory, Role
from core.precision.imagined import imagined, imagined_rows
from core.precision.operands import format_of
from core.precision.primary import PrimaryWeight
from core.precision.products import ProductsBackend
from core.precision.reach import Reach
from core.precision.rotated import fuses, quantise_rotated, quantise_rotated_columns, rotated, rotated_amax
from core.precision.rounding import content_noise

Watch = Callable[[Role, Tensor, Quantised | Grouped], None]


@dataclass(kw_only=True, eq=False)
class Quantiser:
    """The recipe of one weight's products.

    name: the weight's canonical name, which with `seed` and what is rounded decides random numbers. signs: of the Hadamard rotation, [16].
    history: of a recipe with delayed scaling. primary: the weight itself in low precision, where nothing else is kept of it. watch: is
    told every operand and what became of it. noting: whether what is measured counts for later steps. reach: of a scale of a whole
    tensor, where other ranks hold parts of it.
    """

    name: str
    recipe: Recipe
    seed: int
    signs: Tensor
    backend: ProductsBackend
    history: AmaxHistory | None = None
    primary: PrimaryWeight | None = None
    watch: Watch | None = None
    noting: bool = True
    reach: Reach | None = None

    def here(self) -> Quantiser:
        """This one where gradients are asked for. What is run only to be looked at, as an evaluation, neither is remembered nor watched."""
        return self if torch.is_grad_enabled() else replace(self, watch=None, noting=False)

    def read_with(self, first: Quantiser) -> None:
        """Remember of an input what the weight saw that has rounded it for this one too."""
        if self is not first and self.noting and self.history is not None and first.history is not None:
            self.history.see_as(first.history, "input")

    def rows(self, x_RS: Tensor, operand: Operand, role: Role) -> Quantised:
        """x [..., R, S], blocks along S."""
        if x_RS.is_meta:
            self._ask((*x_RS.shape[:-2], 1, 1), operand, role)
            return imagined(x_RS.shape, format_of(operand), x_RS.device)
        noise = self._noise(x_RS, f"{role}.rows") if operand.stochastic else None
        return self._quantised(x_RS, operand, role, noise)

    def columns(self, x_SR: Tensor, operand: Operand, role: Role) -> Quantised:
        """The transpose of x [..., S, R]: [..., R, S], blocks along S; a rotation fills S up to whole groups with zeros."""
        more = -x_SR.shape[-2] % POINTS if operand.hadamard else 0
        if x_SR.is_meta:
            *front, summed, rows = x_SR.shape
            self._ask((*front, 1, 1), operand, role)
            return imagined((*front, rows, summed + more), format_of(operand), x_SR.device)
        if more:
            x_SR = F.pad(x_SR, (0, 0, 0, more))
        # Of the rows of tokens, not of features: a token has the same neighbours under no two mappings.
        noise = self._noise(x_SR, f"{role}.columns").mT if operand.stochastic else None
        if not _rotates(x_SR, operand):
            # Kernels read the transpose where it lies; what copies it is the definition.
            turned = x_SR.mT.contiguous() if operand.hadamard else x_SR.mT
            return self._quantised(turned, operand, role, noise)
        amax = rotated_amax(x_SR, self.signs, along=0)
        if self._measures(operand):
            amax = self._given(amax, operand, role)
        made = quantise_rotated(x_SR, self.signs, along=0, amax=amax, noise=noise)
        if self.watch is not None:
            self.watch(role, rotated(x_SR, self.signs, along=0), made)
        return made

    def weight(self, weight: Tensor, operand: Operand, *, transposed: bool) -> Quantised:
        """A weight [..., N, K], summed over K, or over N where `transposed`."""
        if self.primary is not None:
            if self.primary.amax is not None and operand.scaling == "delayed":
                self._remembered(self.primary.amax, "weight")
            return self.primary.get(transposed=transposed)
        if transposed and is_symmetric(format_of(operand)) and not operand.hadamard and not operand.stochastic:
            return self.rows(weight, operand, "weight").transposed()
        return (self.columns if transposed else self.rows)(weight, operand, "weight")

    def rows_of_experts(self, x_RS: Tensor, counts_E: Tensor, operand: Operand, role: Role) -> Grouped:
        """Rows sorted by expert, blocks along S."""
        if x_RS.is_meta:
            rows, summed = x_RS.shape
            self._ask((len(counts_E),), operand, role)
            return imagined_rows((rows, summed), counts_E, format_of(operand), 0, x_RS.device)
        noise = self._noise(x_RS, f"{role}.rows") if operand.stochastic else None
        turned = hadamard(x_RS, self.signs) if operand.hadamard else x_RS
        made = quantise_grouped(
            turned, counts_E, format_of(operand), amax_E=self._amax_E(turned, counts_E, operand, role), noise=noise
        )
        if self.watch is not None:
            self.watch(role, turned, made)
        return made

    def rows_of_swiglu(
        self, product_R2F: Tensor, weight_R: Tensor | None, counts_E: Tensor, operand: Operand, role: Role
    ) -> Grouped:
        """What `rows_of_experts` makes of SwiGLU times a row's weight, rounded to the product's dtype: in one pass where kernels can."""
        if operand.hadamard or operand.stochastic or not runs_kernels(product_R2F):
            return self.rows_of_experts(rounded_forward(product_R2F, SWIGLU, weight_R), counts_E, operand, role)
        amax_E = None
        if self._measures(operand):
            amax_E = self._given(swiglu_amax(product_R2F, weight_R, counts_E), operand, role)
        made = swiglu_quantised(product_R2F, weight_R, counts_E, format_of(operand), amax_E=amax_E)
        if self.watch is not None:
            self.watch(role, rounded_forward(product_R2F, SWIGLU, weight_R), made)
        return made

    def columns_of_experts(self, x_RS: Tensor, counts_E: Tensor, operand: Operand, role: Role) -> Grouped:
        """The transpose of rows sorted by expert: [S, R], blocks along R, in whole blocks of an expert's own."""
        if x_RS.is_meta:
            summed, rows = x_RS.shape
            self._ask((len(counts_E),), operand, role)
            return imagined_rows((rows, summed), counts_E, format_of(operand), 1, x_RS.device)
        noise = self._noise(x_RS, f"{role}.columns").mT if operand.stochastic else None
        if _rotates(x_RS, operand):
            amax_E = rotated_amax(x_RS, self.signs, along=0, counts_E=counts_E)
            if self._measures(operand):
                amax_E = self._given(amax_E, operand, role)
            made = quantise_rotated_columns(x_RS, counts_E, self.signs, amax_E=amax_E, noise=noise)
            if self.watch is not None:
                self.watch(role, rotated(x_RS, self.signs, along=0), made)
            return made
        turned = hadamard(x_RS.mT.contiguous(), self.signs).mT if operand.hadamard else x_RS
        made = quantise_grouped_columns(
            turned, counts_E, format_of(operand), amax_E=self._amax_E(turned, counts_E, operand, role), noise=noise
        )
        if self.watch is not None:
            self.watch(role, turned.mT, made)
        return made

    def _quantised(self, x: Tensor, operand: Operand, role: Role, noise: Tensor | None) -> Quantised:
        turned = hadamard(x, self.signs) if operand.hadamard else x
        amax = self._given(_largest(turned, (-2, -1)), operand, role) if self._measures(operand) else None
        made = quantise(turned, format_of(operand), amax=amax, noise=noise)
        if self.watch is not None:
            self.watch(role, turned, made)
        return made

    def _amax_E(self, x_RS: Tensor, counts_E: Tensor, operand: Operand, role: Role) -> Tensor | None:
        return self._given(_largest_of_experts(x_RS, counts_E), operand, role) if self._measures(operand) else None

    def _measures(self, operand: Operand) -> bool:
        """Whether the amax of a whole tensor is not for `quantise` to find: of earlier steps, or over other ranks too."""
        return operand.scaling == "delayed" or (self.reach is not None and operand.scaling in WHOLE)

    def _ask(self, shape: tuple[int, ...], operand: Operand, role: Role) -> None:
        """Of a plan: what the other ranks would be asked."""
        if self.reach is not None and operand.scaling in WHOLE:
            self.reach.largest(role, torch.empty(shape, device="meta"))

    def _given(self, measured: Tensor, operand: Operand, role: Role) -> Tensor:
        """What stands for the amax that was measured here."""
        if self.reach is not None:
            measured = self.reach.largest(role, measured)
        return self._remembered(measured, role) if operand.scaling == "delayed" else measured

    def _remembered(self, measured: Tensor, role: Role) -> Tensor:
        assert self.history is not None, f"{self.name}: delayed scaling remembers"
        return self.history.amax(role, measured, self.recipe.margin, note=self.noting)

    def _noise(self, x: Tensor, which: str) -> Tensor:
        return content_noise(self.seed, f"{self.name}:{which}", x)


def _rotates(x: Tensor, operand: Operand) -> bool:
    """Whether kernels rotate an operand and round it in one pass."""
    return operand.hadamard and format_of(operand) == NVFP4_ROWS and fuses(x)


def _largest(x: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    """The largest size over some dimensions, which stay as ones; zero without elements."""
    return x.abs().amax(dimensions, keepdim=True) if x.numel() else x.sum(dimensions, keepdim=True)


def _largest_of_experts(x_RS: Tensor, counts_E: Tensor) -> Tensor:
    """The largest size in each expert's rows [E], zero without rows."""
    return largest_of_experts(_largest(x_RS, (1,))[:, 0].float(), counts_E)

"""Where the tests of kernels run, as in tests/core/kernels."""

from __future__ import annotations

from tests.core.kernels.conftest import device

__all__ = ["device"]

"""The nine mappings of the report (arXiv 2603.07685, tables 11 and 20, layouts of section 9.2.2), as this zoo writes them.

Where no layout is printed: the Qwen3 rows count embedding and loss as a layer each, which the text says; the DeepSeek-V3 rows are
spread evenly. The H100 row of DeepSeek-V3 has pp 8, of table 17 and section 9.2.2, where table 20 says 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.config.architecture import ModelConfig
from core.config.family import find_family
from core.config.mapping import ParallelConfig

DEEPSEEK, QWEN = ("deepseek_v3", "671b"), ("qwen3", "235b_a22b")
QWEN_24 = "Et*3|(tttt|)*22tttL"
QWEN_48 = "Et|(tt|)*46tL"


@dataclass(frozen=True, kw_only=True)
class PublishedMapping:
    """One row: model and size as `find_family` knows them, the number of GPUs, and the mapping."""

    name: str
    size: tuple[str, str]
    ranks: int
    parallel: ParallelConfig

    @property
    def model(self) -> ModelConfig:
        """The model that the row is printed for."""
        family, size = self.size
        return find_family(family).size(size).model


def _row(name: str, size: tuple[str, str], ranks: int, parallel: ParallelConfig) -> PublishedMapping:
    return PublishedMapping(name=f"{size[0]}/{name}", size=size, ranks=ranks, parallel=parallel)


NINE = (
    _row("gb300/256_mxfp8", DEEPSEEK, 256, ParallelConfig(pp=4, vpp=4, ep=64)),
    _row("gb200/256_mxfp8", DEEPSEEK, 256, ParallelConfig(pp=4, vpp=4, ep=64, layout="Et*4|(tttt|)*14tmL")),
    _row("gb200/256_bf16", DEEPSEEK, 256, ParallelConfig(pp=8, vpp=4, ep=32)),
    _row("h100/1024_fp8blk", DEEPSEEK, 1024, ParallelConfig(tp=2, pp=8, vpp=4, ep=64, layout="Et*3|(tt|)*29m|L")),
    _row("gb300/256_mxfp8", QWEN, 256, ParallelConfig(pp=4, vpp=6, ep=64, layout=QWEN_24)),
    _row("gb200/256_mxfp8", QWEN, 256, ParallelConfig(pp=4, vpp=6, ep=64, layout=QWEN_24)),
    _row("gb200/256_bf16", QWEN, 256, ParallelConfig(pp=4, vpp=12, ep=32, layout=QWEN_48)),
    _row("h100/256_bf16", QWEN, 256, ParallelConfig(tp=2, pp=8, vpp=4, ep=32, layout="Ett|(ttt|)*30ttL")),
    _row("gb300/128_mxfp8_131072", QWEN, 128, ParallelConfig(tp=4, cp=4, pp=4, vpp=12, ep=32, layout=QWEN_48)),
)


def on_deepseek(mapping: PublishedMapping) -> PublishedMapping:
    """The same mapping for DeepSeek-V3, spread evenly where its layout is another model's."""
    if mapping.size == DEEPSEEK:
        return mapping
    even = replace(mapping.parallel, layout=None)
    return replace(mapping, name=f"{mapping.name} on {DEEPSEEK[0]}", size=DEEPSEEK, parallel=even)

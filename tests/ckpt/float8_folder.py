"""Model folders in float8 blocks, made by hand from folders of the transformers library."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def to_float8(folder: Path, *, scales: torch.dtype = torch.float32, narrow: torch.dtype = torch.bfloat16) -> set[str]:
    """Give the projections of a folder of one file the blocks that DeepSeek-V3 ships, the largest value of a block as 448, and all
    else but the expert bias the dtype `narrow`; the names of the projections."""
    path = folder / "model.safetensors"
    found, names = load_file(path), set()
    for name, tensor in list(found.items()):
        if not (name.endswith("_proj.weight") or name.endswith("_proj_with_mqa.weight")) or "eh_proj" in name:
            found[name] = tensor if name.endswith("bias") else tensor.to(narrow)
            continue
        names.add(name)
        high, wide = (-(-size // 128) for size in tensor.shape)
        numbers, scale = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(high, wide, dtype=scales)
        for i in range(high):
            for j in range(wide):
                block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
                scale[i, j] = tensor[block].abs().max() / 448
                numbers[block] = (tensor[block] / scale[i, j].float()).to(torch.float8_e4m3fn)
        found[name], found[f"{name}_scale_inv"] = numbers, scale
    save_file(found, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": QUANTIZATION, "dtype": str(narrow).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return names

"""What an assembler and a disassembler say about a compiled kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from triton import knobs

# How a kernel goes on about registers that it has not: on the stack.
_NVIDIA = {"registers": "REG", "stack": "STACK", "local": "LOCAL"}
_AMD = {"registers": "vgpr_count", "stack": "private_segment_fixed_size"}
_AMD |= {"spilled_registers": "vgpr_spill_count", "spilled_scalars": "sgpr_spill_count"}

_JUMPS = "BRA", "s_branch", "s_cbranch"


@dataclass(frozen=True)
class Compiled:
    """A kernel's code.

    Attributes:
        text: PTX, or AMD's assembly.
        binary: What a GPU loads.
        is_amd: Whether it is an AMD one.
        threads: Of a program.
        shared: Bytes of shared memory.
    """

    text: str
    binary: bytes
    is_amd: bool
    threads: int
    shared: int

    @classmethod
    def of(cls, kernel: Any) -> Compiled:
        """What Triton has compiled."""
        is_amd = "amdgcn" in kernel.asm
        names = ("amdgcn", "hsaco") if is_amd else ("ptx", "cubin")
        text, binary = (kernel.asm[name] for name in names)
        threads = kernel.metadata.num_warps * kernel.metadata.target.warp_size
        return cls(text, binary, is_amd, threads, kernel.metadata.shared)

    def resources(self) -> dict[str, int]:
        """What a thread takes: registers, and bytes of memory of its own."""
        if self.is_amd:
            return {
                name: int(re.findall(rf"^\s+\.{key}:\s+(\d+)$", self.text, re.M)[0])
                for name, key in _AMD.items()
            }
        usage = self._told(knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
        return {name: int(re.findall(rf"\b{key}:(\d+)", usage)[0]) for name, key in _NVIDIA.items()}

    def instructions(self) -> list[str]:
        """The operations of the machine, in the order of their addresses."""
        return [name for _label, name, _target in self._lines() if name]

    def loops(self) -> list[int]:
        """How many instructions each loop has that has none in it, in the order of addresses."""
        found, labels, count = list[tuple[int, int]](), dict[str, int](), 0
        for label, name, target in self._lines():
            if label:
                labels[label] = count
            else:
                count += 1
                # A jump to itself, which fills the end of the code, is no loop.
                if name.startswith(_JUMPS) and labels.get(target, count) < count - 1:
                    found.append((labels[target], count))
        return [
            end - start
            for start, end in sorted(found)
            if not any(start <= s and e <= end for s, e in found if (s, e) != (start, end))
        ]

    def spills(self) -> dict[str, int]:
        """Loads and stores of a thread's own memory."""
        found = self.instructions()
        loads, stores = ("scratch_load", "scratch_store") if self.is_amd else ("LDL", "STL")
        return {
            "local_loads": sum(name.startswith(loads) for name in found),
            "local_stores": sum(name.startswith(stores) for name in found),
        }

    def units(self) -> set[str]:
        """What multiplies matrices on NVIDIA's GPUs, without the sizes of its part of the result:
        the order of a sum is this and what it sums at once."""
        names = re.findall(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[.\w:]*", self.text)
        return {re.sub(r"m\d+n\d+(?=k)", "", name) for name in names}

    def _lines(self) -> list[tuple[str, str, str]]:
        """Labels, or operations and the labels that they jump to."""
        if self.is_amd:
            # The part that runs; labels begin lines, directives have a dot.
            code = self.text[: self.text.index(".section\t.rodata")]
            found = re.findall(r"^(?:([.\w]+):|\t([a-z]\w+)(?:\s+(\.L\w+)|(?=\s|$)))", code, re.M)
        else:
            code = self._told(knobs.nvidia.nvdisasm.path)
            operation = r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(?:.*`\((\.\w+)\))?"
            found = re.findall(rf"^(?:(\.\w+):|{operation})", code, re.M)
        # They fill the end of the code.
        return [line for line in found if line[1] != "NOP"]

    def _told(self, *command: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(self.binary)
            cubin.flush()
            return subprocess.run(
                [*command, cubin.name], check=True, capture_output=True, text=True
            ).stdout

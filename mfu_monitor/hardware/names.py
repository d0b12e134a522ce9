"""Device names as words: whole tokens without vendor prefixes, with the suffixes that change what the device is.

Drivers order the words as they like (``A100-PCIE-40GB`` but ``A100 80GB PCIe``), older ones drop ``NVIDIA`` or say
``Tesla``. A name matches only if all its words do: ``A10`` is in ``A100`` and ``RTX 4090`` in ``RTX 4090 D``, and
neither is the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["ParsedName", "parse_name"]

# Words that vendors and drivers add or drop without naming another product.
_SILENT_WORDS = frozenset({"NVIDIA", "TESLA", "AMD", "INTEL", "INSTINCT", "GRAPHICS", "GPU"})
# AMD: module form factor and SR-IOV virtual function of a whole card; the CU count is checked in any case.
_AMD_SUFFIXES = frozenset({"OAM", "VF", "HF"})
_MIG = re.compile(r"\bMIG\b\s*(?P<profile>\d+C\.\d+G\.\d+GB|\d+G\.\d+GB)?.*$")
# Time-sliced profiles: https://docs.nvidia.com/vgpu/, "Virtual GPU Types" (A10-24Q, A100-40C, A16-8A, M60-2B).
_VGPU = re.compile(r"^(NVIDIA\s+)?GRID\b|-\d+[ABCQ]\b")
# The export variants' D (and its V2) is written apart or on the number: RTX 4090 D, RTX 5090D V2.
_GLUED_D = re.compile(r"\b(\d{4})D(V\d)?\b")
_MOBILE = re.compile(r"\bLAPTOP GPU\b|\bMAX-Q\b|\bMOBILE\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedName:
    """A device name taken apart."""

    words: tuple[str, ...]
    """Sorted, upper-case, without vendor words; what names are compared by."""
    mig_profile: str | None = None
    """``"1G.10GB"`` of a MIG slice; empty if the name says MIG and no more."""
    is_vgpu: bool = False
    is_mobile: bool = False
    """A laptop or Max-Q part, whose clock is the vendor's power setting."""

    def without_amd_suffixes(self) -> tuple[str, ...]:
        """The words less OAM, VF and HF."""
        return tuple(word for word in self.words if word not in _AMD_SUFFIXES)


def parse_name(name: str) -> ParsedName:
    """Take a device name apart.

    Example:
        >>> parse_name("NVIDIA A100-SXM4-80GB MIG 1g.10gb")
        ParsedName(words=('80GB', 'A100', 'SXM4'), mig_profile='1G.10GB', is_vgpu=False, is_mobile=False)
    """
    upper = " ".join(name.upper().split())
    mig = _MIG.search(upper)
    base = upper[: mig.start()] if mig else upper
    return ParsedName(
        words=_words(base),
        mig_profile=(mig["profile"] or "") if mig else None,
        is_vgpu=_VGPU.search(base) is not None,
        is_mobile=_MOBILE.search(base) is not None,
    )


def _words(upper: str) -> tuple[str, ...]:
    plain = _GLUED_D.sub(r"\1 D \2", re.sub(r"\((R|TM|C)\)", " ", upper))
    return tuple(sorted(word for word in re.split(r"[\s\-_/,()]+", plain) if word and word not in _SILENT_WORDS))

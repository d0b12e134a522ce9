"""What ``make compare`` runs: our counts and our peaks beside those of other tools."""

from __future__ import annotations

import compare_counters
import compare_peaks

if __name__ == "__main__":
    compare_counters.main()
    print()
    compare_peaks.main()
